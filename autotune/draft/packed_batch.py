"""The samples of a step of a trainer whose batch counts packs, from the job's own data."""

import numpy as np

from trials.data.index import DatasetIndex
from trials.data.packs import build_packs
from trials.job import Job
from trials.plan import Packed

FIRST = 1000
"""Samples of each source that are packed: their mean is known to about 2 %, in a second or two."""


def samples_of_pack(job: Job, packing: Packed) -> tuple[float, int]:
    """Return (mean samples of a pack, number of samples that were packed), of the first samples of each source.

    Raise ModelError or DataError for a model or data that cannot be read.
    """
    index = _first(job)
    order = np.arange(len(index), dtype=np.int64)
    packs = build_packs(index, order, packing, job.training.seed, job.data.oversize)
    return float(packs.counts.mean()), int(packs.counts.sum())


def _first(job: Job) -> DatasetIndex:
    from autotune.packing.material import PackOptions, job_material  # noqa: PLC0415 - imports what packs alone need

    sources = (
        source.model_copy(update={"sampling": f"first:{FIRST}"}) if source.sampling == "all" else source
        for source in job.data.sources
    )
    data = job.data.model_copy(update={"sources": tuple(sources)})
    return job_material(job.model_copy(update={"data": data}), job.data.sources[0].path, PackOptions()).index
