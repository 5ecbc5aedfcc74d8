from dataclasses import replace

import pytest

from autotune.plan_text import plan_text, trial_line
from autotune.results.study_report import Known, Listed, best_text, plans_text, studies_text, study_text
from storage.annotation import Annotation
from storage.baseline import Baseline
from storage.explanation import Certainty
from storage.records import BestPlan, StudyRecord
from storage.validity import Validity, Verdict
from tests.values.search import completed
from tests.values.storage import EXPLANATION, NOON, PADDED_PLAN, WORKLOAD, best_of, changed, packed_plan
from trials.outcome import Completed
from trials.plan import MOST_UNITS


def best(**fields: object) -> BestPlan:
    return best_of("5" * 32, **fields)


def certain(by_runs: float, with_predictions: float, **fields: object) -> BestPlan:
    """Return a winner with both probabilities."""
    both = Certainty(by_runs=by_runs, with_predictions=with_predictions)
    why = replace(EXPLANATION, certainty=both)
    return best(**{"ties": (), "confidence": min(by_runs, with_predictions), "explanation": why, **fields})


def test_a_sure_winner_is_named_with_its_confidence() -> None:
    said = "The best plan is the fastest of the plans that ran with a probability of 97%"
    alone = best_text(best(confidence=0.97, ties=()))
    assert f"{said}, by runs alone or with predictions, whichever is lower" in alone
    assert f"{said} by runs alone, of 3% with predictions\n" in best_text(certain(0.97, 0.03))
    assert f"{said}\n" in best_text(certain(0.968, 0.972))


def test_no_winner_is_said_to_be_certain() -> None:
    assert "with a probability of more than 99%" in best_text(best(confidence=1.0, ties=()))


def test_a_tie_is_named() -> None:
    text = best_text(best(confidence=0.6, ties=(PADDED_PLAN.id,)))
    said = "may be as fast; the best plan is the fastest of the plans that ran with a probability of 60%"
    assert f"A tie: {PADDED_PLAN.id} {said}, by runs alone or with predictions, whichever is lower" in text


def test_a_baseline_that_wins_by_its_own_runs_against_the_probability_says_why() -> None:
    own = Baseline(
        role="packed",
        estimated_samples_per_second=10.0,
        estimated_samples_per_second_error=0.1,
        gain=1.0,
        gain_error=0.0,
    )
    text = "by its own runs this baseline is, and no search ends below a baseline"
    other, third = PADDED_PLAN.id, "0" * 16
    for ties, named in (((other,), other), ((other, third), f"one of {other}, {third}")):
        said = best_text(best(baselines=(own,), confidence=0.14, ties=ties))
        assert f"With predictions {named} may be faster, but {text}" in said
    known = best_text(certain(0.97, 0.03, baselines=(own,)))
    assert f"With predictions another plan may be faster, but {text}" in known
    assert text not in best_text(certain(0.97, 0.6, baselines=(own,)))
    assert text not in best_text(best(baselines=(own,), confidence=0.14, ties=()))
    assert text not in best_text(best(baselines=(own,), confidence=0.6, ties=(other,)))
    assert text not in best_text(best(confidence=0.14, ties=(other,)))


def test_a_capacity_that_stands_for_none_is_shown_as_such() -> None:
    plan = packed_plan(MOST_UNITS)
    assert "packs of Qv unlimited, Qt 4096" in plan_text(plan)


def listed(study_id: str, memory: int) -> Listed:
    work = replace(WORKLOAD, memory_limit_bytes=memory)
    record = StudyRecord(
        id=study_id,
        workload_fingerprint=work.fingerprint,
        started=NOON,
        finished=None,
        name=f"a-{study_id}",
        settings={},
        seed=0,
    )
    return Listed(study=record, work=work, best=None, annotation=Annotation())


def test_studies_of_different_jobs_are_told_apart() -> None:
    text = studies_text([listed("1" * 32, 200 << 20), listed("2" * 32, 300 << 20)], 2)
    assert "limit 200 MiB" in text
    assert "limit 300 MiB" in text
    assert "limit" not in studies_text([listed("1" * 32, 200 << 20), listed("2" * 32, 200 << 20)], 2)


def test_archived_studies_are_known() -> None:
    assert studies_text([], 1) == "None of 1 known study matches; `autotune studies --archived` lists all of them."


def test_a_finished_study_whose_winner_cannot_be_read_is_not_said_to_have_none_yet() -> None:
    unfinished = listed("1" * 32, 200 << 20)
    finished = replace(unfinished, study=replace(unfinished.study, finished=NOON))
    assert study_text(unfinished, (), (), ()).endswith("This study has no winner yet.")
    assert "The winner of this study cannot be read" in study_text(finished, (), (), ())


def test_a_winner_without_a_rival_claims_nothing() -> None:
    assert "probability" not in best_text(best(confidence=None, ties=()))


