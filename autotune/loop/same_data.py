"""The comparison of what the ranks of a loop have read and pack, each by itself and perhaps on a node of its own."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

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


def check_same_packs(identity: Mapping[str, Any], *, rank: int, ranks: int, epoch: int, first_step: int) -> None:
    """Raise PackError where a rank begins other steps than the first rank that began as many epochs, or its packs.

    `identity` are the values that decide the packs. Only ranks are compared that are all ranks of torch.distributed:
    of others it is not known which of them share steps. No rank waits for another one.
    """
    if not distributed.is_initialized() or not ranks == distributed.get_world_size() > 1:
        return
    store, process = _get_default_store(), distributed.get_rank()
    steps = {**identity, "epoch": epoch, "first step": first_step}
    mine, own = f"autotune/packs/of {process}", _digest(json.dumps(steps).encode())
    begun: list[str] = json.loads(store.compare_set(mine, "", "[]"))
    # A rank may look at a batch before the loop.
    if begun[-1:] != [own]:
        begun.append(own)
        store.set(mine, json.dumps(begun))
    key = f"autotune/packs/{len(begun)}"
    other, theirs = json.loads(store.compare_set(key, "", json.dumps([process, steps])))
    if changed := [name for name, value in steps.items() if theirs[name] != value]:
        differs = ", ".join(f"{name} is {steps[name]!r} and {theirs[name]!r}" for name in changed)
        raise PackError(
            f"ranks {process} and {other} begin other steps, of which they would train parts: {differs}; give all "
            "ranks the same job, data, plan, epoch and state. A rank that alone looks through other packs does so "
            "before torch.distributed is initialized"
        )
    holder = int(store.compare_set(f"{key}/{rank}", "", str(process)))
    if holder != process:
        raise PackError(
            f"ranks {holder} and {process} both take the packs of rank {rank}, so that those of another rank are not "
            "trained; give each its own, PackSampler(..., rank=torch.distributed.get_rank())"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
