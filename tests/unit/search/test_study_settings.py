"""Which stored study a search goes on with."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.search.study_settings import (
    PACKS,
    TRAINER,
    TRAINING,
    answers,
    goes_on,
    is_same_search,
    packs_of,
    search_of,
    study_settings,
    teaches,
    training_of,
)
from storage.records import StudyRecord
from tests.values.data import index_of
from tests.values.storage import NOON, PADDED_PLAN
from trials.data.index import DatasetIndex
from trials.job import SearchSection, TrainingSection


def settings_of(**search: Any) -> dict[str, Any]:
    return study_settings(SearchSection.model_validate(search), TrainingSection(), None, (), "org/name", fresh=False)


def study_of(settings: dict[str, Any]) -> StudyRecord:
    return StudyRecord(id="", name="", workload_fingerprint="", settings=settings, seed=0, started=NOON, finished=None)


def test_a_study_of_a_version_with_fewer_axes_goes_on() -> None:
    stored = settings_of(trials=9)
    del stored["space"]["sequence"]
    assert is_same_search(stored, settings_of(trials=9))
    assert not is_same_search(stored, settings_of(trials=9, space={"sequence": ["1"]}))
    del stored["space"]
    assert is_same_search(stored, settings_of(trials=9))


@pytest.mark.parametrize(
    ("search", "is_same"),
    [({}, True), ({"workers": "fresh"}, True), ({"trials": 10}, False), ({"space": {"qv": [9]}}, False)],
)
def test_other_settings_make_another_search(search: dict[str, Any], is_same: bool) -> None:
    assert is_same_search(settings_of(), settings_of(**search)) is is_same


def test_a_moved_model_goes_on_with_its_search() -> None:
    stored = {**settings_of(), "model": "/old/place"}
    assert is_same_search(stored, settings_of())
    del stored["model"]  # as of an earlier version
    assert is_same_search(stored, settings_of())


def test_another_current_plan_or_queue_makes_another_search() -> None:
    with_plan = study_settings(SearchSection(), TrainingSection(), PADDED_PLAN, (), "org/name", fresh=True)
    assert is_same_search(with_plan, {**with_plan, "fresh": False})
    assert not is_same_search(settings_of(), with_plan)
    queued = study_settings(SearchSection(), TrainingSection(), None, (PADDED_PLAN,), "org/name", fresh=False)
    assert not is_same_search(settings_of(), queued)


def test_a_search_for_a_trainer_is_another_search() -> None:
    def settings(trainer: str | None) -> dict[str, Any]:
        return study_settings(SearchSection(), TrainingSection(), None, (), "org/name", fresh=False, trainer=trainer)

    assert is_same_search(settings("ms-swift"), settings("ms-swift"))
    assert not is_same_search(settings("ms-swift"), settings("qwen-vl"))
    assert not is_same_search(settings_of(), settings("ms-swift"))
    before = settings_of()
    del before[TRAINER]
    assert is_same_search(before, settings_of())


def test_other_loading_workers_make_another_search_which_runs_its_plans_again() -> None:
    none, some = (
        study_settings(SearchSection(), TrainingSection(), None, (), "m", fresh=False, loading_workers=workers)
        for workers in (0, 4)
    )
    assert not is_same_search(none, some)
    assert is_same_search(some, some)
    assert answers(study_of(some), study_of({**some, "trials": 9}))
    assert not answers(study_of(none), study_of(some))


def test_plans_run_again_with_another_seed_by_which_steps_have_other_packs() -> None:
    study = study_of(settings_of())
    assert answers(study, study)
    assert not answers(study, replace(study, seed=1))
    assert [goes_on(study, settings_of(), seed) for seed in (0, 1)] == [True, False]
    ended = replace(study, finished=NOON)
    assert [goes_on(ended, settings_of(trials=trials), 1) for trials in (24, 9)] == [True, False]


def test_results_of_samples_in_other_files_whose_steps_have_other_packs_do_not_count() -> None:
    def settings(index: DatasetIndex) -> dict[str, Any]:
        packs = packs_of(index)
        return study_settings(SearchSection(), TrainingSection(), None, (), "m", fresh=False, packs=packs)

    one, two = (index_of([(1, 10), (2, 20)], repeats) for repeats in ((1.0,), (1.0, 1.0)))
    assert one.digest == two.digest
    study, other = study_of(settings(one)), study_of(settings(two))
    assert answers(study, study_of({**study.settings, "trials": 9}))
    assert not answers(study, other)
    assert [teaches(study, TrainingSection(), 0, packs_of(index)) for index in (one, two)] == [True, False]
    assert [goes_on(study, settings(index), 0) for index in (one, two)] == [True, False]
    assert goes_on(replace(study, finished=NOON), settings(two), 0)
    unknown = study_of({**study.settings, PACKS: None})  # as of an earlier version
    assert answers(unknown, other)


@pytest.mark.parametrize("changed", [{"batch_tolerance": 0.2}, {"step_variance": 3.0}])
def test_steps_that_are_arranged_otherwise_make_another_search(changed: dict[str, float]) -> None:
    training = TrainingSection.model_validate(changed)
    settings = study_settings(SearchSection(), training, None, (), "org/name", fresh=False)
    assert not is_same_search(settings_of(), settings)
    assert not answers(study_of(settings_of()), study_of(settings))
    assert training_of(settings) == training
    assert training_of({}) == training_of({TRAINING: {"step_variance": "broken"}}) == TrainingSection()
    same = TrainingSection(learning_rate=0.1)
    assert is_same_search(settings_of(), study_settings(SearchSection(), same, None, (), "org/name", fresh=False))


def test_trials_have_the_warm_up_of_their_own_study() -> None:
    now = SearchSection(warmup_steps=2)
    assert search_of({"warmup_steps": 0, "timed_steps": 9}, now) == SearchSection(warmup_steps=0, timed_steps=9)
    assert search_of({}, now) == now
    assert search_of({"warmup_steps": "broken"}, now) == now
    settings = settings_of()
    assert not answers(study_of(settings), study_of({**settings, "warmup_steps": 0}))
