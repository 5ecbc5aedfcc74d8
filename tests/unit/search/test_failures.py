"""When failures of trials end a search, and when they do not."""

import pytest

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from autotune.search.roles import Role
from tests.machines.search_bench import PREDICTOR, Bench
from tests.machines.simulated import SimulatedLauncher
from tests.values.search import axes_of
from trials.outcome import Cause, Completed, Crash, OutOfMemory, Timeout
from trials.plan import Layout, Padded, Plan

CRASH = Crash(rank=0, detail="boom")
TOO_LARGE = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
ONE_PACKING = axes_of(layouts=(Layout(pipeline=2, data=1, zero=0),), packers=("isf",), capacities=((9, 480),))


def is_padded(plan: Plan) -> bool:
    return isinstance(plan.packing, Padded)


def test_a_failure_of_another_study_is_tried_again_unless_it_was_memory(bench: Bench) -> None:
    def failure(plan: Plan) -> Cause | None:
        failures: dict[int, Cause] = {1: CRASH, 2: TOO_LARGE}
        return failures.get(len(faulty.asked))

    faulty = SimulatedLauncher(PREDICTOR, cause_of=failure)
    bench.search(bench.study(), faulty, trials=4)
    pool = SimulatedLauncher(PREDICTOR)
    bench.search(bench.study(), pool, trials=4)
    assert faulty.asked[0] in pool.asked
    assert faulty.asked[1] not in pool.asked


@pytest.mark.parametrize("cause", [CRASH, pytest.param(Timeout(seconds=5), marks=pytest.mark.long)])
def test_several_crashes_in_a_row_end_the_search_with_the_common_cause(bench: Bench, cause: Cause) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: cause)
    with pytest.raises(TrialsKeepFailing, match=f"4 trials in a row failed, 4 of 4 with: {cause}"):
        bench.search(bench.study(), pool, trials=20)
    assert len(pool.asked) == 4


@pytest.mark.usefixtures("unsatisfied")
def test_crashes_between_other_outcomes_do_not_end_the_search(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: CRASH if len(pool.asked) % 4 else None)
    assert len(bench.search(bench.study(), pool).trials) > 9


def test_where_nothing_completes_there_is_no_feasible_plan(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: TOO_LARGE)
    with pytest.raises(
        NoFeasiblePlan,
        match=r"no plan .* completed, 6 of 6 ran out of memory, .* stage 0, which needed",
    ):
        bench.search(bench.study(), pool, trials=6)
    assert len(pool.asked) == 6


def test_where_everything_runs_out_of_memory_the_search_ends_long_before_its_budget(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: TOO_LARGE)
    with pytest.raises(NoFeasiblePlan, match="all 8 trials failed, 8 of 8 ran out of memory"):
        bench.search(bench.study(), pool, trials=40)


def test_where_all_of_few_trials_crash_memory_is_not_blamed(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: CRASH)
    with pytest.raises(TrialsKeepFailing, match=r"no plan of the search space completed, 3 of 3 with: .*boom"):
        bench.search(bench.study(), pool, trials=3, axes=ONE_PACKING)


def test_after_a_transient_failure_of_all_plans_a_search_that_goes_on_tries_them_again(bench: Bench) -> None:
    study, broken = bench.study(), SimulatedLauncher(PREDICTOR, cause_of=lambda _: CRASH)
    with pytest.raises(TrialsKeepFailing):
        bench.search(study, broken)
    mended = SimulatedLauncher(PREDICTOR)
    ledger = bench.search(study, mended)
    assert set(broken.asked) <= set(mended.asked)
    completed = {trial.role for trial in ledger.trials if isinstance(trial.result.outcome, Completed)}
    assert completed >= {Role.PREDICTED, Role.PACKED, Role.DEFAULT, Role.OMNIBAL}


def test_a_plan_that_crashes_twice_is_not_tried_again(bench: Bench) -> None:
    bad: list[Plan] = []

    def cause(plan: Plan) -> Cause | None:
        bad.extend([] if bad or is_padded(plan) else [plan])
        return CRASH if plan in bad else None

    pool = SimulatedLauncher(PREDICTOR, cause_of=cause)
    bench.search(bench.study(), pool)
    assert 1 <= pool.asked.count(bad[0]) <= 2