def test_the_cost_of_the_search_is_compared_with_what_it_saves() -> None:
    """1000 samples an epoch: 125 s with the best baseline, 100 s with the winner."""
    text = best_text(best(search_seconds=50.0))
    assert "Compared with baseline-b, the 50 s of the search's trials are paid back after 2.0 epochs" in text
    vague = best(search_seconds=50.0, baselines=tuple(replace(each, gain_error=each.gain) for each in best().baselines))
    assert "The errors are too large to say when the 50 s of the search's trials are paid back" in best_text(vague)


@pytest.mark.parametrize(("error", "speed"), [(0.1, "as fast"), (0.01, "faster")])
def test_a_search_that_found_nothing_faster_says_so(error: float, speed: str) -> None:
    same = Baseline(
        role="omnibal",
        estimated_samples_per_second=10.5,
        estimated_samples_per_second_error=0.1,
        gain=0.95,
        gain_error=error,
    )
    assert f"omnibal is {speed}\n" in best_text(best(baselines=(same,)))


def test_a_small_saving_counts() -> None:
    nearly = replace(best().baselines[0], role="omnibal", gain=1.0025, gain_error=0.001)
    text = best_text(best(baselines=(nearly,), search_seconds=50.0))
    assert "Compared with omnibal, the 50 s of the search's trials are paid back after 200.0 epochs" in text


@pytest.mark.parametrize("shown", ["40960", "0.3", "-"])
def test_the_plans_among_which_objectives_leave_a_choice_are_listed(shown: str) -> None:
    assert shown in best_text(best()).partition("Pareto set")[2].split()


def test_a_trial_that_ended_early_or_was_disturbed_says_so() -> None:
    trial = completed(PADDED_PLAN, 100.0)
    outcome = trial.result.outcome
    assert isinstance(outcome, Completed)
    early = replace(trial, result=replace(trial.result, outcome=replace(outcome, shortened=True)))
    assert "ended early, clearly slower: 5.0 samples/s" in trial_line(early, 500, known=False)
    disturbed = replace(trial, result=replace(trial.result, disturbance="others computed"))
    assert "; disturbed: others computed" in trial_line(disturbed, 500, known=False)


def test_the_speed_of_a_trial_is_that_of_its_epoch_and_not_of_its_few_steps() -> None:
    trial = completed(PADDED_PLAN, 248.0)
    outcome = trial.result.outcome
    assert isinstance(outcome, Completed)
    assert outcome.measurement.measured_samples_per_second != pytest.approx(2161 / 248, rel=0.1)
    assert "epoch 248.0 s, 8.7 samples/s, peak " in trial_line(trial, 2161, known=False)
    listed_work = replace(WORKLOAD, data=replace(WORKLOAD.data, samples=2161))
    shown = study_text(replace(listed("1" * 32, 200 << 20), work=listed_work), (trial,), (), ())
    assert "epoch 248.0 s, 8.7 samples/s, peak " in shown


def test_the_winner_is_shown_with_how_many_runs_were_disturbed() -> None:
    winner, trial = best(), completed(PADDED_PLAN, 100.0)
    marked = replace(trial, plan=winner.plan, result=replace(trial.result, disturbance="others computed"))
    marked = replace(marked, id="6" * 32)
    text = best_text(winner, (trial.summary, marked.summary))
    assert "Disturbed: 1 of 2 measured runs, 1 of 1 of the winner (the last time others computed)" in text
    assert "Disturbed" not in best_text(winner, (trial.summary,))


def test_a_list_of_plans_sums_up_the_doubts_about_each_in_its_row() -> None:
    winner, trial = best(), completed(PADDED_PLAN, 100.0)
    run = replace(trial, plan=winner.plan, result=replace(trial.result, disturbance="others computed")).summary
    slow = replace(winner, plan=PADDED_PLAN, baselines=(replace(winner.baselines[0], role="omnibal", gain=0.8),))
    valid = Validity(verdict=Verdict.VALID, changes=())
    known = [
        Known(best=each, validity=valid, trials=(replace(run, plan_id=each.plan.id),) if each is slow else ())
        for each in (winner, slow)
    ]
    header, *rows, last = plans_text(known).split("\n")
    assert header.endswith("doubts")
    doubts = [row[header.index("doubts") :].strip() for row in rows]
    assert " ".join(filter(None, doubts)).endswith(" 1 of 1 runs disturbed, omnibal ran faster")
    assert last == "`autotune show PLAN` explains the doubts about a plan"
    assert "doubts" not in plans_text(known[:1])


def test_a_plan_that_won_on_two_workloads_is_said_once_to_be_in_use() -> None:
    winner = best()
    others = replace(winner, workload=changed("hardware.device_name", "another device"))
    valid = Validity(verdict=Verdict.VALID, changes=())
    found = [Known(best=each, validity=valid, used_by=("process 77",)) for each in (winner, others)]
    assert plans_text(found).count(f"{winner.plan.id} is in use: process 77") == 1


def test_plans_of_jobs_that_differ_say_in_what() -> None:
    valid = Validity(verdict=Verdict.VALID, changes=())
    other = changed("global_batch_samples", 24)
    listed = [Known(best=best(workload=work), validity=valid) for work in (best().workload, other)]
    text = plans_text(listed)
    assert "batch 24" in text
    assert "samples, " not in text
    assert "batch" not in plans_text(listed[:1])
