"""Trials at the same time: on several groups of devices, and by several agents on one study."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

from autotune.errors import TrialsKeepFailing
from autotune.search import search
from autotune.search.execution.ledger import ran
from autotune.search.roles import REPEATS, Role
from autotune.search.sampling.proposals import database
from storage.records import FinishedTrial, RunningTrial
from storage.store import open_store
from tests.machines.search_bench import ALWAYS, AXES, PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.values.storage import best_of, concluded
from trials.outcome import Cause, Completed, Crash
from trials.plan import Packed
from trials.run.pool import Answers
from trials.tasks.request import Request

SECONDS = 20
"""More than a simulated trial can take."""


class Together(SimulatedLauncher):
    """Answers when every runner that shares the barrier was asked, while there are enough trials for all."""

    def __init__(self, barrier: Barrier) -> None:
        super().__init__(PREDICTOR)
        self.barrier = barrier
        self.met = 0

    def ask(self, request: Request, *arguments: Any, **options: Any) -> Answers | Cause:
        try:
            self.barrier.wait(timeout=SECONDS)
            self.met += 1
        except BrokenBarrierError:
            pass
        return super().ask(request, *arguments, **options)


def test_groups_of_devices_run_trials_at_the_same_time(bench: Bench) -> None:
    barrier = Barrier(2)
    one, other = Together(barrier), Together(barrier)

    def listen(trial: FinishedTrial) -> None:
        if trial.number >= 4:
            barrier.abort()  # from here on, each goes on alone

    bench.on_end = listen
    study = bench.study()
    ledger = bench.search(study, one, other, trials=7)
    assert min(one.met, other.met) >= 2
    once = [trial.plan for trial in ledger.trials if trial.role not in REPEATS]
    assert len(set(once)) == len(once)
    assert ledger.open == () == bench.store.running_trials()
    assert [trial.number for trial in bench.stored(study)] == list(range(len(ledger.trials)))


def test_finalists_are_repeated_on_the_first_group_alone(bench: Bench) -> None:
    one, other = SimulatedLauncher(PREDICTOR), SimulatedLauncher(PREDICTOR)
    ledger = bench.search(bench.study(), one, other, trials=6)
    confirmed = [trial.plan for trial in ledger.trials if trial.role == Role.CONFIRM]
    assert one.asked[-len(confirmed) :] == confirmed
    assert len(other.asked) + len(one.asked) == sum(map(ran, ledger.trials))


@pytest.mark.long
def test_no_more_trials_run_than_the_budget(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_LEAST_GAIN", -1.0)
    monkeypatch.setattr(search, "_GAIN_IN_NOISE", -1.0)
    pools = [SimulatedLauncher(PREDICTOR) for _ in range(3)]
    ledger = bench.search(bench.study(), *pools, trials=11)
    assert sum(ran(trial) and trial.role != Role.CONFIRM for trial in ledger.trials) == 11


class Stopped(BaseException):
    """Simulates Ctrl-C."""


def test_a_trial_on_other_devices_is_given_up_when_the_search_ends(bench: Bench) -> None:
    begun, ended = Event(), Event()

    class Endless(SimulatedLauncher):
        def ask(
            self,
            request: Request,
            timeout_seconds: float,
            on_wait: Callable[[], None] = lambda: None,
            on_step: Callable[[float], bool] | None = None,
        ) -> Answers | Cause:
            begun.set()
            try:
                for _ in range(100 * SECONDS):
                    on_wait()
                    ended.wait(0.01)
                raise AssertionError("nobody ended the trial")
            finally:
                ended.set()

    class Stopping(SimulatedLauncher):
        def ask(self, *arguments: Any, **options: Any) -> Answers | Cause:
            assert begun.wait(SECONDS)
            raise Stopped

    study = bench.study()
    with pytest.raises(Stopped):
        bench.search(study, Stopping(PREDICTOR), Endless(PREDICTOR))
    assert ended.is_set()
    assert len(bench.store.running_trials()) == 2
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=5)  # gives them up and goes on
    assert bench.store.running_trials() == ()
    assert ledger.trials


@pytest.mark.parametrize("database_url", ["sqlite", pytest.param("postgresql", marks=pytest.mark.long)], indirect=True)
def test_agents_share_one_study(database_url: str, tmp_path: Path) -> None:
    """Two at the same time: no plan runs twice, the budget is shared, and Optuna's study has each trial once."""
    with ExitStack() as stack:
        benches = []
        for name in ("one", "other"):
            (tmp_path / name).mkdir()
            benches.append(Bench(tmp_path / name, stack.enter_context(open_store(database_url))))
        study, barrier = benches[0].study(), Barrier(2)
        launchers = [Together(barrier), Together(barrier)]
        for bench in benches:
            bench.on_end = lambda trial: barrier.abort() if trial.number >= 4 else None
        with ThreadPoolExecutor(2) as threads:
            both = [
                threads.submit(bench.explore, study, launcher, trials=9)
                for bench, launcher in zip(benches, launchers, strict=True)
            ]
            ledgers = [each.result() for each in both]
        assert min(launcher.met for launcher in launchers) >= 2
        trials = benches[0].stored(study)
        assert len({trial.agent_id for trial in trials}) == 2
        plans = [trial.plan for trial in trials if trial.role not in REPEATS]
        assert len(set(plans)) == len(plans)
        assert len(trials) <= 9 + 1  # both may begin the last one at the same moment
        for ledger in ledgers:
            ledger.catch_up()
            assert {trial.id for trial in ledger.trials} == {trial.id for trial in trials}
        assert benches[0].store.running_trials() == ()
        with database(benches[0].store.optuna_url) as storage:
            found = optuna.load_study(study_name=study.name, storage=storage).get_trials()
        recorded = [each.user_attrs["trial_id"] for each in found if "trial_id" in each.user_attrs]
        assert sorted(recorded) == sorted(trial.id for trial in trials)
        assert not any(each.state == TrialState.RUNNING for each in found)


