from dataclasses import replace
from typing import Any

import pytest

from autotune.plan_text import packing_text
from autotune.results.explanation_report import explanation_text, plan_time_text
from autotune.results.study_report import best_text
from storage.baseline import Baseline
from storage.explanation import BEST, Explanation, TimePart
from tests.values.storage import EXPLANATION, PADDED_PLAN, WORKLOAD, best_of, packed_plan, plan_time
from trials.plan import Layout, Packed, Plan

WINNER, USUAL = EXPLANATION.plans


def text_of(explanation: Explanation | None, **fields: Any) -> str:
    return explanation_text(best_of("5" * 32, explanation=explanation, search_seconds=50.0, **fields), "")


def default_with(gain: float, error: float) -> Baseline:
    return Baseline(
        role="default",
        estimated_samples_per_second=5.0,
        estimated_samples_per_second_error=0.1,
        gain=gain,
        gain_error=error,
    )


def cells(text: str, first: str) -> list[str]:
    """Return the entries of the row of a table that begins with `first`."""
    (row,) = (line for line in text.splitlines() if line.startswith(f"{first}  "))
    return [cell.strip() for cell in row.split("  ") if cell.strip()]


def test_the_largest_loss_of_the_usual_settings_is_named_first() -> None:
    text = text_of(EXPLANATION)
    assert "With default an epoch takes 200.0 +- 1.5 s in 32 steps (measured in one run)" in text
    assert (
        "53.0% is useful work. The largest loss is padding: 30.0% +- 3.0% of the time, then recompute: 10.0% +- 1.0%."
        in text
    )


def test_a_rest_that_is_larger_than_every_loss_is_named() -> None:
    vague = plan_time(PADDED_PLAN, "default", padding=20.0, recompute=10.0, unexplained=50.0)
    text = text_of(replace(EXPLANATION, plans=(WINNER, vague)))
    assert "then recompute: 5.0% +- 0.5%. Even more is not explained: 25.0% +- 2.5%." in text
    assert "not explained:" not in text_of(EXPLANATION).partition("- useful work")[0]


def test_what_the_winner_changes_in_the_usual_settings_is_listed() -> None:
    text = best_text(best_of("5" * 32, explanation=EXPLANATION))
    assert cells(text, "packing")[1:] == ["2 samples, padded", packing_text(packed_plan().packing)]
    assert cells(text, "split")[1:] == ["2v+4l", "2v+1l | 0v+3l"]
    assert "what changed" not in best_text(best_of("5" * 32, explanation=replace(EXPLANATION, usual=None)))


def test_losses_that_the_errors_do_not_tell_apart_are_both_named() -> None:
    close = plan_time(PADDED_PLAN, "default", padding=21.0, recompute=20.0)
    text = text_of(replace(EXPLANATION, plans=(WINNER, close)))
    assert "is padding: 10.5% +- 1.1% of the time; within the errors it may also be recompute: 10.0% +- 1.0%." in text


def test_the_time_of_both_plans_is_shown_by_part_and_sums_to_the_whole() -> None:
    text = text_of(EXPLANATION)
    assert cells(text, "padding")[1:5] == ["60.0 +- 6.0", "30.0% +- 3.0%", "0.0 +- 0.0", "0.0% +- 0.0%"]
    assert cells(text, "not explained")[1:5] == ["4.0 +- 0.4", "2.0% +- 0.2%", "-1.0 +- 0.1", "-1.0% +- 0.1%"]
    assert cells(text, "whole")[1:5] == ["200.0 +- 1.5", "100%", "100.0 +- 1.5", "100%"]
    rows = [line.split("  ")[0] for line in text.splitlines()]
    assert rows.index("useful work") < rows.index("padding") < rows.index("recompute") < rows.index("not explained")


def test_what_each_part_is_and_how_it_is_known_is_said_of_the_parts_that_there_are() -> None:
    text = text_of(EXPLANATION)
    assert "- padding: pad tokens up to the longest sample of a micro-batch, and zero images where " in text
    assert "where it has none (measured work, divided by" in text
    assert "- pipeline bubble: stages that wait while the pipeline fills and drains (simulated with" in text
    assert "- communication" not in text


def test_useful_work_of_the_same_samples_is_explained_where_it_differs_beyond_its_errors() -> None:
    """Useful work is 50 and 86 s, each with an error of a tenth; in EXPLANATION it is 106 and 86 s."""
    quick = plan_time(PADDED_PLAN, "default", padding=150.0)
    note = "\nUseful work is that of the same samples under both plans, but its time is measured in their passes."
    assert note in text_of(replace(EXPLANATION, plans=(WINNER, quick)))
    assert note not in text_of(EXPLANATION)


