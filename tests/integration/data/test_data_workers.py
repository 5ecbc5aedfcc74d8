"""Packs from data workers, and those that cannot be passed to their rank."""

import gc
import multiprocessing
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.small_shared_memory import loaded
from trials.data import loader
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.indexing import build_index
from trials.data.loader import micro_batches
from trials.data.records.sample import Encoder
from trials.errors import DataError, NoDecoder, Unwritable, in_brief
from trials.job import DataSection, Source
from trials.model.families import internvl
from trials.plan import Packed


@pytest.fixture(scope="module")
def encoder(example: Path) -> Encoder:
    return internvl.encoder(str(example / "model"))


@pytest.fixture(scope="module")
def epoch(example: Path, encoder: Encoder) -> Epoch:
    index, _ = build_index(DataSection(sources=(Source(path=Path("data/train.jsonl")),)), encoder, example)
    settings = EpochSettings(global_batch_samples=16, weights=CostWeights(unit=100.0, token=1.0, square=0.01))
    return build_epoch(index, Packed(qv=10, qt=500, qv_min=8, qt_min=400), settings, data_parallel=2)


def test_workers_give_the_same_micro_batches_in_the_same_order(epoch: Epoch, encoder: Encoder) -> None:
    alone, helped = (
        list(micro_batches(epoch.index, epoch, [0, 1], 0, encoder, pixels=True, workers=workers, on_error="fail"))
        for workers in (0, 2)
    )
    assert len(alone) == len(helped) == 2 * epoch.micro_batches
    for one, other in zip(alone, helped, strict=True):
        assert torch.equal(one.tokens.input_ids, other.tokens.input_ids)
        assert one.pixel_values is not None
        assert other.pixel_values is not None
        assert torch.equal(one.pixel_values, other.pixel_values)


class Decoder:
    """Garbage, once nothing else names it, that says when another process than its own collects it."""

    def __init__(self, collected: Path) -> None:
        self.itself, self.collected, self.process = self, collected, os.getpid()

    def __del__(self) -> None:
        if os.getpid() != self.process:
            self.collected.touch()


def test_workers_collect_no_garbage_of_their_rank(
    epoch: Epoch, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that is collected waits for its threads, of which a forked process has none."""

    def collecting(*arguments: Any, encode: Any = loader.encode, **options: Any) -> Any:
        gc.collect()
        return encode(*arguments, **options)

    monkeypatch.setattr(loader, "encode", collecting)
    gc.disable()
    try:
        Decoder(tmp_path / "collected")
        assert list(micro_batches(epoch.index, epoch, [0], 0, encoder, pixels=True, workers=1, on_error="fail"))
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert not (tmp_path / "collected").exists()


def test_a_package_that_is_missing_in_a_worker_is_named_without_its_traceback(
    epoch: Epoch, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def undecoded(*_: Any, **__: Any) -> None:
        raise NoDecoder("needs the package av")

    monkeypatch.setattr(loader, "encode", undecoded)
    batches = micro_batches(epoch.index, epoch, [0], 0, encoder, pixels=True, workers=1, on_error="skip")
    with pytest.raises(NoDecoder, match=r"^needs the package av$"):
        next(batches)


def test_a_rank_does_not_wait_for_ever_for_a_worker(
    epoch: Epoch, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_MOST_SECONDS", 1)
    monkeypatch.setattr(loader, "encode", lambda *_, **__: time.sleep(60))
    batches = micro_batches(epoch.index, epoch, [0], 0, encoder, pixels=True, workers=1, on_error="fail")
    try:
        with pytest.raises(DataError, match=r"^data workers gave no pack for 0\.0166667 minutes; see whether the disk"):
            next(batches)
    finally:
        for worker in multiprocessing.active_children():
            worker.kill()  # it ignores SIGTERM, for which the end of this process would wait


@pytest.mark.long
def test_data_workers_without_room_in_shared_memory_end_with_what_to_do(example: Path, tmp_path: Path) -> None:
    try:
        none, little, without_workers = loaded(example, tmp_path, ("4k", 1), ("64k", 1), ("4k", 0))
    except PermissionError:
        pytest.skip("no file system can be mounted here")
    remedy = "give a container more, as with `docker run --shm-size=16g` or `--ipc=host`, or set data.workers: 0"
    assert none == (
        f"shared memory (/dev/shm) has 0.0 MiB, 0.0 MiB of it free, too little to start data workers; {remedy}"
    )
    what = (
        r"has 0\.1 MiB, 0\.\d MiB of it free, too little for another pack of 0\.\d MiB, of which each data worker "
        "keeps two; "
    )
    assert re.search(f"{what}{re.escape(remedy)}$", little), little
    assert re.fullmatch(r"\d+ packs", without_workers)


@pytest.mark.parametrize("is_there", [True, False])
def test_data_workers_that_cannot_make_sockets_end_with_what_to_do(
    epoch: Epoch,
    encoder: Encoder,
    is_there: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, reason = (tmp_path / ("x" * 90), "AF_UNIX path too long") if is_there else (tmp_path / "gone", "No such")
    if is_there:
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", None)  # type: ignore[attr-defined]
    batches = micro_batches(epoch.index, epoch, [0], 0, encoder, pixels=True, workers=1, on_error="fail")
    with pytest.raises(Unwritable) as caught:
        list(batches)
    assert f"cannot make sockets in {in_brief(str(folder))} ({reason}" in str(caught.value)
    assert "set TMPDIR to a folder that stays and has a path of at most 75 characters" in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pack_for_which_no_pages_can_be_locked_says_so(
    epoch: Epoch, encoder: Encoder, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(tensor: torch.Tensor) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: out of memory")

    device = {"is_available": True, "current_accelerator": torch.device("cuda"), "current_device_index": 0}
    for name, value in {**device, "set_device_index": None}.items():
        monkeypatch.setattr(torch.accelerator, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    batches = micro_batches(
        epoch.index, epoch, [0], 0, encoder, pixels=True, workers=workers, on_error="fail", pin=True
    )
    with pytest.raises(MemoryError, match=r"^the host has no room for \d+ bytes of page-locked memory, which a pack"):
        next(batches)
