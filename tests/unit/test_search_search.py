"""Whole searches on a real database, with ranks that only calculate."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from autotune.search import search
from autotune.search.baselines import baselines
from autotune.search.calibrated import CalibratedPredictor
from autotune.search.capacities import capacities
from autotune.search.layouts import layouts
from autotune.search.ledger import (
    BASELINE_DEFAULT,
    BASELINE_KEPT,
    BASELINE_OMNIBAL,
    BASELINES,
    CONFIRM,
    PREDICTED,
    SAMPLED,
    Ledger,
    ran,
)
from autotune.search.proposals import Proposals
from autotune.search.runner import Runner
from autotune.search.search import Search
from autotune.search.solver import Solver
from autotune.search.space import Space
from autotune.search.winner import standings
from storage.records import AbandonedTrial, FinishedTrial, StudyRecord, TrialResult
from storage.spool import Spool
from storage.store import Store, open_store
from tests.search_values import BATCH, SimulatedPool, limits_of, predictor_of, prepared_of
from tests.storage_values import completed as measured
from trials.outcome import Cause, Completed, Crash, Failed, Outcome, OutOfMemory, Timeout
from trials.plan import Packed, Padded, Plan

MEMORY = 1 << 40
CRASH = Crash(rank=0, detail="boom")
TOO_LARGE = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
PREDICTOR = predictor_of()


class Killed(BaseException):
    """Stands for the end of the process in the middle of a trial."""


@dataclass
class Bench:
    """Runs searches in one folder, as one process after another would."""

    folder: Path
    store: Store
    told: list[tuple[FinishedTrial, bool]] = field(default_factory=list)
    learnt: list[int] = field(default_factory=list)
    """From how many trials each search learnt."""

    def study(self) -> StudyRecord:
        return self.store.create_study(self.store.add_workload(prepared_of(self.folder, MEMORY).workload), {}, seed=0)

    def ledger(self, study: StudyRecord) -> Ledger:
        known = self.store.answers(study.workload_fingerprint)
        return Ledger(self.store, Spool(self.folder / "spool"), study, known)

    def search(
        self,
        study: StudyRecord,
        pool: SimulatedPool,
        *,
        memory: int = MEMORY,
        solver_memory: int = MEMORY,
        **settings: object,
    ) -> Ledger:
        """One whole search; its ledger."""
        prepared = prepared_of(self.folder, memory, **{"trials": 10, "time_limit": "60s", **settings})
        workload, limits = prepared.workload, limits_of(solver_memory)
        solver = Solver(PREDICTOR, limits)
        pairs = [(pair.qv, pair.qt) for pair in capacities(workload.data, BATCH, hold_all=False)]
        space = Space(layouts(workload.model, workload.hardware.devices), pairs[::4], solver)
        ledger, calibrated = self.ledger(study), CalibratedPredictor(PREDICTOR)
        Search(
            settings=prepared.job.search,
            ledger=ledger,
            proposals=Proposals(self.store.optuna_url, study.name, space, prepared.job.search.sampler, study.seed),
            space=space,
            predictor=calibrated,
            runner=Runner(prepared, calibrated, pool),
            listener=lambda trial, known: self.told.append((trial, known)),
        ).run(baselines(workload, PREDICTOR, solver, limits, hold_all=False))
        self.learnt.append(calibrated.trials)
        return ledger

    def record(self, study: StudyRecord, outcome: Outcome, seconds: float) -> TrialResult:
        """The default plan's trial in an earlier run, whose result is in the spool."""
        workload, limits = prepared_of(self.folder, MEMORY).workload, limits_of(MEMORY)
        first = next(baselines(workload, PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False))
        running = self.store.start_trial(study.id, first.plan, first.role)
        result = TrialResult(
            trial_id=running.id,
            outcome=outcome,
            epoch_seconds=1000.0 if isinstance(outcome, Completed) else None,
            epoch_seconds_error=1.0 if isinstance(outcome, Completed) else None,
            finished=running.started + timedelta(seconds=seconds),
        )
        Spool(self.folder / "spool").put(result)
        return result

    def stored(self, study: StudyRecord) -> list[FinishedTrial]:
        return [trial for trial in self.store.trials(study.id) if isinstance(trial, FinishedTrial)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with open_store(f"sqlite:///{tmp_path}/tuning.db") as store:
        yield Bench(tmp_path, store)


def roles(trials: list[FinishedTrial]) -> list[str]:
    return [trial.role for trial in trials]


def spent(trials: list[FinishedTrial]) -> int:
    """Trials that count against the budget."""
    return len([trial for trial in trials if ran(trial) and trial.role != CONFIRM])


def is_padded(plan: Plan) -> bool:
    return isinstance(plan.packing, Padded)


def test_a_search_runs_baselines_predicted_and_sampled_plans_and_repeats_the_finalists(bench: Bench) -> None:
    study, pool = bench.study(), SimulatedPool(PREDICTOR)
    ledger = bench.search(study, pool)
    found = roles(ledger.trials)
    assert found[:5] == [BASELINE_DEFAULT, BASELINE_KEPT, *[BASELINE_OMNIBAL] * 3]
    assert found[5:9] == [PREDICTED] * 4
    assert set(found[9 : found.index(CONFIRM)]) == {SAMPLED}
    assert set(found[found.index(CONFIRM) :]) == {CONFIRM}
    assert ledger.trials == bench.stored(study) == [trial for trial, known in bench.told if not known]
    assert [trial.plan for trial in ledger.trials if ran(trial)] == pool.asked


def test_finalists_are_repeated_in_turns_after_everything_else(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedPool(PREDICTOR))
    repeated = [trial.plan.id for trial in ledger.trials if trial.role == CONFIRM]
    first, second = repeated[: len(repeated) // 2], repeated[len(repeated) // 2 :]
    assert first == second
    assert len(set(first)) == len(first) >= 4
    of_baselines = {trial.role for trial in ledger.trials if trial.plan.id in set(first)}
    assert of_baselines >= set(BASELINES)


def test_the_plan_that_is_really_fastest_wins_though_another_was_predicted(bench: Bench) -> None:
    def slow_packs(plan: Plan) -> float:
        return 1.0 if plan.layout.pipeline == 1 and isinstance(plan.packing, Packed) else 2.0

    ledger = bench.search(bench.study(), SimulatedPool(PREDICTOR, factor_of=slow_packs), trials=12)
    best = standings(ledger.everything())[0]
    assert slow_packs(best.plan) == 1.0
    assert best.trials > 1
    truth = PREDICTOR.predict(best.plan).epoch_seconds
    assert best.epoch_seconds == pytest.approx(truth, rel=0.03)


def test_nothing_that_is_answered_is_run_again(bench: Bench) -> None:
    study, pool = bench.study(), SimulatedPool(PREDICTOR)
    before = bench.search(study, SimulatedPool(PREDICTOR)).trials
    assert bench.search(study, pool).trials == before
    assert pool.asked == []


def test_a_second_study_learns_from_the_first_and_runs_only_what_is_new(bench: Bench) -> None:
    first, second, pool = bench.study(), bench.study(), SimulatedPool(PREDICTOR)
    old = bench.search(first, SimulatedPool(PREDICTOR)).trials
    bench.told.clear()
    new = bench.search(second, pool, trials=3).trials
    assert spent(new) == 3
    answered = {trial.plan.id for trial in old}
    assert not answered & {trial.plan.id for trial in new if trial.role != CONFIRM}
    known = [trial for trial, was_known in bench.told if was_known]
    assert [trial.id for trial in known[:9]] == [trial.id for trial in old[:9]]
    ours = optuna.load_study(study_name=second.name, storage=bench.store.optuna_url).get_trials()
    measured = {trial.id for trial in old if trial.role != CONFIRM and isinstance(trial.result.outcome, Completed)}
    assert measured <= {each.user_attrs.get("trial_id") for each in ours}


def test_every_answer_is_in_the_optuna_study_once(bench: Bench) -> None:
    study = bench.study()
    for _ in range(2):
        ledger = bench.search(study, SimulatedPool(PREDICTOR))
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    counts = Counter(each.user_attrs.get("trial_id") for each in found if each.user_attrs.get("role") != SAMPLED)
    assert set(counts.values()) == {1}
    assert set(counts) == {trial.id for trial in ledger.trials if trial.role not in (SAMPLED, CONFIRM)}
    assert not any(each.state == TrialState.RUNNING for each in found)


def test_a_plan_that_ran_out_of_memory_is_told_as_infeasible_and_does_not_win(bench: Bench) -> None:
    def cause(plan: Plan) -> Cause | None:
        return TOO_LARGE if plan.layout.pipeline == 1 else None

    study = bench.study()
    ledger = bench.search(study, SimulatedPool(PREDICTOR, cause_of=cause))
    failed = [trial for trial in ledger.trials if isinstance(trial.result.outcome, Failed)]
    assert PREDICTED in roles(failed)
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    for trial in failed:
        told = [each for each in found if each.user_attrs.get("trial_id") == trial.id]
        assert [dict(each.constraints) for each in told] == [{"feasible": pytest.approx(0.2)}]
        # Corrected by the trials before it, whose noise is 1 %.
        assert told[0].value == pytest.approx(PREDICTOR.predict(trial.plan).epoch_seconds, rel=0.02)
    assert {standing.plan.layout.pipeline for standing in standings(ledger.everything())} == {2}


def test_a_trial_that_ran_out_of_memory_is_learnt_from_as_a_completed_one_is(bench: Bench) -> None:
    pool = SimulatedPool(PREDICTOR, cause_of=lambda plan: TOO_LARGE if plan.layout.pipeline == 1 else None)
    ledger = bench.search(bench.study(), pool, trials=6)
    assert {trial.result.outcome.kind for trial in ledger.trials} >= {"completed", "failed"}
    assert bench.learnt == [sum(map(ran, ledger.trials))]


@pytest.mark.parametrize("trials", [1, 6, 10])
def test_no_more_trials_run_than_the_budget_and_one_of_each_baseline(bench: Bench, trials: int) -> None:
    ledger = bench.search(bench.study(), SimulatedPool(PREDICTOR), trials=trials)
    assert spent(ledger.trials) == max(3, trials)


def test_omnibals_neighbours_leave_half_of_the_trials_to_the_search(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedPool(PREDICTOR), trials=6)
    counts = Counter(roles(ledger.trials))
    assert (counts[BASELINE_OMNIBAL], counts[PREDICTED]) == (2, 2)


def test_when_the_time_is_spent_the_baselines_alone_are_compared(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedPool(PREDICTOR), time_limit=1e-6)
    counts = Counter(roles(ledger.trials))
    assert [counts[role] for role in BASELINES] == [1, 1, 1]
    assert set(counts) == {*BASELINES, CONFIRM}


def test_time_that_an_earlier_run_took_is_spent(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, Failed(cause=Timeout(seconds=300)), seconds=300)
    ledger = bench.search(study, SimulatedPool(PREDICTOR), time_limit="5min")
    assert set(roles(ledger.trials)) == {*BASELINES, CONFIRM}


def test_time_for_the_repetitions_is_left(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, measured(), seconds=100)
    ledger = bench.search(study, SimulatedPool(PREDICTOR), time_limit="5min")
    assert set(roles(ledger.trials)) == {*BASELINES, CONFIRM}


class Dying(SimulatedPool):
    """Is killed at its so manieth trial."""

    def __init__(self, last: int) -> None:
        super().__init__(PREDICTOR, cause_of=self._die)
        self._last = last

    def _die(self, plan: Plan) -> None:
        if len(self.asked) == self._last:
            raise Killed


@pytest.mark.parametrize("last", [1, 7, 10, 13])
def test_a_killed_search_goes_on_and_loses_nothing(bench: Bench, last: int) -> None:
    study, pool = bench.study(), SimulatedPool(PREDICTOR)
    with pytest.raises(Killed):
        bench.search(study, Dying(last))
    before = bench.stored(study)
    assert len([trial for trial in before if ran(trial)]) == last - 1
    assert len(bench.store.running_trials(study.id)) == 1
    ledger = bench.search(study, pool)
    assert ledger.trials == bench.stored(study)
    assert ledger.trials[: len(before)] == before
    assert bench.store.running_trials(study.id) == ()
    assert sum(isinstance(trial, AbandonedTrial) for trial in bench.store.trials(study.id)) == 1
    assert spent(ledger.trials) == 10
    assert Counter(trial.plan.id for trial in ledger.trials if trial.role != CONFIRM).most_common(1)[0][1] == 1
    states = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    assert not any(each.state == TrialState.RUNNING for each in states)


def test_a_result_that_was_only_spooled_when_the_process_died_is_used(bench: Bench) -> None:
    study = bench.study()
    spooled = bench.record(study, measured(), seconds=1)
    ledger = bench.search(study, SimulatedPool(PREDICTOR), trials=3)
    assert ledger.trials[0].result == spooled
    assert roles(ledger.trials)[:2] == [BASELINE_DEFAULT, BASELINE_KEPT]


def test_a_failure_of_another_study_is_tried_again_unless_it_was_memory(bench: Bench) -> None:
    def accident(plan: Plan) -> Cause | None:
        accidents: dict[int, Cause] = {1: CRASH, 2: TOO_LARGE}
        return accidents.get(len(faulty.asked))

    faulty = SimulatedPool(PREDICTOR, cause_of=accident)
    bench.search(bench.study(), faulty, trials=4)
    pool = SimulatedPool(PREDICTOR)
    bench.search(bench.study(), pool, trials=4)
    assert faulty.asked[0] in pool.asked
    assert faulty.asked[1] not in pool.asked


@pytest.mark.parametrize("cause", [CRASH, Timeout(seconds=5)])
def test_several_crashes_in_a_row_end_the_search_with_the_last_cause(bench: Bench, cause: Cause) -> None:
    pool = SimulatedPool(PREDICTOR, cause_of=lambda plan: None if is_padded(plan) else cause)
    with pytest.raises(TrialsKeepFailing, match=f"4 trials in a row failed, the last with: {cause}"):
        bench.search(bench.study(), pool, trials=20)
    assert len(pool.asked) == 2 + 4


def test_crashes_between_other_outcomes_do_not_end_the_search(bench: Bench) -> None:
    pool = SimulatedPool(PREDICTOR, cause_of=lambda _: CRASH if len(pool.asked) % 4 else None)
    assert len(bench.search(bench.study(), pool).trials) > 9


def test_where_nothing_completes_there_is_no_feasible_plan(bench: Bench) -> None:
    pool = SimulatedPool(PREDICTOR, cause_of=lambda _: TOO_LARGE)
    with pytest.raises(NoFeasiblePlan, match="none of the 6 plans that were tried completed"):
        bench.search(bench.study(), pool, trials=6)


def test_a_plan_that_runs_out_of_memory_when_it_is_repeated_does_not_win(bench: Bench) -> None:
    def cause(plan: Plan) -> Cause | None:
        return TOO_LARGE if plan in pool.asked[:-1] and plan.layout.pipeline == 1 else None

    pool = SimulatedPool(PREDICTOR, cause_of=cause)
    ledger = bench.search(bench.study(), pool, trials=9)
    once = {trial.plan for trial in ledger.trials if isinstance(trial.result.outcome, Completed)}
    assert any(plan.layout.pipeline == 1 for plan in once)
    assert any(isinstance(trial.result.outcome, Failed) for trial in ledger.trials)
    best = next(standing for standing in standings(ledger.everything()) if standing.trials > 1)
    assert best.plan.layout.pipeline == 2


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search ends after 5 suggestions in a row without a run."""
    monkeypatch.setattr(search, "_IDLE_SUGGESTIONS", 5)


@pytest.mark.usefixtures("impatient")
def test_the_search_ends_when_the_sampler_has_nothing_new_to_say(bench: Bench) -> None:
    study = bench.study()
    ledger = bench.search(study, SimulatedPool(PREDICTOR), solver_memory=1, trials=50)
    assert set(roles(ledger.trials)) == {BASELINE_DEFAULT, BASELINE_KEPT, CONFIRM}
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    assert [each.state for each in found if each.user_attrs["role"] == SAMPLED] == [TrialState.FAIL] * 5


@pytest.mark.usefixtures("impatient")
def test_suggestions_that_are_not_worth_a_run_end_the_search_too(bench: Bench) -> None:
    study = bench.study()
    with pytest.raises(NoFeasiblePlan):
        bench.search(study, SimulatedPool(PREDICTOR), memory=1, trials=50, time_limit="2s")
    assert 0 < roles(bench.stored(study)).count(SAMPLED) <= 5
