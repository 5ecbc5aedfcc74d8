"""Ranks on this machine. Each request is a folder, into which they write their steps and reports."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from uuid import uuid4

from trials import wire
from trials.launchers.commands import rank_environments
from trials.launchers.processes import Processes
from trials.tasks.answer import Answer, begun_path, read_report, report_path
from trials.tasks.request import Request, write_request
from trials.tasks.steering import StepVerdict, TimedStep, step_path, verdict_path
from trials.tasks.training.stopping import stop_path


class LocalLauncher:
    """Starts one process per rank."""

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


class LocalRanks:
    """A group of ranks that read and write files in one folder per request."""

    def __init__(self, folder: Path, environments: Sequence[Mapping[str, str]], numbers: Iterator[int]) -> None:
        self._folder = folder
        self._numbers = numbers
        self._world_size = len(environments)
        self._request = folder
        self._steps = 0
        self._processes = Processes(environments, folder / "logs")

    @property
    def pids(self) -> tuple[int, ...]:
        return self._processes.pids

    def send(self, request: Request) -> None:
        self._request = self._folder / f"request-{next(self._numbers)}-{uuid4().hex[:8]}"
        self._steps = 0
        write_request(self._request, request)
        with suppress(ConnectionError):  # a rank has ended: the pool finds out by `dead`
            self._processes.send(str(self._request))

    def begun(self) -> set[int]:
        return {rank for rank in range(self._world_size) if begun_path(self._request, rank).exists()}

    def next_step(self) -> float | None:
        step = wire.read(TimedStep, step_path(self._request, self._steps + 1))
        if step is None:
            return None
        self._steps += 1
        return step.seconds

    def decide(self, *, go_on: bool) -> None:
        wire.write(verdict_path(self._request, self._steps), StepVerdict(go_on=go_on))

    def stop(self) -> None:
        stop_path(self._request).touch()

    def answers(self) -> dict[int, Answer]:
        found = {rank: read_report(self._request, rank) for rank in range(self._world_size)}
        given = {rank: answer for rank, answer in found.items() if answer is not None}
        return dict(sorted(given.items(), key=lambda entry: report_path(self._request, entry[0]).stat().st_mtime_ns))

    def dead(self) -> dict[int, int]:
        return self._processes.dead()

    def end(self) -> None:
        self._processes.end()
