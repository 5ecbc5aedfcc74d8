"""The samples of a step of a trainer whose batch counts packs, from the job's own data."""

import numpy as np

from autotune.events import Listener
from autotune.packing.material import PackOptions, job_material
from trials.data.packs import build_packs
from trials.errors import DataError
from trials.job import Job
from trials.plan import Packed


def samples_of_pack(job: Job, packing: Packed, listener: Listener) -> tuple[float, int]:
    """Return (mean samples of a pack, samples that were packed). The lengths are kept for later commands.

    Raise what `job_material` raises, and DataError where no sample is left.
    """
    index = job_material(job, job.data.sources[0].path, PackOptions(), listener).index
    order = np.arange(len(index), dtype=np.int64)
    packs = build_packs(index, order, packing, job.training.seed, job.data.oversize)
    if not len(packs):
        raise DataError(f"no sample fits into a pack of {packing.qt} tokens")
    return float(packs.counts.mean()), int(packs.counts.sum())
