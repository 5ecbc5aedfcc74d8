"""Whole searches on a real database, with simulated ranks."""

import dataclasses
from collections import Counter
from itertools import pairwise

import optuna
import pytest
from optuna.trial import TrialState

from autotune.search import search
from autotune.search.execution.ledger import is_shortened, ran
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Space
from autotune.search.winner import Standing
from storage.records import AbandonedTrial, FinishedTrial
from tests.machines.search_bench import ALWAYS, MEMORY, ONE_PLAN, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.search import axes_of, limits_of, runner_of
from tests.values.storage import completed as measured
from trials.outcome import Cause, Completed, Failed, OutOfMemory, Timeout
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage

TOO_LARGE = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)


class Killed(BaseException):
    """Simulates the end of the process in the middle of a trial."""


def roles(trials: list[FinishedTrial]) -> list[str]:
    return [trial.role for trial in trials]


def fastest(bench: Bench) -> Standing:
    """Return the winner that the tuner would store."""
    return bench.standings.entries[bench.standings.winner().number]


def spent(trials: list[FinishedTrial]) -> int:
    """Return the trials that count against the budget."""
    return len([trial for trial in trials if ran(trial) and trial.role != Role.CONFIRM])


@pytest.mark.usefixtures("unsatisfied")
def test_a_search_runs_predicted_plans_baselines_and_sampled_plans_and_repeats_the_finalists_in_turns(
    bench: Bench,
) -> None:
    study, pool = bench.study(), SimulatedLauncher(PREDICTOR)
    ledger = bench.search(study, pool, trials=7, time_limit="1h")
    found = roles(ledger.trials)
    assert [role for role in dict.fromkeys(found) if role != Role.REFERENCE] == [
        Role.PREDICTED,
        *ALWAYS,
        Role.SAMPLED,
        Role.CONFIRM,
    ]
    assert found[found.index(Role.PACKED) : found.index(Role.SAMPLED)] == list(ALWAYS)
    assert set(found[found.index(Role.SAMPLED) : found.index(Role.CONFIRM)]) <= {Role.SAMPLED, Role.REFERENCE}
    assert set(found[found.index(Role.CONFIRM) :]) == {Role.CONFIRM}
    assert ledger.trials == bench.stored(study) == [trial for trial, known in bench.reported if not known]
    assert [trial.plan for trial in ledger.trials if ran(trial)] == pool.asked
    assert spent(ledger.trials) == 7
    assert bench.said[-1] == "The 7 trials of search.trials are used up"
    repeated = [trial.plan.id for trial in ledger.trials if trial.role == Role.CONFIRM]
    first = repeated[: len(set(repeated))]
    assert len(set(first)) == len(first) >= 3
    of_baselines = {trial.role for trial in ledger.trials if trial.plan.id in set(first)}
    assert of_baselines >= set(ALWAYS)


def test_the_plan_that_is_measured_fastest_wins_even_if_another_was_predicted(bench: Bench) -> None:
    def slow_packs(plan: Plan) -> float:
        return 1.0 if plan.layout.pipeline == 1 and isinstance(plan.packing, Packed) else 2.0

    bench.search(bench.study(), SimulatedLauncher(PREDICTOR, factor_of=slow_packs), trials=8)
    best = fastest(bench)
    assert slow_packs(best.plan) == 1.0
    assert best.trials > 1
    truth = PREDICTOR.predict(best.plan).epoch_seconds
    assert best.epoch_seconds == pytest.approx(truth, rel=0.03)


