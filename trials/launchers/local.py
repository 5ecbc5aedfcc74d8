"""Ranks on this machine. Each request is a folder, into which they write their steps and reports."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

from trials.channels.folder import FolderChannel
from trials.launchers.channel_ranks import ChannelRanks
from trials.launchers.commands import rank_environments
from trials.launchers.processes import Processes, crash_of
from trials.outcome import Crash
from trials.tasks.request import Request


class LocalLauncher:
    """Launcher of one process per rank."""

    def __init__(self, folder: Path, world_size: int, accelerator: str, *, group: int = 0, groups: int = 1) -> None:
        """Write a numbered folder for each request, with reports and errors, and the ranks' logs, to `folder`.

        Of several `groups` that work at the same time, the first has the first devices, and so on.
        """
        self._folder = folder
        self._environments = rank_environments(world_size, accelerator, group=group, groups=groups)
        self._numbers = count(1)

    @property
    def world_size(self) -> int:
        return len(self._environments)

    def start(self) -> "LocalRanks":
        return LocalRanks(self._folder, self._environments, self._numbers)


class LocalRanks(ChannelRanks):
    """A group of ranks that read and write files in one folder per request."""

    aftermath_seconds = 1.0

    def __init__(self, folder: Path, environments: Sequence[Mapping[str, str]], numbers: Iterator[int]) -> None:
        super().__init__(len(environments))
        self._folder = folder
        self._numbers = numbers
        self._processes = Processes(environments, folder / "logs")

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

    def send(self, request: Request) -> None:
        channel = FolderChannel(self._folder / f"request-{next(self._numbers)}-{uuid4().hex[:8]}")
        self._exchange(channel, request)
        with suppress(ConnectionError):  # a rank has ended: the pool finds out by `ended`
            self._processes.send(str(channel.folder))

    def ended(self) -> dict[int, Crash]:
        dead = self._processes.dead().items()
        return {rank: crash_of(rank, code, short_of_memory=self._processes.short_of_memory) for rank, code in dead}

    def end(self) -> None:
        self._processes.end()
