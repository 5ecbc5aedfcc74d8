"""One rank's answer to one request: the report of its task, or the cause of its failure."""

import errno
import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch

from trials import channels
from trials.channels import Channel
from trials.engine.allocator import is_out_of_memory, needed_bytes, usable_bytes
from trials.engine.group import env_rendezvous, process_group
from trials.engine.memory import MemoryExceeded
from trials.errors import SharedMemoryFull, TrialsError, Unwritable, WireError
from trials.launchers.copies import check_copy
from trials.machine.freed_memory import keep_freed_memory, return_freed_memory
from trials.outcome import Crash, OutOfMemory
from trials.tasks.answer import UNWRITABLE, FailureReport, Report, begun_name, error_name, write_report
from trials.tasks.certifying.certifying import run_certification
from trials.tasks.profiling.layer_profile import run_profile
from trials.tasks.request import REQUEST, Certification, Profile, Request, Training, Trial
from trials.tasks.session import open_session
from trials.tasks.stop import stop_requests
from trials.tasks.training.training import run_training
from trials.tasks.trial import run_trial

# A choice: messages of torch go on with hints and a C++ trace, which the log has.
_DETAIL_LINES = 6
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


def serve(channel: Channel) -> bool:
    """Run the task of the request in `channel` and write a report.

    Return False when it failed. Then the process must end: it may still be in the process group.
    """
    rank = int(os.environ["RANK"])
    keep_freed_memory()
    with suppress(_Reported), _failures_reported(rank, channel):
        channel.put(begun_name(rank), "")
        request = _received(channel)
        # Without a launcher's address the ranks meet over the channel, which needs no free port.
        rendezvous = env_rendezvous(channel.get(REQUEST) or "") if "MASTER_ADDR" in os.environ else channel.rendezvous
        world_size, local_rank = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
        # Reported before this process ends: the other ranks may fail as soon as it does, and are not the cause.
        with process_group(rank, local_rank, world_size, rendezvous) as device, _failures_reported(rank, channel):
            report = _run(request, rank, device, channel)
        # Cycles would hold memory of this request that the next one would count as its own.
        gc.collect()
        return_freed_memory()
        _write(channel, rank, report)
        return True
    return False


def _received(channel: Channel) -> Request:
    """Return the request, with the files where this rank finds them. Raise WireError where there is none."""
    request = channels.receive(Request, channel, REQUEST)
    if request is None:
        raise WireError("there is no request")
    if request.model_digest is not None:
        check_copy(request.job.model, request.model_digest)
    held_out = request.held_out
    return replace(request, index=channel.file(request.index), held_out=held_out and channel.file(held_out))


class _Reported(Exception):
    """The request failed, and its report says why."""


@contextmanager
def _failures_reported(rank: int, channel: Channel) -> Iterator[None]:
    try:
        yield
    except _Reported:
        raise
    except Exception as error:  # the process edge: whatever a rank raises becomes its report
        _write(channel, rank, FailureReport(cause=_cause(error, rank, channel)))
        raise _Reported from error


def _write(channel: Channel, rank: int, report: Report) -> None:
    try:
        write_report(channel, rank, report)
    except OSError:  # the disk is full or read-only, also for the log: only the exit code can still say so
        traceback.print_exc()
        os._exit(UNWRITABLE)  # leaving the group would abort, as its file cannot be removed either


def _run(request: Request, rank: int, device: torch.device, channel: Channel) -> Report:
    match request.task:
        case Profile() as task:
            return run_profile(request, task, device)
        case Trial() as task:
            with open_session(request, rank, device) as session:
                return run_trial(session, task, channel)
        case Certification() as task:
            return run_certification(request, task, rank, device)
        case Training() as task:
            with stop_requests(channel) as asked_to_stop, open_session(request, rank, device) as session:
                return run_training(session, task, asked_to_stop)


def _cause(error: Exception, rank: int, channel: Channel) -> Crash | OutOfMemory:
    with suppress(OSError):  # the disk may be full; the cause is still reported
        channel.put(error_name(rank), "".join(traceback.format_exception(error)))
    if (lack := _lack(error)) is not None:
        needed, limit = lack
        request = channels.receive(Request, channel, REQUEST)
        assert request is not None, "the rank has begun with it"
        stage = request.plan.layout.grid.coordinates(rank).stage
        return OutOfMemory(stage=stage, rank=rank, needed_bytes=needed, limit_bytes=limit)
    if isinstance(error, TrialsError):
        return Crash(rank=rank, detail=str(error), of_machine=isinstance(error, SharedMemoryFull | Unwritable))
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    of_disk = isinstance(error, OSError) and error.errno in _OF_THE_DISK
    return Crash(rank=rank, detail="\n".join(lines[:_DETAIL_LINES]), of_machine=of_disk)


def _lack(error: Exception) -> tuple[int, int] | None:
    """Return (bytes needed, limit) of an error that tells of too little memory on the device, None of another.

    Where another program has left no room for a context, CUDA cannot tell the limit either: no plan is at fault.
    """
    if isinstance(error, MemoryExceeded):
        return error.needed_bytes, error.memory_limit_bytes
    try:
        if not is_out_of_memory(error, lambda: torch.cuda.mem_get_info()[0]):
            return None
        limit = _allocatable_bytes()
    except RuntimeError:
        return None
    return needed_bytes(str(error), limit), limit


def _allocatable_bytes() -> int:
    """Return the most that the allocator could take from the device: others may leave less than the job's limit.

    A profile has no limit of the job.
    """
    free, total = torch.cuda.mem_get_info()
    limit = round(torch.cuda.get_per_process_memory_fraction() * total)
    return usable_bytes(limit, total=total, free=free, reserved=torch.cuda.memory_reserved())