@pytest.mark.usefixtures("unsatisfied")
def test_nothing_that_is_answered_is_run_again_and_a_second_study_learns_from_it(bench: Bench) -> None:
    study, second, pool = bench.study(), bench.study(), SimulatedLauncher(PREDICTOR)
    before = bench.search(study, SimulatedLauncher(PREDICTOR), trials=6).trials
    assert Role.SAMPLED in roles(before)
    assert bench.search(study, pool, trials=6).trials == before
    assert pool.asked == []
    # Optuna's study has every answer once.
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    counts = Counter(each.user_attrs.get("trial_id") for each in found if each.user_attrs.get("role") != Role.SAMPLED)
    assert set(counts.values()) == {1}
    assert set(counts) == {trial.id for trial in before if trial.role != Role.SAMPLED}
    assert not any(each.state == TrialState.RUNNING for each in found)
    # The second study runs only what is new.
    old = before
    bench.reported.clear()
    new = bench.search(second, pool, trials=3).trials
    assert spent(new) == 3
    answered = {trial.plan.id for trial in old}
    assert not answered & {trial.plan.id for trial in new if trial.role != Role.CONFIRM}
    known = [trial for trial, was_known in bench.reported if was_known]
    assert len(known) >= 4
    assert [trial.id for trial in known] == [trial.id for trial in old[: len(known)]]
    ours = optuna.load_study(study_name=second.name, storage=bench.store.optuna_url).get_trials()
    completed = [trial for trial in old if isinstance(trial.result.outcome, Completed)]
    measured = {trial.id for trial in completed if trial.role not in (Role.CONFIRM, Role.REFERENCE)}
    assert measured <= {each.user_attrs.get("trial_id") for each in ours}


def test_a_plan_that_ran_out_of_memory_is_infeasible_for_optuna_and_does_not_win(bench: Bench) -> None:
    def cause(plan: Plan) -> Cause | None:
        return TOO_LARGE if plan.layout.pipeline == 1 else None

    study = bench.study()
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR, cause_of=cause), trials=6)
    failed = [trial for trial in ledger.trials if isinstance(trial.result.outcome, Failed)]
    assert Role.PREDICTED in roles(failed)
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    for trial in failed:
        recorded = [each for each in found if each.user_attrs.get("trial_id") == trial.id]
        assert [dict(each.constraints) for each in recorded] == [{"0": pytest.approx(0.2)}]
        # Corrected by the trials before it, whose noise is 1 %.
        assert recorded[0].value == pytest.approx(PREDICTOR.predict(trial.plan).epoch_seconds, rel=0.02)
    assert {standing.plan.layout.pipeline for standing in bench.standings.entries} == {2}


@pytest.mark.long
def test_a_trial_that_ran_out_of_memory_is_learnt_from_as_a_completed_one_is(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda plan: TOO_LARGE if plan.layout.pipeline == 1 else None)
    ledger = bench.search(bench.study(), pool, trials=6)
    assert {trial.result.outcome.kind for trial in ledger.trials} >= {"completed", "failed"}
    assert bench.learnt == [sum(map(ran, ledger.trials))]


@pytest.mark.usefixtures("unsatisfied")
@pytest.mark.parametrize("trials", [1, pytest.param(6, marks=pytest.mark.long)])
def test_no_more_trials_run_than_the_budget_and_one_of_each_baseline(bench: Bench, trials: int) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=trials)
    assert spent(ledger.trials) == max(3, trials)


@pytest.mark.long
def test_hours_of_devices_are_those_of_all_agents_trials(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, measured(), seconds=100)  # on two devices
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), device_hours=201 / 3600)
    assert set(roles(ledger.trials)) <= {*ALWAYS, Role.CONFIRM}
    more = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), device_hours=1.0)
    assert Role.PREDICTED in roles(more.trials)


@pytest.mark.parametrize(
    ("trials", "neighbours"),
    [(6, 1), pytest.param(12, 2, marks=pytest.mark.long), pytest.param(16, 3, marks=pytest.mark.long)],
)
def test_baselines_leave_three_quarters_of_the_trials_to_the_search(bench: Bench, trials: int, neighbours: int) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=trials, axes=ONE_PLAN)
    assert Counter(roles(ledger.trials))[Role.OMNIBAL] == neighbours


