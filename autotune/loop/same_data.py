"""The comparison of what the ranks of a loop have read, each by itself and perhaps on a node of its own."""

import hashlib
import json

from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from autotune.errors import PackError
from autotune.loop.samples import SampleDataset


def check_same_data(samples: SampleDataset) -> bool:
    """Raise PackError where this rank has other samples of the job than the first rank that called this.

    Return False where torch.distributed is not initialized, so that there is nothing to compare with.
    """
    if not distributed.is_initialized():
        return False
    job, index, rank = samples.job, samples.index, distributed.get_rank()
    # Samples of another model, or of other files, are another matter: a program may have several.
    read = json.dumps([section.model_dump(mode="json") for section in (job.model, job.data, job.evaluation)])
    digest = _digest(index.steps_digest.encode() + index.record.astype("<i8").tobytes())
    # The store waits for no rank, as a collective would do for ranks that make no sampler or have no device yet.
    answer = _get_default_store().compare_set(
        f"autotune/samples/{_digest(read.encode())}", "", json.dumps([digest, rank, len(samples), samples.records])
    )
    first, other, count, records = json.loads(answer)
    if first != digest:
        raise PackError(
            f"rank {rank} has read {len(samples)} samples in {samples.records} records, but rank {other} has read "
            f"other ones, {count} in {records}, so that their packs would differ; give the same files to the nodes of "
            "both, `data.on_error: fail` names the first that is missing"
        )
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
