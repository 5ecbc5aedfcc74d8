"""Agents that record trials while they are killed, and openings of one new database at the same moment."""

import ctypes
import os
import random
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, tzinfo
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import Connection, Engine, PoolProxiedConnection, event
from sqlalchemy.engine.default import DefaultDialect

from autotune.machine.agent import Agent
from autotune.search.execution import ledger
from autotune.search.execution.ledger import StudyLedger
from autotune.search.execution.run_result import RunResult
from autotune.search.roles import Role
from autotune.search.sampling.proposals import database
from storage.database.engine import WRITES
from storage.queries import agents, studies
from storage.records import FinishedTrial, RunningTrial, TrialResult
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.forked import FORKED
from tests.values.storage import WORKLOAD, completed, packed_plan
from trials import wire

_PLANS_OF_A_WORKER = 10_000
_LONGEST_TRIAL_SECONDS = 0.02
_GATE_SECONDS = 120.0


@dataclass(kw_only=True)
class Storm:
    """What is left after a storm; every list must be empty."""

    trials: int = 0
    """Trials that were acknowledged."""
    kills: int = 0
    kills_in_commits: int = 0
    """Kills that came during a commit."""
    lost: list[str] = field(default_factory=list)
    """Acknowledged results that are missing or different in the database."""
    doubled: list[str] = field(default_factory=list)
    """Plans with more than one result."""
    running: list[str] = field(default_factory=list)
    """Trials that are still open although no process is left."""
    failed: list[str] = field(default_factory=list)
    """Output of processes that failed by themselves."""
    wrong: list[str] = field(default_factory=list)
    """What a check of the database finds."""
    seconds_to_settle: float = 0.0
    """Seconds that the next command takes until no trial is open."""

    def is_harmless(self) -> bool:
        return not (self.lost or self.doubled or self.running or self.failed or self.wrong)


def storm(url: str, folder: Path, *, processes: int, trials: int, kills: int, unsteady_clocks: bool = False) -> Storm:
    """Let each process record at least `trials` trials while processes are killed and restarted.

    The storm ends after `kills` kills, of which at least one comes during a commit, if there are any.
    """
    dice, report = random.Random(0), Storm()
    workers = _Workers([_Work(url, folder, number, trials, unsteady_clocks) for number in range(processes)])
    while workers.alive:
        if report.kills >= kills and (report.kills_in_commits or not kills):
            workers.calm.set()
        time.sleep(dice.uniform(0, 2 * _pause(processes)))
        if not workers.calm.is_set():
            victim = workers.committing() if report.kills % 2 else None
            (victim or dice.choice(list(workers.alive.values()))).kill()
            report.kills += 1
        for work, code in workers.ended():
            if code == -signal.SIGKILL:
                report.kills_in_commits += workers.commits[work.number]
                workers.begin(work)
            elif code != 0:
                report.failed.append(_log(folder, work.number).read_text())
    _inspect(report, url, folder, processes)
    return report


class _Work(NamedTuple):
    url: str
    folder: Path
    number: int
    trials: int
    unsteady_clock: bool


class _Workers:
    def __init__(self, works: list[_Work]) -> None:
        self.alive: dict[_Work, BaseProcess] = {}
        self.commits = FORKED.RawArray("b", len(works))
        """By worker: whether it is in a commit."""
        self.calm = FORKED.Event()
        """Set after the last kill. However fast the workers are, they go on until then."""
        for work in works:
            self.begin(work)

    def begin(self, work: _Work) -> None:
        self.commits[work.number] = False
        self.alive[work] = FORKED.Process(target=_work, args=(work, self.commits, self.calm))
        self.alive[work].start()

    def committing(self) -> BaseProcess | None:
        """Return a worker that is in a commit; None if there is none for a while."""
        # On a busy machine a worker needs seconds to start.
        end = time.monotonic() + 60.0
        while time.monotonic() < end and any(process.is_alive() for process in self.alive.values()):
            for work, process in self.alive.items():
                if self.commits[work.number]:
                    return process
            time.sleep(1e-4)
        return None

    def ended(self) -> Iterator[tuple[_Work, int | None]]:
        """Return the workers that have ended, with their exit codes."""
        for work, process in list(self.alive.items()):
            if not process.is_alive():
                del self.alive[work]
                yield work, process.exitcode


def _pause(processes: int) -> float:
    """Return the seconds between two kills, in which a process can do some work."""
    return 1.5 / processes


