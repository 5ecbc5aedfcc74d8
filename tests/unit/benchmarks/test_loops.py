"""The arithmetic of the benchmark of trainings in turns with the plain packed loop."""

from typing import Any

import pytest

from benchmarks import training
from benchmarks.full_training.loops import difference, ratios
from benchmarks.full_training.turns import Timed

TUNED, MATCHED, RANDOM, SAME = "tuned", "loop, matched", "loop, random", "loop with our packs"


def timed(seconds: float, *losses: float) -> Timed:
    """A training of a first step that does not count, and one of 10 samples."""
    lines = tuple({"samples": 10.0, "loss": loss} for loss in (losses or (1.0, 1.0)))
    return Timed(seconds=(seconds,), lines=lines)


def test_ratios_are_those_of_a_round_and_a_side_that_did_not_run_has_none() -> None:
    rounds = [{TUNED: timed(1.0), MATCHED: timed(2.0)}, {TUNED: timed(4.0), MATCHED: timed(4.0)}]
    rounds.append({TUNED: timed(1.0), MATCHED: timed(1.5)})
    found = ratios(rounds, [{}])
    assert found["over_matched"] == [1.5, 1.0, 2.0]
    assert found["over_fastest"] == found["over_matched"]
    assert found["speeds"] == {TUNED: 10.0, MATCHED: 5.0}
    assert found["engine"] is None
    assert ratios(rounds, [{TUNED: timed(1.0), SAME: timed(3.0)}])["engine"] == [3.0, 3.0, 3.0]


def test_the_rival_of_a_round_is_its_fastest_loop_of_those_that_a_person_has() -> None:
    rounds = [{TUNED: timed(1.0), MATCHED: timed(2.0), RANDOM: timed(1.5), SAME: timed(0.5)}]
    rounds.append({TUNED: timed(1.0), MATCHED: timed(0.8), RANDOM: timed(1.5), SAME: timed(0.5)})
    assert ratios(rounds, [{}])["over_fastest"] == pytest.approx([1.15, 0.8, 1.5])
    sharded = [{TUNED: timed(1.0), "loop, shards": timed(2.0), "engine, loop's plan": timed(0.5)}]
    assert ratios(sharded, [{}])["over_fastest"] == [2.0, 2.0, 2.0]


def test_losses_are_compared_with_equal_packs_alone() -> None:
    assert difference({TUNED: timed(1.0), MATCHED: timed(1.0, 2.0, 2.0)}) is None
    assert difference({TUNED: timed(1.0, 4.0, 2.2), SAME: timed(1.0, 4.0, 2.0)}) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("case", "change", "holds"),
    [
        ("pages", {}, [True, True, True]),
        ("pages", {"over_fastest": [1.04, 1.0, 1.2]}, [True, True, False]),
        ("pages", {"engine": [0.97, 0.9, 1.0], "loss_difference": 0.01}, [False, False, True]),
        ("pages", {"engine": None, "loss_difference": None}, [True]),
        ("shards", {"over_whole": [0.99, 0.9, 1.0]}, [True, True, True, False]),
        ("shards", {"engine": None, "over_whole": [1.01, 0.9, 1.1]}, [True, True]),
        ("unlimited", {"over_fastest": [1.01, 1.0, 1.2]}, [True, True, True, True]),
        ("unlimited", {"over_hand": [0.99, 0.9, 1.0]}, [True, True, True, False]),
    ],
)
def test_each_bar_is_that_of_the_cases_that_ran(case: str, change: dict[str, Any], holds: list[bool]) -> None:
    usual = {"engine": [1.0, 1.0, 1.0], "over_fastest": [1.1, 1.0, 1.2], "over_hand": [1.0, 1.0, 1.0]}
    row = {"case": case, "part": "ratios", "loss_difference": 1e-4, **usual, "over_whole": None, **change}
    assert [check.holds for check in training.check_loops([row, {"case": case, "part": "round"}])] == holds
