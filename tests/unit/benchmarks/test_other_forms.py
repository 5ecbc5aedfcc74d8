import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.other_forms import OURS, after, checks, form_checks, table, with_regrets
from benchmarks.output.rows import done_rows


def ours(number: int, *best_so_far: float, known: float = 100.0, rest: float | None = None) -> dict[str, Any]:
    return {
        "number": f"1/{number}",
        "known": known,
        "best_so_far": {OURS: best_so_far},
        "winner": best_so_far[-1],
        "after_the_rest": rest,
    }


def rival(number: int, *best_so_far: float, known: float) -> dict[str, Any]:
    return {"number": f"1/{number}", "known": known, "best_so_far": {"tpe": best_so_far}}


def held(*rows: dict[str, Any], level: float = 1.0) -> dict[str, bool]:
    return {check.name: check.holds for check in checks(level, with_regrets(rows))}


def test_the_fastest_plan_known_of_a_machine_is_of_any_search() -> None:
    first, second = with_regrets([ours(0, 110.0, 101.0), rival(0, 120.0, 99.0, known=99.0)])
    assert after(first, OURS, 24) == pytest.approx(101 / 99 - 1)
    assert after(second, "tpe", 24) == 0
    assert first["winner_regret"] == pytest.approx(101 / 99 - 1)


def test_a_search_that_ended_keeps_its_last_choice() -> None:
    (row,) = with_regrets([ours(0, *[110.0] * 11, 103.0, 102.0)])
    assert (after(row, OURS, 12), after(row, OURS, 24)) == pytest.approx((0.03, 0.02))


def test_the_table_has_the_samplers_that_ran() -> None:
    rows = with_regrets([ours(0, 101.0), ours(1, 103.0), rival(0, 110.0, known=110.0)])
    found = {(row["sampler"], row["trials"]): row for row in table(rows)}
    assert set(found) == {(OURS, 12), (OURS, 24), ("tpe", 12), ("tpe", 24)}
    assert found[OURS, 12]["median"] == pytest.approx(0.02)
    assert found[OURS, 12]["90th"] == pytest.approx(0.028)
    assert found["tpe", 24]["machines"] == 1


def test_regrets_above_the_bars_of_the_level_fail() -> None:
    rows = [ours(number, *[101.0] * 12, *[100.5] * 12) for number in range(3)]
    assert all(held(*rows).values())
    assert not held(*rows, level=0.5)["regret after 12 trials, median"]
    bad = ours(3, *[110.0] * 24)
    assert not held(*rows, bad)["regret after 12 trials, 90th percentile"]
    assert not held(*rows, bad)["regret after 24 trials, 90th percentile"]


def test_searches_that_end_too_early_fail() -> None:
    gaining, missing = (
        "searches that ended by themselves and would have gained 1%, share",
        "searches that ended by themselves 1% above the best plan, share",
    )
    assert held(ours(0, 102.0, rest=101.9))[gaining]
    assert not held(ours(0, 102.0, rest=100.0))[gaining]
    assert not held(ours(0, 102.0, rest=101.9))[missing]
    assert held(ours(0, 102.0))[missing]  # it spent its budget


@pytest.mark.parametrize(
    ("winner", "out_of_memory", "stalls", "memory"), [(101.0, 1, True, True), (110.0, 4, False, False)]
)
def test_forms_have_bars_of_their_own(winner: float, out_of_memory: int, stalls: bool, memory: bool) -> None:
    rows = with_regrets([{**ours(0, 101.0), "winner": winner, "out_of_memory": out_of_memory}])
    assert all(check.holds for check in form_checks("stalls", rows)) is stalls
    assert all(check.holds for check in form_checks("memory", rows)) is memory
    assert form_checks("plain", rows) == []


def test_rows_in_the_file_are_not_computed_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"task": "never", "number": "1/0", "known": 5}) + "\n")
    assert done_rows([(never, "1/0")], path, 1) == [{"task": "never", "number": "1/0", "known": 5}]


def never(key: str) -> dict[str, Any]:
    raise AssertionError(key)
