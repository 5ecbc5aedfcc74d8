"""Ranks of a loop of one's own that have read other data."""

import os
import shutil
from dataclasses import replace
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


OTHER = replace(PACKED, qt=600)
CHANGES: dict[str, str] = {
    "": "",
    "looks": "",
    "plan": "packing is ",
    "seed": "seed is 5 and 0",
    "other folder": "data is ",
    "epoch": "epoch is 1 and 0",
    "state": "first step is 2 and 0",
    "rank": "ranks 0 and 1 both take the packs of rank 0",
}


def refusal_of(change: str, folder: Path, port: int) -> str:
    """Return why this rank gets no packs where rank 1 differs in something; rank 1 comes second."""
    rank = int(os.environ["RANK"])
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache-{rank}")
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    differs = change if rank else ""
    data = folder / "other" if differs == "other folder" else folder
    job = job_of(data, folder / "output", **({"training": {"seed": 5}} if differs == "seed" else {}))
    samples, packing = SampleDataset(job), OTHER if differs == "plan" else PACKED
    sampler = PackSampler(samples, packing, rank=0 if differs == "rank" else rank, ranks=2)
    if rank == 1:
        distributed.barrier()
    try:
        for epoch in range(2):
            sampler.set_epoch(epoch + (differs == "epoch"))
            if differs == "state":
                sampler.load_state_dict(sampler.state_dict(1))
            if change == "looks" and rank == 0:
                next(iter(sampler))
            assert list(sampler)
        return ""
    except PackError as error:
        return str(error)
    finally:
        if rank == 0:
            distributed.barrier()
        distributed.barrier()
        distributed.destroy_process_group()


@pytest.mark.parametrize("change", CHANGES)
def test_ranks_that_begin_other_steps_are_refused(change: str, example: Path, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        (folder / "model").symlink_to(example / "model")
        shutil.copytree(example / "data", folder / "data")
    next((tmp_path / "other" / "data" / "images").iterdir()).unlink()
    first, second = on_ranks(refusal_of, change, tmp_path, free_port())
    assert first == ""
    assert CHANGES[change] in second
    assert bool(second) is bool(CHANGES[change])
