"""Processes of one group of ranks on this machine: started together, ended together, none left behind."""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from trials.launchers.forked import ForkedRank

_GRACE_SECONDS = 2.0


def _is_inherited(name: str) -> bool:
    """Whether ranks get that variable: not a launcher's that is around us, nor what opens a database."""
    return name not in ("MASTER_ADDR", "MASTER_PORT", "AUTOTUNE_DB_URL") and not name.startswith("PG")


class Processes:
    """Running ranks, with their output in one log file each."""

    def __init__(self, environments: Sequence[Mapping[str, str]], log_folder: Path) -> None:
        """`environments` are what each rank has in addition to this process's environment."""
        log_folder.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if _is_inherited(key)}
        self._ranks: list[ForkedRank] = []
        try:
            for rank, environment in enumerate(environments):
                self._ranks.append(ForkedRank({**inherited, **environment}, log_folder / f"rank-{rank}.log"))
        except BaseException:
            self.end()
            raise

    def send(self, line: str) -> None:
        """Give every rank one line. Raises ConnectionError when one is gone."""
        for rank in self._ranks:
            rank.send(line)

    @property
    def pids(self) -> tuple[int, ...]:
        """In order of rank; none until all of them run."""
        pids = tuple(rank.pid for rank in self._ranks)
        return tuple(pid for pid in pids if pid) if all(pids) else ()

    def dead(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended; minus the signal for one that was killed."""
        codes = ((number, rank.exit_code) for number, rank in enumerate(self._ranks))
        return {number: code for number, code in codes if code is not None}

    def end(self) -> None:
        """End every rank and its children: politely, then not. Returns when they are gone, or cannot be ended."""
        pids = [rank.pid for rank in self._ranks if rank.pid]
        everyone = [member for pid in pids for member in _family(pid)]
        for pid in pids:
            _signal_group(pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(everyone, timeout=_GRACE_SECONDS)
        for pid in pids:
            _signal_group(pid, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=_GRACE_SECONDS)
        for rank in self._ranks:
            rank.close()


def _family(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