def test_when_the_time_is_spent_the_baseline_predicted_fastest_is_measured_alone(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), time_limit="0.000001s")
    assert set(roles(ledger.trials)) == {Role.PACKED, Role.CONFIRM}


@pytest.mark.long
def test_time_that_an_earlier_run_took_is_spent(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, Failed(cause=Timeout(seconds=300)), seconds=300)
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), time_limit="5min")
    assert set(roles(ledger.trials)) <= {*ALWAYS, Role.CONFIRM}


def test_a_slow_baseline_leaves_the_time_of_its_repeat_to_the_search(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, measured(), seconds=100)
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), time_limit="3min")  # no time for another such trial
    assert Role.SAMPLED in roles(ledger.trials)
    assert {Role.DEFAULT, Role.PACKED, Role.CONFIRM} <= set(roles(ledger.trials))
    slow = next(trial.plan for trial in ledger.trials if trial.role == Role.DEFAULT)
    assert slow not in {trial.plan for trial in ledger.trials if trial.role == Role.CONFIRM}


@pytest.mark.long
def test_a_slow_first_trial_is_not_taken_for_the_length_of_every_trial(bench: Bench) -> None:
    study = bench.study()
    bench.record(study, measured(), seconds=100)  # whose ranks had to start
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), time_limit="5min")
    assert Role.SAMPLED in roles(ledger.trials)


class Dying(SimulatedLauncher):
    """Is killed at trial number `last`."""

    def __init__(self, last: int) -> None:
        super().__init__(PREDICTOR, cause_of=self._die)
        self._last = last

    def _die(self, plan: Plan) -> None:
        if len(self.asked) == self._last:
            raise Killed


@pytest.mark.usefixtures("unsatisfied")
@pytest.mark.parametrize("last", [pytest.param(1, marks=pytest.mark.long), 6, pytest.param(12, marks=pytest.mark.long)])
def test_a_killed_search_goes_on_and_loses_nothing(bench: Bench, last: int) -> None:
    study, pool = bench.study(), SimulatedLauncher(PREDICTOR)
    with pytest.raises(Killed):
        bench.search(study, Dying(last), trials=7)
    before = bench.stored(study)
    assert len([trial for trial in before if ran(trial)]) == last - 1
    assert len(bench.store.running_trials()) == 1
    ledger = bench.search(study, pool, trials=7)
    assert ledger.trials == bench.stored(study)
    assert ledger.trials[: len(before)] == before
    assert bench.store.running_trials() == ()
    assert sum(isinstance(trial, AbandonedTrial) for trial in bench.store.trials(study.id)) == 1
    assert spent(ledger.trials) == 7
    once = [trial.plan for trial in ledger.trials if trial.role not in (Role.CONFIRM, Role.REFERENCE)]
    assert len(set(once)) == len(once)
    states = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    assert not any(each.state == TrialState.RUNNING for each in states)


def test_a_result_that_was_only_spooled_when_the_process_died_is_used(bench: Bench) -> None:
    study = bench.study()
    spooled = bench.record(study, measured(), seconds=1)
    ledger = bench.search(study, SimulatedLauncher(PREDICTOR), trials=3)
    assert ledger.trials[0].result == spooled
    assert roles(ledger.trials)[:3] == [Role.DEFAULT, Role.PACKED, Role.OMNIBAL]


def test_the_current_plan_of_another_search_is_not_that_of_this_one(bench: Bench) -> None:
    bench.current_plan = Plan(
        packing=Padded(samples=2),
        layout=Layout(pipeline=2, data=1, zero=0),
        stages=(Stage(vision=4, language=0), Stage(vision=1, language=4)),
    )
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=1)
    assert Role.CURRENT_PLAN in {baseline.role for baseline in bench.standings.compare(0, samples=1)}
    bench.current_plan = None
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=1)
    assert Role.CURRENT_PLAN not in {baseline.role for baseline in bench.standings.compare(0, samples=1)}


