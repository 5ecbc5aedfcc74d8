"""The gain that a result states first is the one over the fastest baseline."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from autotune.results.headline import headline_of
from autotune.results.study_report import Known, best_document, best_text, plans_text
from storage.baseline import Baseline
from storage.explanation import FailedBaseline
from storage.records import BestPlan
from storage.validity import Validity, Verdict
from tests.values.storage import EXPLANATION, best_of


def best_over(gains: Mapping[str, tuple[float, float]]) -> BestPlan:
    """Return a winner with these gains and errors over baselines."""
    return best_of(
        "5" * 32,
        explanation=EXPLANATION,
        baselines=tuple(
            Baseline(
                role=role,
                estimated_samples_per_second=10.0 / gain,
                estimated_samples_per_second_error=0.1,
                gain=gain,
                gain_error=error,
            )
            for role, (gain, error) in gains.items()
        ),
    )


def said(gains: Mapping[str, tuple[float, float]]) -> str:
    found = headline_of(best_over(gains))
    assert found is not None
    return found.text


MANY = {"default": (3.1, 0.1), "packed": (1.2, 0.03), "omnibal": (1.4, 0.05)}


def test_the_headline_is_over_the_fastest_baseline_and_the_others_stand_below_it() -> None:
    assert said(MANY) == "The best plan trains 1.20 +- 0.03 times as fast as packed, the fastest baseline"
    text = best_text(best_over(MANY))
    assert said(MANY) in text
    roles = [line.split()[0] for line in text.splitlines() if line.split()[:1] and line.split()[0] in MANY]
    assert roles == ["packed", "omnibal", "default"]


def test_a_search_for_a_trainer_is_compared_with_what_the_trainer_can_hold() -> None:
    best = best_over({"packed": (0.9, 0.04), "current-plan": (1.07, 0.03)})
    packed, current = best.baselines
    packed = replace(packed, left_out="LLaMA-Factory cannot hold packs of samples with images")
    found = replace(best, baselines=(packed, current), trainer="llama-factory", confidence=0.97, ties=())
    text = best_text(found)
    assert (
        "The best plan trains 1.07 +- 0.03 times as fast as your present settings, the fastest baseline within the "
        "limits of llama-factory"
    ) in text
    assert "is the fastest of the plans within the limits of llama-factory with a probability of 97%" in text


@pytest.mark.parametrize(
    ("gains", "rank"),
    [
        ({"hbp": (1.08, 0.36)}, "hbp, the only baseline that ran to its end (not run: packed, your present settings)"),
        (
            {"hbp": (1.08, 0.36), "default": (2.0, 0.1)},
            "hbp, the fastest baseline that ran to its end (not run: packed, your present settings)",
        ),
    ],
    ids=["one", "several"],
)
def test_baselines_that_did_not_run_are_named_with_the_gain(
    gains: Mapping[str, tuple[float, float]], rank: str
) -> None:
    best = replace(best_over(gains), explanation=replace(EXPLANATION, not_run=("packed", "current-plan")))
    text = best_text(best)
    assert f"The best plan trains 1.08 +- 0.36 times as fast as {rank}" in text
    assert "the fastest baseline\n" not in text


def test_baselines_that_failed_stand_below_the_table_with_the_reason() -> None:
    failed = FailedBaseline(role="current-plan", reason="out of memory on stage 0")
    text = best_text(replace(best_over(MANY), explanation=replace(EXPLANATION, failed=(failed,))))
    assert "\nNo result of current-plan: out of memory on stage 0\nThe best plan trains" in text


def test_programs_get_the_headline_with_its_figures() -> None:
    assert best_document(best_over(MANY))["headline"] == {
        "over": "packed",
        "gain": 1.2,
        "gain_error": 0.03,
        "text": said(MANY),
    }
    assert best_document(best_over({}))["headline"] is None


def test_the_gain_of_a_listed_plan_is_over_the_fastest_baseline() -> None:
    valid = Validity(verdict=Verdict.VALID, changes=())
    known = [Known(best=best_over(measured), validity=valid) for measured in (MANY, {})]
    header, _, *rows = plans_text(known).splitlines()
    assert [row[header.index("gain") :].split()[0] for row in rows] == ["1.20", "-"]


@pytest.mark.parametrize(
    ("role", "sentence"),
    [
        ("packed", "packed is within 2 % of the best plan found"),
        ("current-plan", "your present settings are within 2 % of the best plan found"),
    ],
)
def test_a_small_gain_is_said_to_be_small(role: str, sentence: str) -> None:
    for gain in (1.013, 0.99):
        assert said({"default": (2.0, 0.1), role: (gain, 0.01)}).endswith(f"the fastest baseline; {sentence}")
    assert "within" not in said({"default": (2.0, 0.1), role: (1.03, 0.01)})
    assert "within" not in said({"default": (2.0, 0.1), role: (0.9, 0.01)})


def test_present_settings_that_are_nearly_the_fastest_baseline_are_said_to_be_as_good() -> None:
    text = said({"packed": (1.005, 0.01), "current-plan": (1.015, 0.01), "omnibal": (1.018, 0.01)})
    assert "; packed is within 2 %" in text
    assert "; your present settings are within 2 %" in text
    assert "omnibal" not in text


@pytest.mark.parametrize("changes", [True, False])
def test_the_gain_over_present_settings_is_stated_whether_or_not_they_may_win(changes: bool) -> None:
    gains = {"packed": (1.0, 0.0), "current-plan": (2.41, 1.2)}
    best = changing_learning(gains, *(["current-plan"] if changes else []))
    best = replace(best, explanation=None, search_seconds=50.0)
    best = replace(best, baselines=tuple(replace(each, may_win=each.role == "packed") for each in best.baselines))
    what = ", which change what is learned" if changes else ""
    text = best_text(best)
    assert f"; the best plan trains 2.41 +- 1.20 times as fast as your present settings{what}\n" in text
    cost = "the 50 s of the search's trials are"
    assert f"\nCompared with packed, {cost} not paid back: packed is as fast\n" in text
    assert f"\nThe errors are too large to say when {cost} paid back compared with the current plan" in text


def test_a_baseline_that_won_is_named_as_the_best_plan() -> None:
    assert said({"packed": (1.0, 0.0), "default": (2.0, 0.1)}) == (
        "The best plan found is that of packed; it trains 2.00 +- 0.10 times as fast as default, the fastest other "
        "baseline"
    )
    assert said({"current-plan": (1.0, 0.0)}) == (
        "The best plan found is that of your present settings; no other baseline that may win ran to its end"
    )


def changing_learning(gains: Mapping[str, tuple[float, float]], *roles: str) -> BestPlan:
    """Return a winner with these gains; the baselines of these roles change what is learned, all others may win."""
    best = best_over(gains)
    barred = (replace(each, is_neutral=each.role not in roles) for each in best.baselines)
    return replace(best, baselines=tuple(replace(each, may_win=each.is_neutral) for each in barred))


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        (
            {"hbp": (0.9, 0.34), "omnibal": (1.0, 0.0), "packed": (1.22, 0.49), "default": (1.46, 0.54)},
            "The best plan found is that of omnibal; it trains 1.22 +- 0.49 times as fast as packed, the fastest other "
            "baseline that may win",
        ),
        (
            {"hbp": (0.9, 0.34), "packed": (1.22, 0.49)},
            "The best plan trains 1.22 +- 0.49 times as fast as packed, the fastest baseline that may win",
        ),
        (
            {"hbp": (1.3, 0.1), "packed": (1.22, 0.49)},
            "The best plan trains 1.22 +- 0.49 times as fast as packed, the fastest baseline",
        ),
        (
            {"hbp": (0.9, 0.34), "omnibal": (1.0, 0.0)},
            "The best plan found is that of omnibal; no other baseline that may win ran to its end",
        ),
        (
            {"hbp": (0.9, 0.34)},
            "The best plan trains 0.90 +- 0.34 times as fast as hbp, the fastest baseline, which changes what is "
            "learned; no baseline that may win ran to its end",
        ),
    ],
    ids=["of a baseline", "of none", "slower", "own alone", "none may win"],
)
def test_a_gain_is_over_a_baseline_that_could_be_used_instead(
    gains: Mapping[str, tuple[float, float]], expected: str
) -> None:
    best = changing_learning(gains, "hbp")
    assert best_document(best)["headline"]["text"] == expected
    assert "hbp, changes what is learned  " in best_text(best)
