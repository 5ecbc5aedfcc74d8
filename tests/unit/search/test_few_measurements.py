"""A search that ends with any usable measurement has a winner, and says what it is the best of."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from autotune.errors import NoFeasiblePlan, TrialsKeepFailing
from autotune.search.roles import BASELINES
from autotune.search.winner import Standing
from tests.machines.search_bench import MEMORY, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.parameters import parameters
from trials.outcome import Cause, Completed, Crash, OutOfMemory
from trials.plan import Padded, Plan

CRASH = Crash(rank=0, detail="boom")
TOO_LARGE = OutOfMemory(stage=0, rank=0, needed_bytes=120, limit_bytes=100)
NARROW: dict[str, Any] = {"layouts": ["p2-d1-z0"], "packers": ["isf"], "qv": [9], "qt": [480]}
"""A space that none of the unpacked baselines is in."""


def is_padded(plan: Plan) -> bool:
    return isinstance(plan.packing, Padded)


def winner(bench: Bench) -> Standing:
    found = bench.standings
    assert found.entries[found.winner().number].trials
    return found.entries[found.winner().number]


def crashing(is_bad: Callable[[Plan], bool], cause: Cause = CRASH) -> SimulatedLauncher:
    return SimulatedLauncher(PREDICTOR, cause_of=lambda plan: cause if is_bad(plan) else None)


@pytest.mark.parametrize(
    "budget",
    [{"trials": 1}, pytest.param({"trials": 2}, marks=pytest.mark.long), {"time_limit": "0.001s"}],
    ids=str,
)
def test_a_budget_for_the_baselines_alone_gives_the_fastest_even_outside_the_space(
    bench: Bench, budget: dict[str, Any]
) -> None:
    ledger = bench.search(bench.study(), SimulatedLauncher(PREDICTOR), space=NARROW, **budget)
    completed = {trial.plan for trial in ledger.trials if isinstance(trial.result.outcome, Completed)}
    best = winner(bench)
    assert best.is_baseline
    assert best.epoch_seconds == min(each.epoch_seconds for each in bench.standings.entries if each.trials > 1)
    assert len(completed) == len(bench.standings.entries)
    assert f"No plan of search.space completed; the best plan is the fastest of {len(completed)} " in bench.said[-1]
    assert bench.standings.winner().confidence is None


@pytest.mark.parametrize(
    ("space", "cause"),
    parameters(
        {
            "any space, crashes": ({}, CRASH),
            "any space, memory": ({}, TOO_LARGE),
            "narrow space, crashes": (NARROW, CRASH),
            "narrow space, memory": (NARROW, TOO_LARGE),
        },
        short=("narrow space, crashes",),
    ),
)
def test_where_all_proposals_fail_the_fastest_baseline_wins(bench: Bench, cause: Cause, space: dict[str, Any]) -> None:
    pool = crashing(lambda plan: not is_padded(plan), cause)
    bench.search(bench.study(), pool, trials=20, space=space)
    assert winner(bench).is_baseline
    assert is_padded(winner(bench).plan)


def test_trials_that_keep_failing_after_some_completed_end_the_search_with_a_winner(bench: Bench) -> None:
    pool = crashing(lambda _: len(pool.asked) > 5)
    ledger = bench.search(bench.study(), pool, trials=20, time_limit="1h")
    assert len(pool.asked) <= 10
    assert any(
        re.search("ends early with what completed: 4 trials in a row failed, .*boom", text) for text in bench.said
    )
    assert winner(bench).plan in {trial.plan for trial in ledger.trials[:5]}


def test_one_trial_that_completed_wins_alone(bench: Bench) -> None:
    kept: list[Plan] = []

    def is_bad(plan: Plan) -> bool:
        kept.extend([] if kept or not is_padded(plan) else [plan])
        return plan not in kept

    bench.search(bench.study(), crashing(is_bad, TOO_LARGE), space=NARROW)
    assert [winner(bench).plan] == kept == [each.plan for each in bench.standings.entries]


def test_disturbed_runs_alone_give_a_winner(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, Behaviour(disturbed_share=1.0))
    bench.search(bench.study(), pool, trials=1, space=NARROW)
    assert winner(bench).is_baseline


def test_a_plan_of_the_space_that_completed_wins_over_faster_baselines_outside_it(bench: Bench) -> None:
    pool = SimulatedLauncher(PREDICTOR, factor_of=lambda plan: 0.1 if is_padded(plan) else 1.0)
    bench.search(bench.study(), pool, trials=5, space={"packers": ["isf", "best-fit"]})
    assert not is_padded(winner(bench).plan)
    assert not any("No plan of search.space" in text for text in bench.said)


def test_an_interrupted_search_with_baselines_alone_goes_on_to_a_winner(bench: Bench) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(_: object) -> None:
        if len(bench.reported) == 2:
            raise Interrupted

    bench.on_end, study = interrupt, bench.study()
    with pytest.raises(Interrupted):
        bench.search(study, SimulatedLauncher(PREDICTOR), trials=1, space=NARROW)
    bench.on_end = lambda _: None
    bench.search(study, SimulatedLauncher(PREDICTOR), trials=1, space=NARROW)
    assert winner(bench).roles & set(BASELINES)


@pytest.mark.parametrize(("cause", "error"), [(CRASH, TrialsKeepFailing), (TOO_LARGE, NoFeasiblePlan)])
def test_without_any_measurement_there_is_no_winner(bench: Bench, cause: Cause, error: type[Exception]) -> None:
    with pytest.raises(error):
        bench.search(bench.study(), crashing(lambda _: True, cause), memory=MEMORY)
