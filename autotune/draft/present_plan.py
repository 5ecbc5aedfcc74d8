"""The plan of present settings for a model."""

import torch

from autotune.draft.present import Present
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Layout, Plan, Stage, ZeroStage


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
