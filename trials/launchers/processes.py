"""Processes of one group of ranks on this machine, started and ended together with all their children."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from trials.launchers.forked import ForkedRank
from trials.machine.control_groups import KillsForMemory, usable_memory_bytes
from trials.outcome import Crash
from trials.tasks.answer import UNWRITABLE

# A choice: ranks have little to do on SIGTERM, and one in a collective call of a GPU never returns to do it.
_GRACE_SECONDS = 2.0
_NOT_INHERITED = ("MASTER_ADDR", "MASTER_PORT", "AUTOTUNE_DB_URL")
"""Variables of a launcher that started this process, and of the database, as are those that begin with PG."""


class Processes:
    """Running ranks, with their output in one log file each."""

    def __init__(self, environments: Sequence[Mapping[str, str]], log_folder: Path) -> None:
        """Start one rank for each of `environments`, which are added to the environment of this process."""
        log_folder.mkdir(parents=True, exist_ok=True)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name not in _NOT_INHERITED and not name.startswith("PG")
        }
        self._kills_for_memory = KillsForMemory()
        self._ranks: list[ForkedRank] = []
        try:
            for rank, environment in enumerate(environments):
                self._ranks.append(ForkedRank({**inherited, **environment}, log_folder / f"rank-{rank}.log"))
        except BaseException:
            self.end()
            raise

    def send(self, line: str) -> None:
        """Send one line to every rank. Raise ConnectionError when one has ended."""
        for rank in self._ranks:
            rank.send(line)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in order of rank; empty until all of them run."""
        pids = tuple(rank.pid for rank in self._ranks)
        return tuple(pid for pid in pids if pid) if all(pids) else ()

    def dead(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended, by rank; minus the signal for one that was killed."""
        codes = ((number, rank.exit_code) for number, rank in enumerate(self._ranks))
        return {number: code for number, code in codes if code is not None}

    @property
    def short_of_memory(self) -> bool:
        """Whether memory has run out here since the ranks were started, so that the kernel killed processes."""
        return self._kills_for_memory.any

    def stop(self) -> None:
        """Ask every rank to end, by SIGTERM: a training does so after its step, anything else at once."""
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def end(self) -> None:
        """End every rank and its children, by SIGTERM and then SIGKILL. Return when they have ended, or cannot be."""
        pids = [rank.pid for rank in self._ranks if rank.pid]
        # Listed first: once a rank has ended, its children are no longer found as such.
        everyone = [member for pid in pids for member in _family(pid)]
        for pid in pids:
            _signal_group(pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(everyone, timeout=_GRACE_SECONDS)
        for pid in pids:
            _signal_group(pid, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=_GRACE_SECONDS)
        for rank in self._ranks:
            rank.close()


def crash_of(rank: int, code: int, *, short_of_memory: bool) -> Crash:
    """Describe a rank that ended with this exit code; minus the signal for one that was killed."""
    if code == UNWRITABLE:
        detail = (
            "it could not write its report; make the folder of its logs writable, with room left, and run the command "
            "again: a training goes on after its last checkpoint"
        )
        return Crash(rank=rank, detail=detail, of_machine=True)
    if code == -signal.SIGKILL and short_of_memory:
        detail = (
            "the process was killed, and memory ran out meanwhile: all processes here may use "
            f"{usable_memory_bytes() >> 20} MiB; allow more, use fewer ranks, or lower data.workers or, on a CPU, "
            "hardware.memory_limit"
        )
        return Crash(rank=rank, detail=detail)
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return Crash(rank=rank, detail=f"the process {how}")


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
