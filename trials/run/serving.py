"""One rank's answer to one request: the report of its task, or the cause of its failure."""

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trials import wire
from trials.engine.allocator import AllocatorPeaks, needed_bytes
from trials.engine.group import env_meeting, file_meeting, process_group
from trials.engine.memory import MemoryExceeded
from trials.errors import TrialsError
from trials.outcome import Crash, OutOfMemory
from trials.tasks.answer import UNWRITABLE, FailureReport, Report, begun_path, write_report
from trials.tasks.certifying.certifying import run_certification
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.request import REQUEST_FILE, Certification, Profile, Request, Training, Trial
from trials.tasks.session import open_session
from trials.tasks.training.stopping import stop_requests
from trials.tasks.training.training import run_training
from trials.tasks.trial import run_trial

_DETAIL_LINES = 6


def serve(folder: Path) -> bool:
    """Run the task of the request in `folder` and write a report; return False when it failed."""
    rank = int(os.environ["RANK"])
    with suppress(_Reported), _failures_reported(rank, folder):
        begun_path(folder, rank).touch()
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        # Without a launcher's address the ranks share the folder: a file in it needs no free port.
        meeting = env_meeting() if "MASTER_ADDR" in os.environ else file_meeting(folder / "rendezvous")
        world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        # Reported before the group is left: the other ranks fail as soon as this one leaves, and are not the cause.
        with process_group(rank, local_rank, world_size, meeting) as device, _failures_reported(rank, folder):
            report = _run(request, rank, device, folder)
        # Cycles would hold memory of this request that the next one would count as its own.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        _write(folder, rank, report)
        return True
    return False


class _Reported(Exception):
    """The request failed, and its report says why."""


@contextmanager
def _failures_reported(rank: int, folder: Path) -> Iterator[None]:
    try:
        yield
    except _Reported:
        raise
    except Exception as error:  # the process edge: whatever a rank raises becomes its report
        _write(folder, rank, FailureReport(cause=_cause(error, rank, folder)))
        raise _Reported from error


def _write(folder: Path, rank: int, report: Report) -> None:
    try:
        write_report(folder, rank, report)
    except OSError:  # the disk is full or read-only, also for the log: only the exit code can still say so
        traceback.print_exc()
        os._exit(UNWRITABLE)  # leaving the group would abort, as its file cannot be removed either


def _run(request: Request, rank: int, device: torch.device, folder: Path) -> Report:
    match request.task:
        case Profile() as task:
            return run_profile(request, task, device)
        case Trial() as task:
            with open_session(request, rank, device) as session:
                return run_trial(session, task, folder)
        case Certification() as task:
            return run_certification(request, task, rank, device)
        case Training() as task:
            with stop_requests(folder) as asked_to_stop, open_session(request, rank, device) as session:
                return run_training(session, task, asked_to_stop)


def _cause(error: Exception, rank: int, folder: Path) -> Crash | OutOfMemory:
    with suppress(OSError):  # the disk may be full; the cause is still reported
        (folder / f"error-{rank}.txt").write_text("".join(traceback.format_exception(error)))
    if isinstance(error, MemoryExceeded | torch.OutOfMemoryError):
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        if isinstance(error, MemoryExceeded):
            needed, limit = error.needed_bytes, error.memory_limit_bytes
        else:
            peaks = AllocatorPeaks.of(torch.cuda.memory_stats())
            needed, limit = needed_bytes(peaks, str(error)), request.memory_limit_bytes
        stage = request.plan.layout.grid.coordinates(rank).stage
        return OutOfMemory(stage=stage, rank=rank, needed_bytes=needed, limit_bytes=limit)
    if isinstance(error, TrialsError):
        return Crash(rank=rank, detail=str(error))
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return Crash(rank=rank, detail="\n".join(lines[:_DETAIL_LINES]))
