"""When the pool starts new ranks, with processes that answer like ranks but do not train."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from tests.values.search import prepared_of
from tests.values.training import plan_of
from trials.channels.folder import FolderChannel
from trials.launchers.processes import crash_of
from trials.outcome import Crash, OutOfMemory
from trials.run import pool as pools
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import Answer, FailureReport, TrainingReport, begun_name, read_report
from trials.tasks.request import Request, Training, write_request
from trials.tasks.stop import Stop

RANK = """
import os, sys, time
from pathlib import Path
from trials.tasks.answer import TrainingReport, begun_name, write_report
from trials.channels.folder import FolderChannel
kept = []
for line in sys.stdin:
    time.sleep(float(sys.argv[2]))
    channel = FolderChannel(Path(line.rstrip("\\n")))
    channel.put(begun_name(0), "")
    report = TrainingReport(steps=os.getpid(), finished=False, model=None, blank_samples=0)
    write_report(channel, 0, report)
    kept += [open(os.devnull) for _ in range(int(sys.argv[1]))]
"""


class SmallLauncher:
    """Starts one process that answers like a rank; it may leak descriptors at each request, and begin late."""

    world_size = 1

    def __init__(self, folder: Path, *, leaked: int = 0, start_seconds: float = 0.0) -> None:
        self._folder = folder
        self._arguments = (str(leaked), str(start_seconds))

    def start(self) -> "SmallRank":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", RANK, *self._arguments]
        return SmallRank(
            self._folder, subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True, bufsize=1)
        )


class SmallRank:
    aftermath_seconds = 1.0

    def __init__(self, folder: Path, process: "subprocess.Popen[str]") -> None:
        self._folder = folder
        self._process = process
        self.pids = (process.pid,)

    def send(self, request: Request) -> None:
        self._channel = FolderChannel(self._folder / uuid4().hex)
        write_request(self._channel, request)
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self._channel.folder}\n")

    def begun(self) -> set[int]:
        return {0} if self._channel.written([begun_name(0)]) else set()

    def next_step(self) -> float | None:
        return None

    def decide(self, *, go_on: bool) -> None:
        raise AssertionError("there was no step")

    def stop(self, when: Stop) -> None:
        self._channel.put(when, "")

    def answers(self) -> dict[int, Answer]:
        answer = read_report(self._channel, 0)
        return {} if answer is None else {0: answer}

    def ended(self) -> dict[int, Crash]:
        code = self._process.poll()
        return {} if code is None else {0: crash_of(0, code, short_of_memory=False)}

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


def request_in(folder: Path) -> Request:
    return prepared_of(folder).request(plan_of("4+4"), Training(output=folder))


def processes(
    folder: Path,
    requests: int,
    *,
    leaked: int = 0,
    requests_per_start: int = 50,
    on_start: Callable[[bool], None] = lambda _: None,
) -> list[int]:
    """Which process served each request, numbered from 0 in order of appearance; each leaks some descriptors."""
    served: list[int] = []
    with WarmPool(SmallLauncher(folder, leaked=leaked), requests_per_start, on_start) as pool:
        for _ in range(requests):
            answer = pool.ask(request_in(folder), 60)
            assert isinstance(answer, Answers), answer
            (report,) = answer.reports
            assert isinstance(report, TrainingReport)
            served.append(report.steps)
    order = list(dict.fromkeys(served))
    return [order.index(process) for process in served]


@pytest.mark.long
@pytest.mark.parametrize(("requests_per_start", "served_by"), [(50, [0, 0, 0]), (1, [0, 1, 2])])
def test_ranks_serve_as_many_requests_as_they_are_given(
    tmp_path: Path, requests_per_start: int, served_by: list[int]
) -> None:
    assert processes(tmp_path, 3, requests_per_start=requests_per_start) == served_by


def test_ranks_that_leak_are_reported_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert processes(tmp_path, 5, leaked=12) == [0, 0, 0, 1, 1]
    (record,) = caplog.records
    assert "rank 0 leaks" in record.getMessage()
    assert "after 3; the ranks are replaced" in record.getMessage()


def test_a_little_growth_is_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert processes(tmp_path, 3, leaked=8) == [0, 0, 0]
    assert not caplog.records


def test_the_time_of_a_request_does_not_include_the_start_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def pass_time() -> None:
        nonlocal now
        if not list(tmp_path.glob("*/begun-0")):
            now += 0.1

    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now, sleep=time.sleep))
    with WarmPool(SmallLauncher(tmp_path, start_seconds=1.0)) as pool:
        assert isinstance(pool.ask(request_in(tmp_path), 0.2, pass_time), Answers)
    assert now > 0.2


def test_ranks_serve_two_requests_and_their_start_is_told_and_that_they_have_begun(tmp_path: Path) -> None:
    reported: list[bool] = []
    served = processes(tmp_path, 3, requests_per_start=2, on_start=reported.append)
    # The second request has the ranks of the first one.
    assert served == [0, 0, 1]
    assert reported == [False, True, True, False, True]


class QuickRank(SmallRank):
    """Begins and answers between the two looks of the pool."""

    def answers(self) -> dict[int, Answer]:
        while not (found := super().answers()):
            time.sleep(0.01)
        return found


class QuickLauncher(SmallLauncher):
    def start(self) -> SmallRank:
        return QuickRank(self._folder, super().start()._process)


def test_ranks_that_begin_and_answer_between_two_looks_have_begun(tmp_path: Path) -> None:
    reported: list[bool] = []
    with WarmPool(QuickLauncher(tmp_path, start_seconds=0.2), on_start=reported.append) as pool:
        assert isinstance(pool.ask(request_in(tmp_path), 60), Answers)
    assert reported == [False, True]


def test_ranks_that_do_not_begin_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "_START_SECONDS", 0.5)
    with WarmPool(SmallLauncher(tmp_path, start_seconds=600.0)) as pool:
        answer = pool.ask(request_in(tmp_path), 0.25)
        assert isinstance(answer, Crash)
        assert str(answer).startswith("rank 0 failed: it did not begin within 0.5 s of its start; look at its log")
        assert pool.pids == ()


def test_silent_ranks_are_looked_after_ever_more_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, pauses = 0.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    monkeypatch.setattr(pools, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    with WarmPool(SmallLauncher(tmp_path, start_seconds=600.0)) as pool:
        assert isinstance(pool.ask(request_in(tmp_path), 60), Crash)
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (0.02, 0.25)
    assert len(pauses) < 0.1 * now / 0.02


def test_ranks_are_asked_once_to_stop_at_a_checkpoint_and_once_to_stop_at_once(tmp_path: Path) -> None:
    asked: list[str] = []

    def stops() -> Stop:
        for path in tmp_path.glob("*/stop*"):
            path.unlink()
            asked.append(path.name)
        return Stop.NOW if asked else Stop.AT_CHECKPOINT

    with WarmPool(SmallLauncher(tmp_path, start_seconds=0.5)) as pool:
        assert isinstance(pool.ask(request_in(tmp_path), 60, stops=stops), Answers)
    assert asked == ["stop-at-checkpoint", "stop"]


def test_a_rank_that_reports_and_ends_between_two_looks_has_its_own_cause() -> None:
    own = OutOfMemory(stage=0, rank=0, needed_bytes=2, limit_bytes=1)

    class Ending:
        """A rank that reports and ends right after its answers were read for the first time."""

        aftermath_seconds = 5.0
        looks = 0

        def answers(self) -> dict[int, SimpleNamespace]:
            self.looks += 1
            return {0: SimpleNamespace(report=FailureReport(cause=own))} if self.looks > 1 else {}

        def ended(self) -> dict[int, Crash]:
            return {0: Crash(rank=0, detail="ended with exit code 1")} if self.looks else {}

    assert pools._cause(Ending(), 1) == own  # type: ignore[arg-type]