def _work(work: _Work, commits: "ctypes.Array[ctypes.c_byte]", calm: Event) -> None:
    url, folder, number, trials, unsteady_clock = work
    _mark_commits(lambda during: commits.__setitem__(number, during))
    if unsteady_clock:
        for module in _WITH_CLOCKS:
            vars(module)["datetime"] = _UnsteadyClock
    try:
        with open_store(url) as store, Agent(store) as agent, _acks(folder, number) as acknowledge:
            own = _ledger(store, folder, agent)
            for plan in range(_PLANS_OF_A_WORKER):
                if plan >= trials and calm.is_set():
                    break
                trial = own.begin(packed_plan(number * _PLANS_OF_A_WORKER + plan), Role.SAMPLED, {})
                if trial is None:  # an earlier life of this worker finished it
                    continue
                time.sleep(random.uniform(0, _LONGEST_TRIAL_SECONDS))
                result = own.put(trial, RunResult(outcome=completed(1.0 + plan), epoch_seconds=2.0))
                acknowledge(result)
                own.finish(trial, result)
    except BaseException:
        _log(folder, number).write_text(traceback.format_exc())
        raise


def _mark_commits(mark: Callable[[bool], None]) -> None:
    """Mark when this process commits a transaction that wrote."""
    commit: Callable[[DefaultDialect, PoolProxiedConnection], None] = DefaultDialect.do_commit
    writes = False

    @event.listens_for(Engine, "commit")
    def begins(connection: Connection) -> None:
        nonlocal writes
        writes = connection.get_execution_options().get(WRITES, False)

    def marked(self: DefaultDialect, connection: PoolProxiedConnection) -> None:
        mark(writes)
        commit(self, connection)
        mark(False)

    DefaultDialect.do_commit = marked  # type: ignore[method-assign]


class _UnsteadyClock(datetime):
    """A clock that is set back and forth by an hour."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> "_UnsteadyClock":
        moved = datetime.now(tz) + timedelta(hours=random.choice((-1, 0, 1)))
        return cls.fromisoformat(moved.isoformat())


_WITH_CLOCKS = (agents, studies, ledger)


def _ledger(store: Store, folder: Path, agent: Agent) -> StudyLedger:
    study = store.join_study(store.add_workload(WORKLOAD), {}, 0, lambda study: study.finished is None)
    return StudyLedger(store, Spool(folder / "spool"), study, agent, ())


@contextmanager
def _acks(folder: Path, number: int) -> Iterator[Callable[[TrialResult], None]]:
    with (folder / f"acks-{number}").open("a") as file:

        def acknowledge(result: TrialResult) -> None:
            file.write(wire.encode(result) + "\n")
            file.flush()
            os.fsync(file.fileno())

        yield acknowledge


def _log(folder: Path, number: int) -> Path:
    return folder / f"log-{number}"


def _inspect(report: Storm, url: str, folder: Path, processes: int) -> None:
    began = time.monotonic()
    with open_store(url) as store, Agent(store) as agent:
        own = _ledger(store, folder, agent)
        while own.open and time.monotonic() < began + _GATE_SECONDS:
            time.sleep(0.1)
            own.catch_up()
        report.seconds_to_settle = time.monotonic() - began
        study = store.studies(limit=1)[0]
        stored = {trial.id: trial for trial in store.trials(study.id)}
        report.running = [key for key, trial in stored.items() if isinstance(trial, RunningTrial)]
        report.wrong = [str(problem) for problem in store.problems()]
    finished = [trial for trial in stored.values() if isinstance(trial, FinishedTrial)]
    plans = [trial.plan.id for trial in finished]
    report.doubled = [plan for plan in set(plans) if plans.count(plan) > 1]
    for number in range(processes):
        for line in (folder / f"acks-{number}").read_text().splitlines(keepends=True):
            if not line.endswith("\n"):  # a kill cut it off: nothing was acknowledged
                continue
            report.trials += 1
            result = wire.decode(TrialResult, line)
            trial = stored.get(result.trial_id)
            if not isinstance(trial, FinishedTrial) or trial.result != result:
                report.lost.append(result.trial_id)


def race(url: str, folder: Path, *, processes: int) -> list[str]:
    """Open the database with Optuna's tables in several processes at once; return the messages of those that fail."""
    gate = FORKED.Barrier(processes, timeout=_GATE_SECONDS)
    openers = [FORKED.Process(target=_open, args=(url, folder, number, gate)) for number in range(processes)]
    for opener in openers:
        opener.start()
    for opener in openers:
        opener.join(_GATE_SECONDS)
    failed = [number for number, opener in enumerate(openers) if opener.exitcode != 0]
    return [_log(folder, number).read_text() if _log(folder, number).exists() else "no answer" for number in failed]


def _open(url: str, folder: Path, number: int, gate: Barrier) -> None:
    try:
        gate.wait()
        with open_store(url) as store, store.exclusive(), database(store.optuna_url):
            store.add_workload(WORKLOAD)
    except BaseException:
        _log(folder, number).write_text(traceback.format_exc())
        raise
