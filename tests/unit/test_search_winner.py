import math

import pytest

from autotune.search.ledger import BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL, CONFIRM
from autotune.search.winner import best_baselines, compare, finalists, standings
from storage.records import FinishedTrial
from tests.search_values import completed, finished, padded_plan
from tests.storage_values import OUTCOMES

TRIALS = (
    completed(padded_plan(1), 200.0, 2.0, BASELINE_DEFAULT),
    completed(padded_plan(2), 150.0, 3.0, BASELINE_OMNIBAL),
    completed(padded_plan(3), 140.0, 1.0, BASELINE_OMNIBAL),
    completed(padded_plan(4), 100.0, 1.0),
    completed(padded_plan(5), 90.0, 1.0),
    completed(padded_plan(5), 94.0, 1.0, CONFIRM),
    completed(padded_plan(5), 92.0, 1.0, CONFIRM),
)


def numbers(trials: tuple[FinishedTrial, ...]) -> list[int]:
    """The plans' numbers, fastest first."""
    known = {padded_plan(number).id: number for number in range(1, 10)}
    return [known[standing.plan.id] for standing in standings(trials)]


def test_plans_stand_in_order_of_their_mean() -> None:
    assert numbers(TRIALS) == [5, 4, 3, 2, 1]
    first = standings(TRIALS)[0]
    assert (first.epoch_seconds, first.trials, first.roles) == (92.0, 3, frozenset({"sampled", CONFIRM}))
    assert first.peak_bytes == 61 << 30


def test_repeated_trials_give_the_error_of_their_mean() -> None:
    assert standings(TRIALS)[0].epoch_seconds_error == pytest.approx(2.0 / math.sqrt(3))


def test_an_error_is_no_less_than_the_trials_own() -> None:
    alike = tuple(completed(padded_plan(1), 100.0, error) for error in (3.0, 4.0))
    assert standings(alike)[0].epoch_seconds_error == pytest.approx(2.5)
    assert standings(alike[:1])[0].epoch_seconds_error == pytest.approx(3.0)


@pytest.mark.parametrize("kind", ["rejected", "crash", "timeout", "out of memory"])
def test_only_completed_plans_stand(kind: str) -> None:
    assert numbers((*TRIALS, finished(padded_plan(6), OUTCOMES[kind]))) == [5, 4, 3, 2, 1]


def test_a_plan_that_once_ran_out_of_memory_does_not_stand() -> None:
    assert numbers((*TRIALS, finished(padded_plan(5), OUTCOMES["out of memory"], role=CONFIRM))) == [4, 3, 2, 1]
    assert numbers((*TRIALS, finished(padded_plan(5), OUTCOMES["crash"], role=CONFIRM))) == [5, 4, 3, 2, 1]


def test_the_best_plan_of_each_baseline_is_compared_with() -> None:
    best = best_baselines(standings(TRIALS))
    assert {role: standing.epoch_seconds for role, standing in best.items()} == {
        BASELINE_DEFAULT: 200.0,
        BASELINE_OMNIBAL: 140.0,
    }


def test_finalists_are_the_fastest_and_the_best_baselines_once_each() -> None:
    assert [standing.epoch_seconds for standing in finalists(standings(TRIALS), 2)] == [92.0, 100.0, 200.0, 140.0]
    assert [standing.epoch_seconds for standing in finalists(standings(TRIALS), 3)] == [92.0, 100.0, 140.0, 200.0]


def test_gains_are_ratios_with_the_errors_of_both() -> None:
    found = standings((*TRIALS[:4], completed(padded_plan(6), 160.0, 0.0, BASELINE_KEPT)))
    default, kept, omnibal = compare(found[0], found, samples=1000)
    assert [each.role for each in (default, kept, omnibal)] == [BASELINE_DEFAULT, BASELINE_KEPT, BASELINE_OMNIBAL]
    assert (default.gain, kept.gain, omnibal.gain) == (2.0, 1.6, 1.4)
    assert default.gain_error == pytest.approx(2.0 * math.hypot(2 / 200, 1 / 100))
    assert kept.gain_error == pytest.approx(1.6 / 100)
    assert default.samples_per_second == 5.0
    assert default.samples_per_second_error == pytest.approx(0.05)
