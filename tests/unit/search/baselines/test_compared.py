"""Which baselines a search tries, and what it compares its winner with."""

import pytest

from autotune.search.baselines import baselines
from autotune.search.budget import Budget
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.packed import fastest_packed
from autotune.search.roles import Role
from autotune.search.solver.solver import Solver
from tests.machines.search_bench import ALWAYS, MEMORY, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.search import limits_of, prepared_of, workload_of
from trials.plan import Plan


@pytest.mark.long
@pytest.mark.usefixtures("unsatisfied")
def test_of_the_neighbours_of_a_baseline_the_two_predicted_fastest_are_run(bench: Bench) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR, Behaviour(noise=0.0)), trials=40, time_limit="1h")
    omnibal = [trial.plan for trial in ledger.trials if trial.role == Role.OMNIBAL]
    prepared, limits = prepared_of(bench.folder, MEMORY), limits_of(MEMORY)
    everything = baselines(prepared.workload, PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False)
    anchor, *neighbours = [each.plan for each in everything if each.role == Role.OMNIBAL]
    assert omnibal == [anchor, *sorted(neighbours, key=PREDICTOR.epoch_seconds)[:2]]


def test_a_baseline_that_was_tried_as_predicted_best_is_compared_with(bench: Bench) -> None:
    first = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=6)
    best = next(trial.plan for trial in first.trials if trial.role == Role.PREDICTED)
    bench.remembers, bench.current_plan = False, best
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), trials=6)
    assert [trial.plan for trial in ledger.trials if trial.role != Role.CONFIRM].count(best) == 1
    assert Role.CURRENT_PLAN in {baseline.role for baseline in bench.standings.compare(0, samples=100)}


def test_a_search_on_a_machine_where_packs_without_a_pipeline_are_fastest_ends_with_them_or_better(
    bench: Bench,
) -> None:
    """The profile takes other plans for faster; only the trial of the baseline shows what the machine does."""
    limits = limits_of(MEMORY)
    packed, *_ = fastest_packed(workload_of(MEMORY), Solver(PREDICTOR, limits), limits, hold_all=False)

    def slow_others(plan: Plan) -> float:
        return 1.0 if plan == packed else 3.0

    bench.search(bench.study(), SimulatedLauncher(PREDICTOR, factor_of=slow_others), trials=5)
    winner = bench.standings.winner()
    best = bench.standings.entries[winner.number]
    (over, *_) = bench.standings.compare(winner.number, samples=100)
    assert best.plan == packed
    assert (over.role, over.gain, over.is_best) == (Role.PACKED, 1.0, True)


@pytest.mark.parametrize("factor", [1.0, 1.3])
def test_packs_of_one_length_that_run_slower_than_predicted_make_others_run_that_may_be_faster(
    bench: Bench, factor: float
) -> None:
    memory = 40 << 20
    limits = limits_of(memory)
    first, second = fastest_packed(workload_of(memory), Solver(PREDICTOR, limits), limits, hold_all=False)
    machine = SimulatedLauncher(
        PREDICTOR, Behaviour(noise=0.0), factor_of=lambda plan: factor if plan == first else 1.0
    )
    ledger = bench.search(bench.study(), machine, memory=memory, trials=8)
    expected = [first] if factor == 1.0 else [first, second]
    assert [trial.plan for trial in ledger.trials if trial.role == Role.PACKED] == expected
    number = bench.standings.baseline(Role.PACKED)
    assert number is not None
    assert bench.standings.entries[number].plan == expected[-1]


@pytest.mark.parametrize("keeps", [True, False])
def test_where_time_is_short_the_baseline_predicted_slowest_is_left_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Also where the other one can only be compared, since it changes what is learned."""
    limits = limits_of(MEMORY)
    everything = baselines(workload_of(MEMORY), PREDICTOR, Solver(PREDICTOR, limits), limits, hold_all=False)
    firsts = {each.role: each.plan for each in reversed([*everything])}
    # The one that is fastest always runs.
    *_, second, slowest = sorted(ALWAYS, key=lambda role: PREDICTOR.epoch_seconds(firsts[role]))

    def has_time(budget: Budget, runs: int) -> bool:
        compared = sum(trial.role in ALWAYS for trial in (*budget.ledger.trials, *budget.ledger.open))
        return compared + runs < len(ALWAYS)

    monkeypatch.setattr(Budget, "has_time", has_time)
    faults = {} if keeps else {firsts[second]: ("unlike random steps",)}
    monkeypatch.setattr(CalibratedPredictor, "_learning_faults", lambda _, plan: faults.get(plan, ()))
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR))
    roles = {trial.role for trial in ledger.trials}
    assert (second in roles, slowest in roles) == (True, False)
    assert ALWAYS.index(slowest) < ALWAYS.index(second), "the order alone would have left out the other one"
    assert bench.said[-1].endswith(f"not run: {slowest}")


def test_when_the_time_is_spent_a_baseline_that_keeps_the_training_is_measured(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, limits = workload_of(MEMORY), limits_of(MEMORY)
    packed, *_ = fastest_packed(workload, Solver(PREDICTOR, limits), limits, hold_all=False)
    monkeypatch.setattr(
        CalibratedPredictor, "_learning_faults", lambda _, plan: ("unlike random steps",) if plan == packed else ()
    )
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), time_limit="0.000001s")
    measured_roles = {trial.role for trial in ledger.trials} - {Role.CONFIRM}
    assert len(measured_roles) == 1
    assert measured_roles < {*ALWAYS} - {Role.PACKED}
    left_out = [role for role in ALWAYS if role not in {*measured_roles, Role.PACKED}]
    too_little = "Too little is left of search.time_limit or search.device_hours; not run: "
    assert [said for said in bench.said if "A trial of" not in said] == [too_little + ", ".join([*left_out, "packed"])]
