"""The memory meter of CUDA on statistics of an allocator. They are made up: no device was measured."""

import json
import logging
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from trials import wire
from trials.channels.folder import FolderChannel
from trials.engine.allocator import AllocatorPeaks, needed_bytes, usable_bytes
from trials.engine.memory import CudaMeter
from trials.offload.transfers import Transfers
from trials.outcome import Crash, OutOfMemory
from trials.plan import Layout
from trials.run import serving
from trials.tasks.answer import FailureReport, read_report
from trials.tasks.request import REQUEST

ASSETS = Path(__file__).parents[2] / "assets" / "allocator"
GIB = 1 << 30
CUDA = torch.device("cuda", 0)


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ASSETS / f"{name}.json").read_text())
    assert found["note"].startswith("Made up")
    return found


def peaks_of(name: str) -> AllocatorPeaks:
    return AllocatorPeaks.of(recorded(name)["statistics"])


class Allocator:
    """What `torch.cuda` tells of the allocator: the statistics before, then those behind the steps."""

    def __init__(self, patch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
        self.statistics, self.fraction, self.resets = case["before"], 1.0, 0
        memory = case["memory"]
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (memory["free"], memory["total"]))
        patch.setattr(torch.cuda, "memory_reserved", lambda device=None: memory["reserved"])
        patch.setattr(torch.cuda, "memory_stats", lambda device=None: self.statistics)
        patch.setattr(torch.cuda, "set_per_process_memory_fraction", self._limit)
        patch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device=None: self.fraction)
        patch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def _limit(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction

    def _reset(self, device: torch.device) -> None:
        self.resets += 1


def metered(patch: pytest.MonkeyPatch, name: str) -> tuple[CudaMeter, Allocator]:
    case = recorded(name)
    allocator = Allocator(patch, case)
    meter = CudaMeter(CUDA, case["limit"])
    allocator.statistics = case["statistics"]
    return meter, allocator


def test_the_limit_becomes_a_share_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, allocator = metered(monkeypatch, "even-packs")
    assert meter.limit_bytes == 75 * GIB
    assert (allocator.fraction, allocator.resets) == (75 / 79, 1)


def test_rounding_and_fragmentation_are_told_apart() -> None:
    peaks = peaks_of("even-packs")
    assert peaks.rounding == 41_950_117_376 - 41_943_040_123
    assert peaks.fragmentation == 43_218_108_416 - 41_950_117_376
    assert peaks.requested + peaks.rounding + peaks.fragmentation == peaks.reserved


@pytest.mark.parametrize("name", ["even-packs", "uneven-packs"])
def test_what_the_allocator_keeps_does_not_count_while_there_is_room(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The retries of "uneven-packs" are those of an earlier request to the same rank.
    meter, _ = metered(monkeypatch, name)
    assert meter.peak_bytes == peaks_of(name).allocated < peaks_of(name).reserved


def test_fragments_count_once_there_was_no_room_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, _ = metered(monkeypatch, "at-the-limit")
    assert meter.peak_bytes == peaks_of("at-the-limit").reserved == 75_157_733_376


def test_what_others_hold_lowers_the_limit_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    meter, allocator = metered(monkeypatch, "held-by-others")
    # Of 79 GiB 48 are free and 2 in the allocator: contexts and other processes have 29.
    assert meter.limit_bytes == 50 * GIB
    assert allocator.fraction == 50 / 79
    assert f"{50 * GIB} bytes left for this rank, less than its limit of {75 * GIB}" in caplog.text


def test_a_context_within_the_reserve_lowers_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        metered(monkeypatch, "even-packs")
    assert not caplog.records
    assert usable_bytes(79 * GIB, total=79 * GIB, free=78 * GIB, reserved=0) == 78 * GIB


def test_a_tensor_without_room_counts_to_what_was_in_tensors() -> None:
    message = recorded("out-of-memory")["message"]
    assert needed_bytes(message, 70 * GIB) == round(66.10 * GIB) + round(5.25 * GIB)
    # There was room for these bytes, but not in one piece.
    assert needed_bytes(message, 72 * GIB) == 72 * GIB
    assert needed_bytes("another message", 70 * GIB) == 70 * GIB
    assert needed_bytes("Tried to allocate 20.00 MiB. 512 bytes is allocated by PyTorch", 0) == 20 * (1 << 20) + 512


@pytest.mark.parametrize(
    ("memory_of", "is_limited", "limit"),
    [("out-of-memory", True, 70 * GIB), ("held-by-others", True, 50 * GIB), ("held-by-others", False, 50 * GIB)],
    ids=["of the job", "of what others leave", "of a profile"],
)
def test_a_rank_reports_what_it_needed_and_what_it_could_have(
    memory_of: str, is_limited: bool, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = recorded("out-of-memory")
    allocator = Allocator(monkeypatch, recorded(memory_of))
    if is_limited:
        CudaMeter(CUDA, case["limit"])
    allocator.statistics = case["statistics"]
    monkeypatch.setattr(wire, "decode", lambda kind, text: _Request(case["limit"]))
    (tmp_path / REQUEST).write_text("{}")
    cause = serving._cause(torch.OutOfMemoryError(case["message"]), 0, FolderChannel(tmp_path))
    assert isinstance(cause, OutOfMemory)
    assert (cause.limit_bytes, cause.needed_bytes) == (limit, round(66.10 * GIB) + round(5.25 * GIB))


OF_LIBRARIES = {
    "CUDA": torch.AcceleratorError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    "NCCL": torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"
    ),
    "NCCL, later": torch.distributed.DistBackendError("Last error:\nFailed to CUDA calloc async 608 bytes"),
    "cuBLAS": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}
"""Errors of libraries that take memory of the device outside of the allocator."""
OF_A_KERNEL = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("error", OF_LIBRARIES.values(), ids=OF_LIBRARIES)
def test_a_library_without_room_is_out_of_memory(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Allocator(monkeypatch, recorded("held-by-others"))
    monkeypatch.setattr(wire, "decode", lambda kind, text: _Request(0))
    (tmp_path / REQUEST).write_text("{}")
    cause = serving._cause(error, 0, FolderChannel(tmp_path))
    assert isinstance(cause, OutOfMemory)
    assert cause.needed_bytes == cause.limit_bytes == 50 * GIB


@pytest.mark.parametrize(
    "text", ["CUDA error: CUBLAS_STATUS_NOT_INITIALIZED", "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"]
)
def test_a_library_without_a_handle_is_out_of_memory_where_hardly_any_is_left(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case, error = recorded("held-by-others"), RuntimeError(text)
    (tmp_path / REQUEST).write_text("{}")
    monkeypatch.setattr(wire, "decode", lambda kind, text: _Request(0))
    for free, kind in ((20 << 20, OutOfMemory), (GIB, Crash)):
        Allocator(monkeypatch, case | {"memory": case["memory"] | {"free": free}})
        assert isinstance(serving._cause(error, 0, FolderChannel(tmp_path)), kind)

    def refused(_: object = None) -> NoReturn:
        raise OF_A_KERNEL

    monkeypatch.setattr(torch.cuda, "mem_get_info", refused)
    assert isinstance(serving._cause(error, 0, FolderChannel(tmp_path)), Crash)


def test_a_device_without_room_for_a_context_is_reported_in_the_words_of_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(_: object = None) -> NoReturn:
        raise OF_LIBRARIES["CUDA"]

    (tmp_path / REQUEST).write_text("{}")
    channel = FolderChannel(tmp_path)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refused)
    monkeypatch.setattr(wire, "decode", lambda kind, text: _Request(0))
    with pytest.raises(serving._Reported), serving._failures_reported(0, channel):
        refused()
    monkeypatch.undo()
    answer = read_report(channel, 0)
    assert answer is not None
    assert isinstance(answer.report, FailureReport)
    assert isinstance(answer.report.cause, Crash)
    assert "CUDA error: out of memory" in answer.report.cause.detail


def test_other_errors_and_the_memory_of_the_host_are_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = without_pages(OF_LIBRARIES["CUDA"], monkeypatch)
    assert isinstance(host, MemoryError)
    assert str(host).startswith("the host has no room for 4096 bytes of page-locked memory, which layers that offload")
    for error in (host, OF_A_KERNEL):
        assert isinstance(serving._cause(error, 0, FolderChannel(tmp_path)), Crash)


def test_the_error_of_a_kernel_that_shows_where_pages_are_locked_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert without_pages(OF_A_KERNEL, monkeypatch) is OF_A_KERNEL


def without_pages(error: Exception, patch: pytest.MonkeyPatch) -> Exception:
    """Return what a layer that offloads raises where page-locked memory is refused with an error."""

    def empty(*_: object, **__: object) -> torch.Tensor:
        raise error

    patch.setattr(torch.cuda, "Stream", lambda device: object())
    patch.setattr(torch, "empty", empty)
    with pytest.raises((MemoryError, RuntimeError)) as raised:
        Transfers(CUDA).host_bytes(4096)
    return raised.value


class _Request:
    """The parts of a request that name the stage and the limit."""

    def __init__(self, limit: int) -> None:
        self.memory_limit_bytes = limit
        self.plan = self
        self.layout = Layout(pipeline=1, data=1, zero=0)
