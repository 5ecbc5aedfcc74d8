"""The plan of present settings for a model, and the samples of its packs."""

import numpy as np
import torch

from autotune.data_problems import warn_of_bad_data
from autotune.draft.present import Present
from autotune.events import Listener
from autotune.packing.material import PackOptions, job_material
from trials.data.packs import build_packs
from trials.errors import DataError
from trials.job import Job
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Layout, Packed, Plan, ZeroStage
from trials.stage import Stage


def plan_of(present: Present, model: str, dtype: str, devices: int) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan for a model folder and a number of devices, with remarks on where it differs from the settings.

    Raise ModelError for a model that cannot be built.
    """
    chain = build_skeleton(load_config(model, trust_remote_code=False), getattr(torch, dtype)).chain
    vision, language = len(chain.vision_layers), len(chain.language_layers)
    plain: ZeroStage = 1 if dtype == "bfloat16" else 0
    remarks = list(present.remarks)
    zero = present.zero if devices > 1 else plain  # one device has nothing to share
    if zero < plain:
        zero = plain
        remarks.append("without ZeRO there would be no float32 copy of bfloat16 weights here, so the plan has ZeRO 1")
    stage = Stage(
        vision=vision,
        language=language,
        recompute_vision=present.checkpoint_vision * vision,
        recompute_language=present.checkpoint_language * language,
    )
    layout = Layout(pipeline=1, data=devices, zero=zero)
    return Plan(packing=present.packing, layout=layout, stages=(stage,)), tuple(remarks)


def samples_of_pack(job: Job, packing: Packed, listener: Listener) -> tuple[float, int]:
    """Return (mean samples of a pack, samples that were packed), for a trainer whose batch counts packs.

    The lengths are kept for later commands. What of the data is skipped or unused is logged as warnings.

    Raise what `job_material` raises, and DataError where no sample is left.
    """
    material = job_material(job, job.data.sources[0].path, PackOptions(), listener)
    warn_of_bad_data(material.found)
    index = material.index
    order = np.arange(len(index), dtype=np.int64)
    packs = build_packs(index, order, packing, job.training.seed, job.data.oversize)
    if not len(packs):
        raise DataError(f"no sample fits into a pack of {packing.qt} tokens")
    return float(packs.counts.mean()), int(packs.counts.sum())
