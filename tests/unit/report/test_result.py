"""What a report says of a result: the fastest baseline, where the time goes, and what the figures rest on."""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.report.charts.causes import causes
from autotune.report.charts.history import history
from autotune.report.charts.memory import memory
from autotune.report.charts.plans import pareto
from autotune.report.charts.ranks import ranks
from autotune.report.sides import ComparedPlan, sides
from autotune.report.simulation import Simulator
from autotune.report.source import NO_PROFILE, StudySource, read_source
from autotune.report.summary import cards, changes, headline, notes
from autotune.report.writing import write_report
from autotune.results.evidence import evidence_of, trials_behind
from autotune.results.time_parts import NAMES
from storage.annotation import Annotation
from storage.baseline import Baseline
from storage.explanation import BEST, Explanation
from storage.records import FinishedTrial, StudyRecord
from storage.store import open_store
from tests.values.search import completed, finished, padded_plan
from tests.values.storage import (
    EXPLANATION,
    NOON,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    concluded,
    plan_time,
    result_of,
)
from trials.outcome import Completed
from trials.plan import Plan

STUDY = StudyRecord(
    id="5" * 32, name="tiny-55", workload_fingerprint="f", settings={}, seed=0, started=NOON, finished=NOON
)
WINNER = best_of(
    STUDY.id,
    baselines=(
        Baseline(
            role="default",
            estimated_samples_per_second=5.0,
            estimated_samples_per_second_error=0.2,
            gain=2.0,
            gain_error=0.1,
        ),
    ),
)
CURRENT = padded_plan(7)


def run(number: int, plan: Plan, role: str, seconds: float = 200.0, *, shortened: bool = False) -> FinishedTrial:
    trial = completed(plan, seconds, role=role)
    assert isinstance(trial.result.outcome, Completed)
    outcome = replace(trial.result.outcome, shortened=shortened)
    return replace(trial, number=number, id=f"{number:032x}", result=replace(trial.result, outcome=outcome))


def source_of(
    *trials: FinishedTrial,
    explanation: Explanation | None = None,
    won: Plan = WINNER.plan,
    gains: Mapping[str, tuple[float, float]] | None = None,
) -> StudySource:
    """Return a study with a winner; `gains` are (gain, error) over baselines, by default of 2 over the default."""
    (default,) = WINNER.baselines
    baselines = WINNER.baselines
    if gains is not None:
        baselines = tuple(
            replace(default, role=role, gain=gain, gain_error=error, estimated_samples_per_second=10.0 / gain)
            for role, (gain, error) in gains.items()
        )
    return StudySource(
        study=STUDY,
        workload=WORKLOAD,
        trials=trials,
        winner=replace(WINNER, explanation=explanation, plan=won, baselines=baselines),
        behind=[trial.summary for trial in trials],
        annotation=Annotation(),
        profile=NO_PROFILE,
        calibration=None,
    )


def sides_of(source: StudySource) -> tuple[ComparedPlan, ...]:
    return sides(source, Simulator(source))


KNOWN_BEFORE = run(0, WINNER.plan, "sampled", 100.0), run(1, PADDED_PLAN, "confirm")
"""Trials of a second search: the baseline is known from the first one, so that it ran only to confirm."""


def test_usual_settings_that_an_earlier_search_measured_are_those_of_the_explanation() -> None:
    source = source_of(*KNOWN_BEFORE, explanation=EXPLANATION)
    before, after = sides_of(source)
    assert (before.plan, after.plan) == (PADDED_PLAN, WINNER.plan)
    assert before.speed is not None
    assert before.speed.mean == 5.0
    said = headline(source, (before, after))
    assert said == "The best plan trains 2.00 \u00b1 0.10 times as fast as default, the fastest baseline."
    assert [card.name for card in cards(source, (before, after))][:2] == ["fastest baseline", "best plan"]


def test_the_chart_of_all_plans_has_the_speeds_that_the_result_states() -> None:
    drifted = run(0, WINNER.plan, "sampled", 130.0)
    source = source_of(drifted, KNOWN_BEFORE[1], explanation=EXPLANATION)
    speeds = {plan: speed for plan, speed, *_ in pareto(source).table.rows}
    (best,) = (side.speed for side in sides_of(source) if side.key == "after")
    assert best is not None
    assert speeds[WINNER.plan.id] == f"{best.mean:.2f}" != f"{WORKLOAD.data.samples / 130.0:.2f}"


def test_baselines_that_did_not_run_are_named_and_the_fastest_is_one_that_ran() -> None:
    source = source_of(*KNOWN_BEFORE, explanation=replace(EXPLANATION, not_run=("packed",)))
    found = sides_of(source)
    assert headline(source, found).endswith("default, the only baseline that ran to its end (not run: packed).")
    assert found[0].title == "Before: the fastest baseline that ran"
    assert next(card.name for card in cards(source, found)) == "fastest baseline that ran"


