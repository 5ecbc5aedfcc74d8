"""Ranks of a loop of one's own that have read other data."""

import os
import shutil
from pathlib import Path

import pytest
from torch import distributed

from autotune import PackSampler, SampleDataset
from autotune.errors import PackError
from tests.machines.own_ranks import on_ranks
from tests.programs.processes import free_port
from tests.values.training import PACKED, job_of

pytestmark = pytest.mark.ranks


def packs_or_refusal(folder: Path, lost: Path | None, port: int) -> list[list[int]] | str:
    """Return the packs of this rank, or why it has none; rank 1 reads the data later, when a file is lost."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{rank}")
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    if rank == 1:
        distributed.barrier()
        if lost:
            lost.unlink()
    samples = SampleDataset(job_of(folder, folder / "output"))
    if rank == 0:
        distributed.barrier()
    try:
        return list(PackSampler(samples, PACKED, rank=rank, ranks=2))
    except PackError as error:
        return str(error)
    finally:
        distributed.barrier()  # the store is that of rank 0
        distributed.destroy_process_group()


@pytest.mark.parametrize("loses", [False, True])
def test_ranks_that_have_read_other_data_are_refused(loses: bool, example: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(example / "model")
    shutil.copytree(example / "data", tmp_path / "data")
    lost = next((tmp_path / "data" / "images").iterdir()) if loses else None
    found = on_ranks(packs_or_refusal, tmp_path, lost, free_port())
    refusals = [each for each in found if isinstance(each, str)]
    if not loses:
        assert not refusals
        return
    (refusal,) = refusals  # of the rank that came later
    rank, counts = found.index(refusal), (48, 47)
    assert refusal.startswith(
        f"rank {rank} has read {counts[rank]} samples in 48 records, but rank {1 - rank} has read other ones, "
        f"{counts[1 - rank]} in 48, so that their packs would differ; give the same files to the nodes of both"
    )
