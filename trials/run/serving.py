"""One rank's answer to one request: the task is run, and its report or the reason of its failure is written."""

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trials import wire
from trials.engine.group import env_meeting, file_meeting, process_group
from trials.engine.memory import MemoryExceeded
from trials.errors import TrialsError
from trials.outcome import Crash, OutOfMemory
from trials.tasks.answer import UNWRITABLE, FailureReport, Report, begun_path, write_report
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.request import REQUEST_FILE, Profile, Request, Training, Trial
from trials.tasks.session import open_session
from trials.tasks.training.training import run_training
from trials.tasks.trial import run_trial

_DETAIL_LINES = 6


def serve(folder: Path) -> bool:
    """Answer the request in `folder` with a report. False when it failed."""
    rank = int(os.environ["RANK"])
    with suppress(_Reported), _failures_reported(rank, folder):
        begun_path(folder, rank).touch()
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        # A file as meeting point, where the folder is shared and no launcher gave an address: no port to fight for.
        meeting = env_meeting() if "MASTER_ADDR" in os.environ else file_meeting(folder / "rendezvous")
        world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        # Reported before the group is left: the other ranks fail as soon as this one does, and theirs is not the cause.
        with process_group(rank, local_rank, world_size, meeting) as device, _failures_reported(rank, folder):
            report = _run(request, rank, device, folder)
        _release()
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
    except Exception as error:  # The edge at which a rank's death becomes data.
        _write(folder, rank, FailureReport(cause=_cause(error, rank, folder)))
        raise _Reported from error


def _write(folder: Path, rank: int, report: Report) -> None:
    try:
        write_report(folder, rank, report)
    except OSError:  # the disk is full or read-only, also for the log: only the exit code can still say so
        traceback.print_exc()
        os._exit(UNWRITABLE)  # leaving the group would abort, as its file cannot be removed either


def _release() -> None:
    """What the request used, cycles included, before the next one counts its bytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run(request: Request, rank: int, device: torch.device, folder: Path) -> Report:
    match request.task:
        case Profile() as task:
            return run_profile(request, task, device)
        case Trial() as task:
            with open_session(request, rank, device) as session:
                return run_trial(session, task, folder)
        case Training() as task:
            with open_session(request, rank, device) as session:
                return run_training(session, task)


def _cause(error: Exception, rank: int, folder: Path) -> Crash | OutOfMemory:
    with suppress(OSError):  # the disk may be full; the cause is still reported
        (folder / f"error-{rank}.txt").write_text("".join(traceback.format_exception(error)))
    if isinstance(error, MemoryExceeded | torch.OutOfMemoryError):
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        needed, limit = _bytes_of(error, request)
        stage = request.plan.layout.grid.coordinates(rank).stage
        return OutOfMemory(stage=stage, rank=rank, needed_bytes=needed, limit_bytes=limit)
    if isinstance(error, TrialsError):
        return Crash(rank=rank, detail=str(error))
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return Crash(rank=rank, detail="\n".join(lines[:_DETAIL_LINES]))


def _bytes_of(error: MemoryExceeded | torch.OutOfMemoryError, request: Request) -> tuple[int, int]:
    """(needed, limit)."""
    if isinstance(error, MemoryExceeded):
        return error.needed_bytes, error.limit_bytes
    return torch.cuda.max_memory_reserved(), request.memory_limit_bytes