@pytest.mark.parametrize("others", [(), (run(2, padded_plan(3), "omnibal", 150.0),)], ids=["alone", "with another"])
def test_usual_settings_of_an_earlier_search_without_an_explanation_have_a_gain_and_no_plan(
    others: tuple[FinishedTrial, ...],
) -> None:
    source = source_of(*KNOWN_BEFORE, *others)
    found = sides_of(source)
    assert [side.key for side in found] == ["after"]
    assert "times as fast as default, the fastest baseline" in headline(source, found)
    assert "gain over default" in [card.name for card in cards(source, found)]


@pytest.mark.parametrize("explained", [True, False])
def test_usual_settings_that_won_are_the_best_plan(explained: bool) -> None:
    times = plan_time(PADDED_PLAN, BEST), plan_time(PADDED_PLAN, "default")
    source = source_of(
        run(0, PADDED_PLAN, "confirm" if explained else "default"),
        explanation=replace(EXPLANATION, plans=times) if explained else None,
        won=PADDED_PLAN,
        gains={"default": (1.0, 0.0)},
    )
    said = headline(source, sides_of(source))
    assert said == "The best plan found is that of default; no other baseline that may win ran to its end."


@pytest.mark.parametrize("won", [PADDED_PLAN, WINNER.plan], ids=["a baseline won", "another plan won"])
def test_a_baseline_that_changes_what_is_learned_is_not_compared_as_the_plan_before(won: Plan) -> None:
    changing = padded_plan(3)
    trials = run(0, changing, "hbp", 90.0), run(1, CURRENT, "packed", 122.0), run(2, PADDED_PLAN, "omnibal", 100.0)
    own = (1.0, 0.0) if won == PADDED_PLAN else (1.4, 0.1)
    source = source_of(*trials, won=won, gains={"hbp": (0.9, 0.01), "packed": (1.22, 0.01), "omnibal": own})
    assert source.winner is not None
    able = (
        replace(each, is_neutral=each.role != "hbp", may_win=each.role != "hbp") for each in source.winner.baselines
    )
    source = replace(source, winner=replace(source.winner, baselines=tuple(able)))
    before, after = sides_of(source)
    other = "fastest other baseline" if won == PADDED_PLAN else "fastest baseline"
    assert (before.plan, after.plan) == (CURRENT, won)
    assert before.title == f"Before: the {other} that may win"
    tiles = {card.name: card for card in cards(source, (before, after))}
    assert [*tiles][:2] == [f"{other} that may win", "best plan"]
    assert tiles["gain over hbp"].note.endswith("; it changes what is learned")
    assert ("gain over omnibal" in tiles) == (won != PADDED_PLAN)
    assert tiles["time of the search's trials"].note.startswith("Compared with packed, ")


@pytest.mark.parametrize("explained", [True, False])
@pytest.mark.parametrize("current", [160.0, 240.0])
def test_the_fastest_baseline_is_compared_with_whichever_it_is(explained: bool, current: float) -> None:
    gains = {"default": (2.0, 0.1), "current-plan": (current / 100, 0.1)}
    fastest, plan = ("current-plan", CURRENT) if current < 200 else ("default", PADDED_PLAN)
    of_current = replace(plan_time(CURRENT, "current-plan"), epoch_seconds=current)
    why = replace(EXPLANATION, usual=fastest, plans=(*EXPLANATION.plans, of_current))
    trials = run(0, PADDED_PLAN, "default"), run(1, CURRENT, "current-plan", current)
    source = source_of(*trials, explanation=why if explained else None, gains=gains)
    assert [side.plan for side in sides_of(source)] == [plan, WINNER.plan]
    name = {"current-plan": "your present settings"}.get(fastest, fastest)
    assert f"times as fast as {name}, the fastest baseline" in headline(source, sides_of(source))


def test_a_baseline_that_ended_early_gives_an_estimated_gain_where_no_other_was_measured() -> None:
    current = replace(plan_time(CURRENT, "current-plan"), shortened=True)
    why = replace(EXPLANATION, usual="current-plan", plans=(EXPLANATION.winner, current))
    source = source_of(run(1, CURRENT, "current-plan", shortened=True), explanation=why, gains={})
    said = headline(source, sides_of(source))
    assert "about 2.00 times as fast as the fastest baseline (current-plan), whose run ended early" in said
    assert any("from a run that ended early" in card.note for card in cards(source, sides_of(source)))