def test_the_reason_why_a_search_ends_is_reported(bench: Bench) -> None:
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), time_limit="0.000001s")
    quiet = SimulatedLauncher(PREDICTOR, Behaviour(noise=0.0))
    bench.search(bench.study(), quiet, trials=60, time_limit="1h")
    bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=60, axes=ONE_PLAN, time_limit="1h")
    reasons = [said for said in bench.said if not said.startswith("A trial of the plan")]
    assert [said.split(" ")[0] for said in reasons] == ["Too", "Another", "Every"]
    assert reasons[0].startswith("Too little is left of search.time_limit or search.device_hours")
    assert "expected to gain" in reasons[1]


@pytest.mark.parametrize("sampler", ["uniform", pytest.param("exhaustive", marks=pytest.mark.long)])
def test_other_samplers_spend_the_budget(bench: Bench, sampler: str) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR, Behaviour(noise=0.0)), trials=7, sampler=sampler)
    assert spent(ledger.trials) == 7
    assert Role.SAMPLED in roles(ledger.trials)


@pytest.mark.parametrize("sampler", ["uniform", pytest.param("exhaustive", marks=pytest.mark.long)])
@pytest.mark.parametrize("is_another", [False, True], ids=["the same study", "another study"])
def test_a_search_that_goes_on_suggests_no_plan_again(
    sampler: str, is_another: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "_IDLE_SUGGESTIONS", 6)
    study, machine = bench.study(), SimulatedLauncher(PREDICTOR)
    first = bench.explore(study, machine, trials=14, sampler=sampler, time_limit="1h")
    more = bench.explore(bench.study() if is_another else study, machine, trials=17, sampler=sampler, time_limit="1h")
    assert spent(first.trials) == 14
    assert spent(more.trials) == 17


def test_a_plan_that_runs_out_of_memory_when_it_is_repeated_does_not_win(bench: Bench) -> None:
    def cause(plan: Plan) -> Cause | None:
        return TOO_LARGE if plan in pool.asked[:-1] and plan.layout.pipeline == 1 else None

    pool = SimulatedLauncher(PREDICTOR, cause_of=cause)
    ledger = bench.search(bench.study(), pool, trials=6)
    once = {trial.plan for trial in ledger.trials if isinstance(trial.result.outcome, Completed)}
    assert any(plan.layout.pipeline == 1 for plan in once)
    assert any(isinstance(trial.result.outcome, Failed) for trial in ledger.trials)
    assert fastest(bench).plan.layout.pipeline == 2


# --- when it ends ---


@pytest.mark.long
def test_the_search_ends_early_when_no_gain_is_expected(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR, Behaviour(noise=0.001)), trials=20)
    assert spent(ledger.trials) < 20
    assert roles(ledger.trials)[-1] == Role.CONFIRM


@pytest.mark.long
def test_the_search_ends_when_every_plan_of_the_space_was_tried(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), axes=ONE_PLAN, trials=50)
    assert set(roles(ledger.trials)) == {*ALWAYS, Role.PREDICTED, Role.CONFIRM}