def test_each_change_alone_is_compared_with_all_together() -> None:
    text = text_of(EXPLANATION)
    assert cells(text, "packing alone")[1:] == ["140.0 +- 3.0", "1.43 +- 0.03", "62,464", "predicted"]
    assert cells(text, "recompute alone (1v+0l | 0v+0l)")[1:] == ["-", "-", "92,160", "does not fit the memory"]
    assert cells(text, "all together")[1:] == ["100.0 +- 1.5", "2.00 +- 0.03", "62,464", "measured"]


def test_a_change_of_the_layout_alone_is_not_called_one_of_the_split() -> None:
    split = next(each for each in EXPLANATION.changes if each.change == "packing")
    plan = replace(USUAL.plan, layout=replace(USUAL.plan.layout, zero=2))
    text = text_of(replace(EXPLANATION, changes=(replace(split, change="split", plan=plan),)))
    assert cells(text, "layout alone")
    assert "split alone" not in text


def test_the_gain_of_all_together_is_that_of_the_baseline_with_its_error() -> None:
    """Both plans share the errors of the machine's drift, so those of the two speeds are not independent."""
    text = text_of(EXPLANATION, baselines=(default_with(2.25, 0.07),))
    assert cells(text, "all together")[1:3] == ["100.0 +- 1.5", "2.25 +- 0.07"]
    assert "are paid back after 0.4 epochs" in text
    assert "are paid back after" not in text_of(EXPLANATION, baselines=(default_with(2.25, 0.7),))


def test_the_time_of_the_search_is_compared_once() -> None:
    assert best_text(best_of("5" * 32, explanation=EXPLANATION)).count("paid back") == 1
    assert best_text(best_of("5" * 32)).count("paid back") == 1
    equal = text_of(EXPLANATION, baselines=(default_with(1.0, 0.07),))
    assert "Compared with default, the 50 s of the search's trials are not paid back: default is as fast" in equal
    slower = text_of(EXPLANATION, baselines=(default_with(0.8, 0.02),))
    assert "are not paid back: default is faster" in slower
    assert "Where the time goes: default is faster. With default an epoch takes" in slower
    assert "Why it won. With default an epoch takes" in equal


def test_memory_payback_and_what_would_help_further_are_stated() -> None:
    (further,) = EXPLANATION.further
    text = text_of(replace(EXPLANATION, further=(replace(further, peak_bytes=further.peak_bytes + 1),)))
    assert "its fullest stage, 1, needs 62,464 MiB of 77,824 MiB (80%), 21,504 MiB more than with default" in text
    assert "the 50 s of the search's trials are paid back after 0.5 epochs (16 steps)" in text
    advice = text.partition("What would help further:")[2].splitlines()[1:]
    assert (
        "these packs need 81,921 MiB per rank to recompute nothing: 1.11 +- 0.02 times as fast, predicted" in advice[0]
    )
    assert advice[1].startswith("- pipeline bubble, 5.0% +- 0.5% of the time: a larger global batch")


@pytest.mark.parametrize(
    ("accelerator", "said"), [("cuda", "on free cores, by data.workers"), ("cpu", "no core is free")]
)
def test_images_are_decoded_ahead_only_where_a_core_is_free(accelerator: str, said: str) -> None:
    waiting = TimePart(name="loading", seconds=20.0, error=0.1, basis="simulated")
    waits, idle = (replace(time, parts=(*time.parts, waiting)) for time in (WINNER, USUAL))
    hardware = replace(WORKLOAD.hardware, accelerator=accelerator, cpu_cores=64)
    best = best_of("5" * 32, explanation=replace(EXPLANATION, plans=(waits, idle)))
    text = best_text(replace(best, workload=replace(WORKLOAD, hardware=hardware)))
    line = next(line for line in text.splitlines() if line.startswith("- data wait, "))
    assert said in line


@pytest.mark.parametrize(("plan", "said"), [(PADDED_PLAN, "pack the samples"), (packed_plan(), "larger packs")])
def test_packing_is_the_remedy_for_padding_where_the_plan_has_no_packs(plan: Plan, said: str) -> None:
    text = text_of(replace(EXPLANATION, plans=(plan_time(plan, BEST, padding=10.0), USUAL)))
    assert f"- padding, 10.0% +- 1.0% of the time: {said}" in text.partition("What would help further:")[2]


@pytest.mark.parametrize(("degree", "said"), [(1, "a larger global batch"), (2, "larger packs are shared more evenly")])
def test_larger_packs_are_a_remedy_for_imbalance_where_ranks_share_them(degree: int, said: str) -> None:
    plan = packed_plan()
    assert isinstance(plan.packing, Packed)
    shared = replace(plan, packing=replace(plan.packing, sequence=degree), layout=replace(plan.layout, data=2))
    waiting = TimePart(name="data_imbalance", seconds=10.0, error=1.0, basis="simulated")
    times = (replace(time, parts=(*time.parts, waiting)) for time in (replace(WINNER, plan=shared), USUAL))
    text = text_of(replace(EXPLANATION, plans=tuple(times)))
    assert f"- data imbalance, 10.0% +- 1.0% of the time: {said}" in text.partition("What would help further:")[2]


