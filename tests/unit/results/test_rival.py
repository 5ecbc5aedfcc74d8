"""A baseline that measured faster than the winner, which a training takes where search.space has it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.events import Event
from autotune.library.export import best_known
from autotune.plan_choice import choose_plan, trusted
from autotune.results.rival import Rival, rival_of
from autotune.results.study_report import best_document, best_text
from storage.baseline import Baseline
from storage.records import BestPlan, TrialSummary
from storage.store import Store, open_store
from tests.values.search import completed
from tests.values.storage import EXPLANATION, PADDED_PLAN, WORKLOAD, best_of, concluded, packed_plan, result_of
from trials.plan import Padded, Plan

OTHER_PLAN = replace(PADDED_PLAN, packing=Padded(samples=3))


def baseline(gain: float, error: float, *, plan: Plan = PADDED_PLAN, may_win: bool = True) -> Baseline:
    return Baseline(
        role="omnibal",
        estimated_samples_per_second=10 / gain,
        estimated_samples_per_second_error=0.1,
        gain=gain,
        gain_error=error,
        plan_id=plan.id,
        may_win=may_win,
    )


def over(*baselines: Baseline) -> BestPlan:
    """Return a winner with these gains."""
    return best_of("5" * 32, baselines=baselines)


def runs(disturbance: str | None = None) -> Sequence[TrialSummary]:
    plans = {packed_plan(): "sampled", PADDED_PLAN: "omnibal", OTHER_PLAN: "packed"}
    made = (completed(plan, 100.0, role=role) for plan, role in plans.items())
    return [replace(each.summary, disturbance=disturbance) for each in made]


@pytest.mark.parametrize("disturbance", [None, "other load"])
@pytest.mark.parametrize(
    ("gain", "error", "is_rival"),
    [(0.75, 0.1, True), (0.75, 0.21, True), (0.75, 0.22, False), (0.98, 0.03, False), (1.2, 0.1, False)],
)
def test_a_baseline_is_a_rival_if_it_ran_faster_by_more_than_a_standard_error_disturbed_or_not(
    gain: float, error: float, disturbance: str | None, is_rival: bool
) -> None:
    best, trials = over(baseline(gain, error)), runs(disturbance)
    found = rival_of(best, trials)
    assert (found is not None) is is_rival
    assert (best_document(best, trials)["rival"] is not None) is is_rival
    assert (f"mnibal ({PADDED_PLAN.id}) measured faster" in best_text(best, trials)) is is_rival
    if found is not None:
        assert (found.plan_id, found.is_disturbed) == (PADDED_PLAN.id, disturbance is not None)
        assert f"{PADDED_PLAN.id}) measured faster, 1.33 +- " in str(found)
        assert "two quiet repeats of both are missing: `autotune tune JOB --fresh`" in str(found)


@pytest.mark.parametrize(("may_win", "taken"), [(True, "it"), (False, "the best plan")])
def test_the_result_says_what_trains_and_whether_the_space_leaves_the_rival_out(may_win: bool, taken: str) -> None:
    best, trials = over(baseline(0.75, 0.05, may_win=may_win)), runs()
    text = best_text(best, trials)
    assert f"Omnibal ({PADDED_PLAN.id}) measured faster" in text
    assert ("times as fast as the best plan, but search.space leaves it out" in text) is not may_win
    assert f"`launch` and `run` ask, or without a terminal take {taken}\n" in f"{text}\n"
    assert (best_document(best, trials)["rival"]["only_compared"] is None) is may_win


def test_of_a_baseline_that_the_trainer_cannot_hold_nothing_is_asked() -> None:
    text = best_text(over(replace(baseline(0.75, 0.05), left_out="ms-swift lacks a pipeline")), runs())
    assert "times as fast as the best plan, but ms-swift lacks a pipeline\n" in text
    assert "in its own runs" not in text
    assert "`launch` and `run` ask" not in text


def tied(gain: float, *winner: float, runs: tuple[float, ...] = (65.0, 45.5)) -> tuple[BestPlan, list[TrialSummary]]:
    """Return a winner with a tie, of this gain over it, and the runs of both in seconds of an epoch."""
    tie = replace(baseline(gain, 0.4), role=f"tie {PADDED_PLAN.id}")
    best = replace(over(baseline(2.0, 0.1)), ties=(PADDED_PLAN.id,), explanation=replace(EXPLANATION, tied=(tie,)))
    best = replace(best, baselines=tuple(replace(each, plan_id=OTHER_PLAN.id) for each in best.baselines))
    made = [completed(best.plan, each) for each in winner] + [completed(PADDED_PLAN, each) for each in runs]
    return best, [each.summary for each in made]


def test_a_tie_has_a_row_and_one_that_ran_faster_a_sentence() -> None:
    best, trials = tied(0.8, 80.9, 53.0)
    text = best_text(best, trials)
    table = text.partition("\n\n")[2].splitlines()
    assert [row.split("  ")[0] for row in table[2:5]] == ["best", f"tie {PADDED_PLAN.id}", "omnibal"]
    assert table[3].endswith("0.80 +- 0.40")
    said = (
        f"A tie ({PADDED_PLAN.id}) measured faster, 1.25 +- 0.62 times as fast as the best plan, but predictions speak "
        "against it (an epoch took 45.5 to 65.0 s in its runs, 53.0 to 80.9 s in those of the best plan); two more "
        "quiet repeats of both decide: `autotune tune JOB --fresh` on an idle machine"
    )
    assert f"\n{said}\n" in text
    document = best_document(best, trials)
    assert (document["rival"], document["faster_tie"]["plan_id"]) == (None, PADDED_PLAN.id)
    assert "but it ran once (" in best_text(*tied(0.8, 80.9, 53.0, runs=(45.5,)))
    disturbed = [*trials[:-1], replace(trials[-1], disturbance="other load")]
    assert "but it ran once (an epoch took 65.0 s in its runs" in best_text(best, disturbed)


def test_a_tie_whose_runs_are_not_faster_or_not_known_has_no_sentence() -> None:
    for best, trials in (tied(0.997, 80.9, 53.0), tied(1.1, 80.9, 53.0), (tied(0.8)[0], ())):
        assert "measured faster" not in best_text(best, trials)
        assert best_document(best, trials)["faster_tie"] is None


def test_a_rival_that_the_space_has_comes_before_a_faster_one_that_it_leaves_out() -> None:
    left_out, slower = baseline(0.6, 0.05, may_win=False), baseline(0.8, 0.05, plan=OTHER_PLAN)
    found = rival_of(over(left_out, slower), runs())
    assert found is not None
    assert found.plan_id == OTHER_PLAN.id


def test_a_baseline_whose_plan_no_trial_measured_is_no_rival() -> None:
    faster = baseline(0.75, 0.01)
    assert rival_of(over(faster), runs()[:1]) is None
    assert rival_of(over(replace(faster, plan_id=None)), runs()) is None


def searched(store: Store, *, may_win: bool = True, left_out: str | None = None) -> BestPlan:
    """Store a study whose baseline measured faster than its winner."""
    study = store.create_study(store.add_workload(WORKLOAD), {"fresh": True}, seed=0)
    for plan, role, seconds in ((packed_plan(), "sampled", 100.0), (PADDED_PLAN, "omnibal", 75.0)):
        result = result_of(store.start_trial(study.id, plan, role).id)
        store.finish_trial(replace(result, epoch_seconds=seconds))
    best = over(replace(baseline(0.75, 0.05, may_win=may_win), left_out=left_out))
    return concluded(store, replace(best, study_id=study.id, workload=WORKLOAD))


@pytest.mark.parametrize("may_win", [True, False])
def test_without_a_terminal_the_rival_trains_where_the_space_has_it_and_the_log_says_so(
    tmp_path: Path, may_win: bool
) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = searched(store, may_win=may_win)
        chosen = choose_plan(store, WORKLOAD, None, heard.append)
        assert chosen == trusted(store, best, heard.append)
    taken, other = (PADDED_PLAN, best.plan) if may_win else (best.plan, PADDED_PLAN)
    assert chosen.plan == taken
    (said,) = {str(event) for event in heard if "Taking plan" in str(event)}
    assert f"Taking plan {taken.id}, not {other.id}; omnibal ({PADDED_PLAN.id}) measured faster" in said
    assert ("search.space leaves it out" in said) is not may_win


@pytest.mark.parametrize(
    ("may_win", "left_out", "exported"),
    [(True, None, PADDED_PLAN), (False, None, packed_plan()), (True, "ms-swift lacks a pipeline", packed_plan())],
)
def test_an_export_takes_the_rival_where_a_launch_does_and_the_trainer_can_hold_it(
    tmp_path: Path, may_win: bool, left_out: str | None, exported: Plan
) -> None:
    url, heard = f"sqlite:///{tmp_path}/autotune.db", list[Event]()
    with open_store(url) as store:
        best = searched(store, may_win=may_win, left_out=left_out)
        assert best.plan == packed_plan()
    forecaster: Any = SimpleNamespace(workload=WORKLOAD)
    assert best_known(forecaster, "ms-swift", url, heard.append) == exported
    assert "measured faster" in str(heard[0])
    assert f"Exporting plan {exported.id}, " in str(heard[-1])


def test_archiving_an_earlier_study_does_not_change_which_plan_trains(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        earlier = searched(store)
        study = store.create_study(earlier.workload.fingerprint, {}, seed=0)
        best = concluded(store, replace(earlier, study_id=study.id))
        assert trusted(store, best, lambda _: None).plan == PADDED_PLAN
        store.archive_studies([earlier.study_id])
        assert trusted(store, best, lambda _: None).plan == PADDED_PLAN


@pytest.mark.parametrize("kept", [True, False])
def test_an_answer_decides_whatever_the_space_has(tmp_path: Path, kept: bool) -> None:
    asked: list[Rival] = []

    def keeps(rival: Rival) -> bool:
        asked.append(rival)
        return kept

    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = searched(store, may_win=kept)
        chosen = choose_plan(store, WORKLOAD, None, lambda _: None, keeps=keeps)
    assert chosen.plan == (best.plan if kept else PADDED_PLAN)
    assert [rival.plan_id for rival in asked] == [PADDED_PLAN.id]


def test_a_rival_says_that_no_run_was_quiet() -> None:
    rival = Rival(plan_id="ab", role="packed", speed_ratio=1.3, speed_ratio_error=0.1, is_disturbed=True)
    assert str(rival).startswith("all runs were disturbed, and packed (ab) measured faster")


@pytest.mark.parametrize("is_neutral", [True, False])
def test_a_baseline_that_cannot_win_has_its_reason_and_no_advice_to_measure_again(is_neutral: bool) -> None:
    best, trials = over(replace(baseline(0.75, 0.05, may_win=False), is_neutral=is_neutral)), runs()
    why = "search.space leaves it out" if is_neutral else "it changes what is learned"
    text = best_text(best, trials)
    assert str(rival_of(best, trials)).endswith(f"times as fast as the best plan, but {why}")
    assert f"Faster than the best plan in its own runs, but it cannot win: omnibal ({why})" in text
    assert ("omnibal, changes what is learned  " in text) is not is_neutral
    assert ("the fastest baseline, which changes what is learned" in text) is not is_neutral


def test_next_to_a_baseline_that_changes_what_is_learned_the_fastest_other_one_is_named() -> None:
    changing = replace(baseline(1.05, 0.01, may_win=False), role="hbp", is_neutral=False)
    text = best_text(over(changing, baseline(1.2, 0.02, plan=OTHER_PLAN)), runs())
    assert "1.20 +- 0.02 times as fast as omnibal, the fastest baseline that may win" in text