def test_suggestions_that_need_no_run_end_the_search(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_IDLE_SUGGESTIONS", 5)
    study = bench.study()
    two = dataclasses.replace(ONE_PLAN, packers=("isf", "best-fit"))
    bench.search(study, SimulatedLauncher(PREDICTOR), axes=two, sampler="uniform", trials=50)
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    assert 5 <= len([each for each in found if each.user_attrs["role"] == Role.SAMPLED]) <= 2 * 5
    assert bench.said[-1] == "The last 5 suggestions of the sampler need no run, so the search ends"
    ids = [each.user_attrs["trial_id"] for each in found if "trial_id" in each.user_attrs]
    assert sorted(ids) == sorted(trial.id for trial in bench.stored(study))


def test_confirmation_ends_as_soon_as_one_plan_is_surely_the_fastest(bench: Bench) -> None:
    def slow_but_one(plan: Plan) -> float:
        return 1.0 if plan == chosen else 1.5

    chosen = Space(ONE_PLAN, Solver(PREDICTOR, limits_of(MEMORY))).starts[0]
    launcher = SimulatedLauncher(PREDICTOR, Behaviour(noise=0.001), factor_of=slow_but_one)
    sure = bench.search(bench.study(), launcher, axes=ONE_PLAN, trials=8, confirm_rounds=6)
    confirmed = Counter(trial.plan for trial in sure.trials if trial.role == Role.CONFIRM)
    assert set(confirmed.values()) <= {1, 2}
    assert fastest(bench).plan == chosen


def test_confirmation_goes_on_while_no_plan_is_surely_the_fastest(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "SMALL_LOSS", -1.0)
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), confirm_rounds=3, trials=5)
    confirmed = Counter(trial.plan for trial in ledger.trials if trial.role == Role.CONFIRM)
    assert max(confirmed.values()) == 3


# --- besides the proposals ---


@pytest.mark.long
@pytest.mark.usefixtures("unsatisfied")
def test_one_plan_is_run_again_after_every_eight_trials(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=22, time_limit="1h")
    found = roles([trial for trial in ledger.trials if trial.role != Role.CONFIRM])
    again = [number for number, role in enumerate(found) if role == Role.REFERENCE]
    assert len(again) >= 2
    assert again[0] >= 8
    assert {later - earlier for earlier, later in pairwise(again)} == {9}
    plans = {trial.plan for trial in ledger.trials if trial.role == Role.REFERENCE}
    assert len(plans) == 1
    first = next(trial for trial in ledger.trials if trial.role == Role.REFERENCE)
    assert first.plan in {trial.plan for trial in ledger.trials[: first.number]}


def test_a_trial_that_is_clearly_worse_is_pruned_and_does_not_rank(bench: Bench) -> None:
    study, bad = bench.study(), "best-fit"

    def factor(plan: Plan) -> float:
        return 2.0 if isinstance(plan.packing, Packed) and plan.packing.packer == bad else 1.0

    launcher = SimulatedLauncher(PREDICTOR, factor_of=factor)
    ledger = bench.search(study, launcher, axes=axes_of(), trials=14, sampler="uniform", timed_steps=5)
    shortened = {trial.id: trial for trial in ledger.trials if is_shortened(trial)}
    assert shortened
    assert {trial.role for trial in shortened.values()} == {Role.SAMPLED}
    found = optuna.load_study(study_name=study.name, storage=bench.store.optuna_url).get_trials()
    recorded = [each for each in found if each.user_attrs.get("trial_id") in shortened]
    assert {each.state for each in recorded} == {TrialState.PRUNED}
    whole = {trial.plan for trial in ledger.trials if not is_shortened(trial)}
    assert {standing.plan for standing in bench.standings.entries} <= whole


def test_a_plan_that_another_search_ended_early_runs_again_and_may_win(bench: Bench) -> None:
    def slow_but_one(plan: Plan) -> float:
        return 1.0 if plan == only else 1.5

    only = Space(ONE_PLAN, Solver(PREDICTOR, limits_of(MEMORY))).starts[0]
    trial = bench.store.start_trial(bench.study().id, only, Role.SAMPLED)
    run = runner_of(bench.folder, SimulatedLauncher(PREDICTOR), predictor=PREDICTOR).run(only)
    assert isinstance(run.outcome, Completed)
    early = dataclasses.replace(run, outcome=dataclasses.replace(run.outcome, shortened=True))
    bench.store.finish_trial(early.result(trial.id, trial.started))
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR, factor_of=slow_but_one), axes=ONE_PLAN)
    assert {trial.role for trial in ledger.trials if trial.plan == only} == {Role.PREDICTED, Role.CONFIRM}
    assert fastest(bench).plan == only
    # The models have learnt from the trial that ended early, too.
    assert bench.learnt == [1 + sum(map(ran, ledger.trials))]