@pytest.mark.parametrize(("error", "expected"), [(0.1, "are paid back after"), (0.9, "The errors are too large")])
def test_when_a_search_is_paid_back_is_stated_where_the_errors_allow(error: float, expected: str) -> None:
    source = source_of(*KNOWN_BEFORE, gains={"default": (2.0, error)})
    (note,) = (card.note for card in cards(source, sides_of(source)) if card.name == "time of the search's trials")
    assert expected in note


def test_when_a_search_is_paid_back_is_stated_over_the_present_settings_too() -> None:
    source = source_of(*KNOWN_BEFORE, gains={"default": (2.0, 0.1), "current-plan": (2.4, 0.1)})
    (note,) = (card.note for card in cards(source, sides_of(source)) if card.name == "time of the search's trials")
    assert [part.partition(", ")[0] for part in note.split("; ")] == [
        "Compared with default",
        "Compared with the current plan",
    ]


@pytest.mark.parametrize(("error", "speed"), [(0.02, "faster"), (0.5, "as fast")])
def test_a_baseline_that_is_faster_is_not_said_to_be_as_fast(error: float, speed: str) -> None:
    source = source_of(*KNOWN_BEFORE, gains={"default": (0.6, error)})
    (note,) = (card.note for card in cards(source, sides_of(source)) if card.name == "time of the search's trials")
    assert note.endswith(f" are not paid back: default is {speed}")


@pytest.mark.parametrize(
    ("left_out", "name"),
    [(None, "fastest baseline within the limits of ms-swift"), ("it cannot hold them", "fastest baseline")],
)
def test_a_baseline_that_the_trainer_cannot_hold_is_not_within_its_limits(left_out: str | None, name: str) -> None:
    source = source_of(*KNOWN_BEFORE, explanation=EXPLANATION)
    assert source.winner is not None
    baselines = tuple(replace(each, left_out=left_out) for each in source.winner.baselines)
    source = replace(source, winner=replace(source.winner, trainer="ms-swift", baselines=baselines))
    assert next(iter(cards(source, sides_of(source)))).name == name


def test_the_stored_pareto_set_is_shown_as_it_is() -> None:
    """One of its plans ran in an earlier study, and the other one while the machine was slow."""
    source = source_of(run(0, WINNER.plan, "sampled", 130.0), run(1, CURRENT, "sampled", 150.0))
    chart = pareto(source)
    assert [row[:2] for row in chart.table.rows] == [(WINNER.plan.id, "10.00"), (PADDED_PLAN.id, "9.50")]
    assert chart.summary == "2 of 3 measured plans are in the Pareto set"
    drawn = {row["plan"]: row["speed"] for row in chart.spec["data"]["values"]}
    assert drawn[WINNER.plan.id] == 10.0
    assert "those of other plans are means of their own runs" in chart.text


def test_a_baseline_without_a_result_is_not_said_to_be_the_fastest() -> None:
    failed = finished(PADDED_PLAN, OUTCOMES["out of memory"], role="default")
    before, _ = sides_of(source_of(failed, run(1, WINNER.plan, "sampled", 100.0), gains={}))
    assert (before.plan, before.title) == (PADDED_PLAN, "Before: a baseline without a result")


def test_a_winner_that_cannot_be_read_is_not_said_to_be_missing_yet() -> None:
    source = replace(source_of(*KNOWN_BEFORE), winner=None)
    assert headline(source, ()) == "The winner of this search cannot be read; 2 trials measured so far."
    unfinished = replace(source, study=replace(STUDY, finished=None))
    assert headline(unfinished, ()) == "This search has no winner yet; 2 trials measured so far."


def test_offloaded_layers_are_not_said_to_be_recomputed() -> None:
    _, after = sides_of(source_of(*KNOWN_BEFORE, explanation=EXPLANATION))
    layout = replace(after.plan.layout, offload="vision")
    table = changes([after, replace(after, plan=replace(after.plan, layout=layout))])
    assert table.rows[-1] == (
        "recomputed or offloaded layers",
        "recompute: 1 vision | none",
        "offload v, recompute l: 1 vision | none",
    )


def test_the_peak_of_a_stage_is_that_of_all_runs() -> None:
    small, large = run(0, WINNER.plan, "sampled", 100.0), run(1, WINNER.plan, "confirm", 100.0)
    less = replace(large, result=replace(large.result, outcome=peaking(large, 50 << 30)))
    source = source_of(small, less)
    (after,) = sides_of(source)
    assert after.peak_bytes == {0: 60 << 30, 1: 61 << 30}
    drawn = memory(after, 1 << 40, 1 << 40).table.rows
    assert [row[-2] for row in drawn] == ["60 GiB", "61 GiB"]


