"""What is said about the figures of a winner: disturbed runs, corrected figures, and a search that tried nothing."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from autotune.results.evidence import evidence_of, trials_behind, trials_behind_each
from autotune.results.known_plan import known_text
from autotune.results.study_report import best_document, best_text
from storage.baseline import Baseline
from storage.records import BestPlan, StudyRecord, TrialSummary
from storage.store import Store, open_store
from tests.values.search import completed
from tests.values.storage import (
    NOON,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    changed,
    concluded,
    packed_plan,
    result_of,
)
from trials.workload import Workload

WINNER = best_of("5" * 32, baselines=())
SAMPLES = WINNER.workload.data.samples


def run(*seconds: float, role: str = "sampled") -> list[TrialSummary]:
    """Runs of the winner, or of the plan of a baseline."""
    plan = WINNER.plan if role in ("sampled", "confirm") else PADDED_PLAN
    return [replace(completed(plan, each), plan=plan, role=role).summary for each in seconds]


def default_of(seconds: float, gain: float = 1.2) -> Baseline:
    return Baseline(
        role="default",
        estimated_samples_per_second=SAMPLES / seconds,
        estimated_samples_per_second_error=0.1,
        gain=gain,
        gain_error=0.1,
    )


def test_the_reason_of_disturbed_runs_is_that_of_the_winner() -> None:
    winner, other = run(100.0)[0], run(97.0, role="default")[0]
    runs = [replace(winner, disturbance="0.9 of 2 cores"), replace(other, disturbance="0.7 of 2 cores")]
    assert evidence_of(WINNER, runs).disturbance == "0.9 of 2 cores"
    assert evidence_of(WINNER, [winner, runs[1]]).disturbance == "0.7 of 2 cores"


def test_a_plan_and_its_search_name_the_same_of_several_disturbances(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = tried(store, WORKLOAD, disturbed=("1.1 of 2 cores", "1.4 of 2 cores"))
        runs = trials_behind(best, store)
        assert "2 of 2 of the winner (the last time 1.4 of 2 cores)" in evidence_of(best, runs).warnings[0]
        known = known_text(store.find_plan(best.plan.id))
    assert known.endswith("measured there in 2 runs, disturbed each time: the last time 1.4 of 2 cores")


@pytest.mark.parametrize(("gain", "named"), [(0.8, True), (0.998, False), (1.2, False)])
def test_a_baseline_that_ran_faster_than_the_winner_is_named(gain: float, named: bool) -> None:
    best = replace(WINNER, baselines=(default_of(97.0, gain),))
    found = " ".join(evidence_of(best, [*run(100.0), *run(97.0, role="default")]).warnings)
    assert (
        "Faster than the best plan in its own runs, but it cannot win: default (search.space leaves it out)" in found
    ) == named


@pytest.mark.parametrize(
    ("seconds", "runs", "said"),
    [
        (116.7, (98.7, 95.8), "Epoch s corrected for the speed of the machine, which changed during the search: def"),
        (90.0, (98.7, 95.8), "default 90.0 (its runs 95.8 to 98.7)"),
        (90.0, (98.71, 98.69), "default 90.0 (its runs 98.7)"),
        (97.0, (98.7, 95.8), ""),
        (98.8, (98.7, 95.8), ""),
    ],
)
def test_a_figure_outside_the_range_of_its_measurements_is_explained(
    seconds: float, runs: Sequence[float], said: str
) -> None:
    best = replace(WINNER, baselines=(default_of(seconds),))
    (*found,) = evidence_of(best, [*run(100.0), *run(*runs, role="default")]).warnings
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_a_budget_in_which_nothing_was_searched_is_said_to_be_too_small() -> None:
    alone = replace(WINNER, plan=PADDED_PLAN, baselines=(default_of(100.0),))
    said = "Nothing was searched: the budget allowed the baselines alone"
    assert said in best_text(alone, run(100.0, 100.0, role="default"))
    assert said not in best_text(WINNER, [*run(100.0), *run(130.0, role="default")])
    (failed,) = (replace(each, kind="failed", epoch_seconds=None) for each in run(100.0))
    text = best_text(alone, [failed, *run(100.0, role="default")])
    assert said not in text
    assert "No plan besides the baselines completed" in text
    assert said not in best_text(WINNER)


def test_a_program_gets_the_evidence_too() -> None:
    disturbed = [replace(each, disturbance="heat") for each in run(100.0)]
    found = best_document(WINNER, [*disturbed, *run(101.0, role="confirm")])["evidence"]
    assert (found["runs"], found["disturbed_runs"], found["disturbed_winner_runs"]) == (2, 1, 1)
    assert (found["disturbance"], found["searched_plans"]) == ("heat", 1)


def test_the_trials_behind_winners_are_of_their_studies_and_before_them_on_the_same_workload(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        first, second, other = (tried(store, workload) for workload in (WORKLOAD, WORKLOAD, OTHER))
        afresh = tried(store, WORKLOAD, fresh=True)
        assert [studies_of(each) for each in trials_behind_each([second, other, afresh], store)] == [
            {first.study_id, second.study_id, afresh.study_id},
            {other.study_id},
            {afresh.study_id},
        ]
        # Trials with other packs in their steps are not used by a search.
        loose = tried(store, WORKLOAD, training={"batch_tolerance": 0.5})
        assert studies_of(trials_behind(loose, store)) == {loose.study_id}
        early = replace(first, created=NOON - timedelta(days=1))
        assert studies_of(trials_behind(early, store)) == {first.study_id}


def test_a_study_that_is_archived_stays_behind_the_winners_whose_search_used_it(tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        archived, kept, best = (tried(store, WORKLOAD) for _ in range(3))
        store.archive_studies([archived.study_id])
        every = {archived.study_id, kept.study_id, best.study_id}
        assert [studies_of(each) for each in trials_behind_each([archived, best], store)] == [every, every]
        later = tried(store, WORKLOAD)
        assert studies_of(trials_behind(later, store)) == {kept.study_id, best.study_id, later.study_id}


def test_behind_a_winner_are_trials_of_the_database_that_searched_for_it(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.jsonl"
    with open_store(f"sqlite:///{tmp_path}/other.db") as store:
        earlier, imported = tried(store, WORKLOAD), tried(store, WORKLOAD)
        bundle.write_text("".join(store.export_studies([earlier.study_id, imported.study_id], "other")))
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        local = tried(store, WORKLOAD)
        store.import_bundle(bundle)
        best = tried(store, WORKLOAD)
        assert [studies_of(each) for each in trials_behind_each([best, imported], store)] == [
            {local.study_id, best.study_id},
            {earlier.study_id, imported.study_id},
        ]


def test_a_study_that_another_agent_begins_meanwhile_is_behind_no_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best, read = tried(store, WORKLOAD), store.studies

        def studies(*, archived: bool) -> Sequence[StudyRecord]:
            known = read(archived=archived)
            tried(store, WORKLOAD)
            return known

        monkeypatch.setattr(store, "studies", studies)
        assert studies_of(trials_behind(best, store)) == {best.study_id}


OTHER = changed("hardware.devices", 4)


def tried(
    store: Store, workload: Workload, *, disturbed: Sequence[str | None] = (None,), **settings: object
) -> BestPlan:
    """Run a study with a trial for each reason of `disturbed`, and return its winner."""
    study = store.create_study(store.add_workload(workload), settings, seed=0)
    for number, each in enumerate(disturbed, 1 - len(disturbed)):
        result = result_of(store.start_trial(study.id, packed_plan(), "sampled").id)
        finished = result.finished + timedelta(minutes=number)
        store.finish_trial(replace(result, disturbance=each, finished=finished))
    return concluded(store, best_of(study.id, workload=workload))


def studies_of(trials: Sequence[TrialSummary]) -> set[str]:
    return {trial.study_id for trial in trials}