def test_an_agent_begins_nothing_while_another_ends_the_study(bench: Bench) -> None:
    study = bench.study()
    leader = bench.store.add_agent("another host", "1 1").id
    bench.store.lead_study(study.id, leader)
    assert {trial.role for trial in bench.explore(study, SimulatedLauncher(PREDICTOR)).trials} == set(ALWAYS)
    bench.store.end_agent(leader)
    assert len(bench.explore(study, SimulatedLauncher(PREDICTOR)).trials) > len(ALWAYS)


@pytest.mark.long
def test_an_agent_that_comes_late_begins_nothing_in_a_finished_study(bench: Bench) -> None:
    study = bench.study()
    concluded(bench.store, best_of(study.id, workload=bench.store.workload(study.workload_fingerprint)))
    assert {trial.role for trial in bench.explore(study, SimulatedLauncher(PREDICTOR)).trials} == set(ALWAYS)


@pytest.mark.long
def test_a_sampler_that_suggests_what_is_running_waits_for_it(bench: Bench) -> None:
    class Slow(SimulatedLauncher):
        def ask(self, *arguments: Any, **options: Any) -> Answers | Cause:
            Event().wait(0.2)
            return super().ask(*arguments, **options)

    study = bench.study()
    axes = replace(AXES, packers=("isf",), qv_slacks=(0,), qt_slacks=(64,), recompute="none", boundary_shift=0)
    ledger = bench.search(study, Slow(PREDICTOR), Slow(PREDICTOR), axes=axes, sampler="uniform", trials=30)
    with database(bench.store.optuna_url) as storage:
        found = optuna.load_study(study_name=study.name, storage=storage).get_trials()
    failed = [each for each in found if each.state == TrialState.FAIL]
    assert len(failed) <= len(ledger.trials)


def test_one_machine_whose_trials_crash_does_not_stop_another(bench: Bench) -> None:
    study = bench.study()
    crashing = SimulatedLauncher(PREDICTOR, cause_of=lambda _: Crash(rank=0, detail="boom"))
    with pytest.raises(TrialsKeepFailing):
        bench.explore(study, crashing)
    once = iter([Crash(rank=0, detail="once")])
    ledger = bench.explore(study, SimulatedLauncher(PREDICTOR, cause_of=lambda _: next(once, None)), trials=5)
    assert any(isinstance(trial.result.outcome, Completed) for trial in ledger.trials)


def test_what_a_dead_agent_left_is_run_by_the_other(bench: Bench) -> None:
    study = bench.study()
    gone = bench.store.add_agent("another host", "1 1")
    plan = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=3).trials[0].plan
    left = bench.store.claim_trial(study.id, plan, Role.PREDICTED, {}, agent_id=gone.id)
    bench.store.end_agent(gone.id)
    assert left is not None
    bench.remembers = False
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=5)
    assert plan in {trial.plan for trial in ledger.trials}
    assert left.id not in {trial.id for trial in ledger.trials}


def test_open_trials_of_an_agent_that_died_are_closed_and_run_again(bench: Bench) -> None:
    """Optuna's trial is closed as well, since a plan that seems to run is never suggested again."""
    study = bench.study()
    other = bench.store.add_agent("another host", "1 1")
    left: list[RunningTrial] = []

    def listen(trial: FinishedTrial) -> None:
        if left or trial.role != Role.SAMPLED:
            return
        with database(bench.store.optuna_url) as storage:
            theirs = optuna.load_study(study_name=study.name, storage=storage).ask()
            theirs.set_user_attr("agent_id", other.id)
        packing = trial.plan.packing
        assert isinstance(packing, Packed)
        plan = replace(trial.plan, packing=replace(packing, qt=packing.qt + 1))
        begun = bench.store.claim_trial(study.id, plan, Role.SAMPLED, {}, agent_id=other.id)
        assert begun is not None
        left.append(begun)
        bench.store.end_agent(other.id)

    bench.on_end = listen
    bench.search(study, SimulatedLauncher(PREDICTOR), trials=6)
    assert left
    assert bench.store.running_trials() == ()
    with database(bench.store.optuna_url) as storage:
        found = optuna.load_study(study_name=study.name, storage=storage).get_trials()
    assert not any(each.state == TrialState.RUNNING for each in found)


def test_a_plan_that_a_living_agent_runs_is_left_to_it(bench: Bench) -> None:
    study = bench.study()
    other = bench.store.add_agent("another host", "1 1")
    plan = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=3).trials[0].plan
    theirs = bench.store.claim_trial(study.id, plan, Role.PREDICTED, {}, agent_id=other.id)
    assert theirs is not None

    bench.remembers = False
    bench.on_end = lambda _: bench.store.abandon_trial(theirs.id)  # or the search would wait for it
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=5)
    assert ledger.trials[0].plan != plan
