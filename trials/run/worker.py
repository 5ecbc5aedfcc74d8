"""A rank process: `python -m trials.run.worker`. Its RANK, LOCAL_RANK and WORLD_SIZE come from the environment.

With `--request FOLDER` it serves that request and ends: for launchers of other tools, which set MASTER_ADDR. Without,
it serves one request after another, whose folders come as lines on its standard input, and ends when that closes.
"""

import argparse
import contextlib
import gc
import logging
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from trials import wire
from trials.engine.engine import seat
from trials.engine.group import process_group
from trials.engine.memory import MemoryExceeded
from trials.errors import TrialsError
from trials.outcome import Crash, OutOfMemory
from trials.run.profile import run_profile
from trials.run.report import FailureReport, Report, write_report
from trials.run.request import REQUEST_FILE, Profile, Request, Training, Trial
from trials.run.session import open_session
from trials.run.training import run_training
from trials.run.trial import run_trial

_DETAIL_LINES = 6


def main() -> None:
    """Serves requests until there are no more, or one fails: a failed rank is not used again."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--request", type=Path, help="folder of the one request to serve")
    folder = parser.parse_args().request
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    for request_folder in [folder] if folder else _lines_of_stdin():
        if not serve(request_folder):
            sys.exit(1)


def serve(folder: Path) -> bool:
    """Answers the request in `folder` with a report. False when it failed."""
    rank = int(os.environ["RANK"])
    try:
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        report = _run(request, rank, folder)
    except Exception as error:  # The edge at which a rank's death becomes data.
        report = FailureReport(cause=_cause(error, rank, folder))
    _release()
    write_report(folder, rank, report)
    return not isinstance(report, FailureReport)


def _release() -> None:
    """What the request used, cycles included, before the next one counts its bytes."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _run(request: Request, rank: int, folder: Path) -> Report:
    world_size = int(os.environ["WORLD_SIZE"])
    # A file as meeting point, where the folder is shared and no launcher gave an address: no port to fight for.
    meeting = "env://" if "MASTER_ADDR" in os.environ else f"file://{folder / 'rendezvous'}"
    with process_group(rank, int(os.environ["LOCAL_RANK"]), world_size, meeting) as device:
        match request.task:
            case Profile() as task:
                return run_profile(request, task, device)
            case Trial() as task:
                with open_session(request, rank, device) as session:
                    return run_trial(session, task)
            case Training() as task:
                with open_session(request, rank, device) as session:
                    return run_training(session, task)


def _cause(error: Exception, rank: int, folder: Path) -> Crash | OutOfMemory:
    (folder / f"error-{rank}.txt").write_text("".join(traceback.format_exception(error)))
    if isinstance(error, MemoryExceeded | torch.OutOfMemoryError):
        request = wire.decode(Request, (folder / REQUEST_FILE).read_text())
        needed, limit = _bytes_of(error, request)
        return OutOfMemory(stage=seat(request.plan, rank).stage, rank=rank, needed_bytes=needed, limit_bytes=limit)
    if isinstance(error, TrialsError):
        return Crash(rank=rank, detail=str(error))
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    return Crash(rank=rank, detail="\n".join(lines[:_DETAIL_LINES]))


def _bytes_of(error: MemoryExceeded | torch.OutOfMemoryError, request: Request) -> tuple[int, int]:
    """(needed, limit)."""
    if isinstance(error, MemoryExceeded):
        return error.needed_bytes, error.limit_bytes
    return torch.cuda.max_memory_reserved(), request.memory_limit_bytes


def _lines_of_stdin() -> Iterator[Path]:
    """The request folders that the agent sends. A thread reads them, so that a closed pipe ends even a busy rank."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line.rstrip("\n"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield Path(lines.get())


if __name__ == "__main__":
    main()