def test_the_current_plan_is_named_in_words() -> None:
    current = replace(EXPLANATION, plans=(WINNER, replace(USUAL, role="current-plan")), usual="current-plan")
    text = text_of(current)
    assert "With the current plan an epoch takes" in text
    assert "Compared with the current plan, the 50 s" in text
    assert plan_time_text(replace(USUAL, role="tie 56de6d23")).startswith("With the tie 56de6d23 an epoch takes")


def test_the_payback_is_stated_over_the_current_plan_too() -> None:
    own, current = replace(USUAL, plan=packed_plan(), role="packed"), replace(USUAL, role="current-plan")
    text = text_of(replace(EXPLANATION, plans=(WINNER, own, current), usual="packed"))
    assert (
        "the 50 s of the search's trials are not paid back: packed is as fast\nCompared with the current plan, " in text
    )
    assert "Compared with the current plan, the 50 s of the search's trials are paid back after 0.5 epochs" in text
    alone = text_of(replace(EXPLANATION, plans=(WINNER, current), usual="current-plan"))
    assert alone.count("search's trials") == 1
    twice = text_of(replace(EXPLANATION, plans=(WINNER, USUAL, current), usual=USUAL.role))
    assert twice.count("search's trials") == 1
    shortened = text_of(replace(EXPLANATION, plans=(WINNER, own, replace(current, shortened=True)), usual="packed"))
    assert "Compared with the current plan" not in shortened


def test_a_gain_within_the_errors_is_not_said_to_pay_back() -> None:
    unsure = replace(USUAL, epoch_seconds_error=60.0)
    text = text_of(replace(EXPLANATION, plans=(WINNER, unsure)))
    assert "The errors are too large to say when the 50 s of the search's trials are paid back compared" in text
    assert "are paid back after" not in text


def test_a_baseline_that_won_is_said_to_be_fastest() -> None:
    same = replace(EXPLANATION, plans=(WINNER, replace(USUAL, plan=packed_plan())))
    text = text_of(same)
    assert "no plan was faster than default, and no other baseline that may win ran to its end. With" in text
    assert "are not paid back" in text
    assert "default s" not in text  # its time is shown once, as that of the best
    assert "alone  " not in text
    assert "all together" not in text


def test_ways_to_fit_the_memory_are_times_of_the_winners_epoch() -> None:
    (change,) = EXPLANATION.further
    layout = Layout(pipeline=2, data=4, zero=1, zero_bubble=True)
    way = replace(change, change="zero-bubble", plan=replace(change.plan, layout=layout), gain=0.8, gain_error=0.02)
    text = text_of(replace(EXPLANATION, ways=(way,)))
    ways = "Ways to fit its packs into the memory, as times of its epoch, predicted"
    assert f"{ways}: a pipeline with zero bubble (p2-d4-z1-zb) 1.25 +- 0.03" in text
    assert ways not in text_of(EXPLANATION)


def test_a_winner_without_baselines_explains_its_own_time() -> None:
    alone = Explanation(plans=(WINNER,), usual=None, changes=(), further=())
    text = text_of(alone, baselines=())
    assert "no baseline was measured" in text
    assert "With the winner an epoch takes 100.0 +- 1.5 s" in text
    assert "paid back" not in text


def test_a_baseline_that_an_earlier_search_measured_is_named_as_in_the_gain() -> None:
    alone = Explanation(plans=(WINNER,), usual=None, changes=(), further=())
    text = text_of(alone, baselines=(default_with(1.05, 0.24),))
    assert "Why it won: default was measured in an earlier search and not in this one" in text
    assert "no baseline was measured" not in text


def test_a_baseline_that_won_says_that_no_other_ran() -> None:
    same = replace(EXPLANATION, plans=(WINNER, replace(USUAL, plan=packed_plan())), not_run=("packed",))
    text = text_of(same, baselines=(default_with(1.0, 0.0),))
    alone = "no other baseline that may win ran to its end (not run: packed)."
    assert f"no plan was faster than default, and {alone}" in text


@pytest.mark.parametrize(("field", "doubt"), [("disturbed", "all disturbed"), ("shortened", "ended early")])
def test_doubtful_measurements_are_named(field: str, doubt: str) -> None:
    changed: dict[str, Any] = {field: True}
    doubtful = replace(USUAL, **changed)
    assert f"(measured in one run, {doubt})" in text_of(replace(EXPLANATION, plans=(WINNER, doubtful)))


def test_a_winner_of_an_earlier_version_is_shown_without_an_explanation() -> None:
    assert text_of(None) == ""
    assert "Why it won" not in best_text(best_of("5" * 32))


def test_the_winner_comes_first_in_an_explanation() -> None:
    assert EXPLANATION.winner.role == BEST
    assert EXPLANATION.of(PADDED_PLAN.id) == USUAL
    assert EXPLANATION.of("0" * 16) is None