def peaking(trial: FinishedTrial, peak_bytes: int) -> Completed:
    """Return the outcome of a trial, with this peak of every stage."""
    outcome = trial.result.outcome
    assert isinstance(outcome, Completed)
    stages = tuple(replace(each, peak_bytes=peak_bytes) for each in outcome.measurement.stages)
    return replace(outcome, measurement=replace(outcome.measurement, stages=stages))


def test_rows_that_stand_for_many_ranks_say_so() -> None:
    (after,) = sides_of(source_of(KNOWN_BEFORE[0]))
    many = replace(after, plan=replace(after.plan, layout=replace(after.plan.layout, data=16)))
    said = "means over the ranks of a stage"
    assert said not in ranks([after]).text
    assert f"Rows of after are {said}" in ranks([many]).text


def test_a_search_whose_baselines_all_failed_has_no_gain_to_state() -> None:
    source = source_of(run(0, WINNER.plan, "sampled", 100.0), gains={})
    assert "Its gain is not known, because no baseline was measured" in headline(source, sides_of(source))


def test_the_time_of_an_epoch_is_that_of_the_explanation() -> None:
    chart = causes(sides_of(source_of(*KNOWN_BEFORE, explanation=EXPLANATION)))
    assert chart.basis == "measured"
    drawn = {(row["plan"], row["part"]): row["seconds"] for row in chart.spec["data"]["values"]}
    stored = zip(("after", "before"), EXPLANATION.plans, strict=True)
    assert drawn == {(key, NAMES[part.name]): part.seconds for key, time in stored for part in time.parts}
    lines = {line[:2]: line[2:6] for line in chart.table.rows}
    divided = "measured work, divided by the profile"
    assert lines["before", "padding"] == ("60 s", "\u00b1 6 s", "30.0%", divided)
    assert lines["after", "pipeline bubble"] == ("5 s", "\u00b1 500 ms", "5.0%", "simulated with measured times")
    assert lines["after", "not explained"] == ("-1 s", "\u00b1 100 ms", "-1.0%", "measured, minus all other parts")
    assert f"useful work, padding, recompute: {divided}; " in chart.text
    assert "200 s \u00b1 1.5 s measured in one run" in chart.text
    assert "part below zero" in chart.text


def test_useful_work_that_differs_beyond_its_errors_is_not_left_to_the_green_part_alone() -> None:
    best, _ = EXPLANATION.plans
    quick = replace(EXPLANATION, plans=(best, plan_time(PADDED_PLAN, "default", padding=150.0)))
    for explanation, is_said in ((EXPLANATION, False), (quick, True)):
        chart = causes(sides_of(source_of(*KNOWN_BEFORE, explanation=explanation)))
        assert ("Useful work is that of the same samples" in chart.text) == is_said


def test_the_page_names_disturbed_runs_and_only_what_is_missing_is_returned(tmp_path: Path) -> None:
    calm, other = KNOWN_BEFORE
    disturbed = replace(calm, result=replace(calm.result, disturbance="others computed"))
    script: Future[str] = Future()
    script.set_result("")
    path = tmp_path / "report.html"
    missing = write_report(source_of(disturbed, other, explanation=EXPLANATION), path, script, str, None)
    page = path.read_text()
    result = page.partition('id="result"')[2].partition("</section>")[0]
    assert "Disturbed: 1 of 2 measured runs, 1 of 1 of the winner (the last time others computed)" in result
    assert 'id="chart-causes"' in page
    assert "there are no failures to show" in page
    assert not any("no failures" in each or "Disturbed" in each for each in missing)
    assert any("no profile of the layers" in each for each in missing)


def test_disturbed_runs_of_a_search_before_count_as_in_all_other_results(tmp_path: Path) -> None:
    """They are trials of the winner, which the second search took over."""
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        for disturbance in ("heat", None):
            study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
            result = result_of(store.start_trial(study.id, WINNER.plan, "sampled").id)
            store.finish_trial(replace(result, disturbance=disturbance))
            best = concluded(store, best_of(study.id))
        source = read_source(store, study)
        assert notes(source) == tuple(evidence_of(best, trials_behind(best, store)).warnings)
    assert "Disturbed: 1 of 2 measured runs, 1 of 2 of the winner (the last time heat)" in notes(source)[0]
    assert "1 of 2" in [card.value for card in cards(source, ()) if card.name == "disturbed runs"]


def test_the_history_has_a_line_for_a_baseline_that_an_earlier_study_measured() -> None:
    source = source_of(*KNOWN_BEFORE)
    assert {"baseline": "default", "seconds": source.workload.data.samples / 5.0} in [
        row for layer in history(source).spec["layer"] for row in layer.get("data", {}).get("values", ())
    ]
