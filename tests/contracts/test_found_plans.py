"""Which plan an id means, and which model a study and its winner, on every database."""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest

from storage.errors import AmbiguousId, UnknownPlan, UnknownRecord
from storage.records import BestPlan
from storage.store import Store
from storage.validity import Now
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    NOON,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    changed,
    concluded,
    new_study,
    packed_plan,
    result_of,
)
from trials.plan import Plan
from trials.workload import Workload

OTHER = replace(WORKLOAD, model=replace(WORKLOAD.model, name="my_other-model"))
"""Of another folder, with the same fingerprint."""


def always(workload: Workload) -> Now:
    return lambda *_: workload


def test_a_plan_is_found_by_the_beginning_of_its_id(store: Store) -> None:
    concluded(store, best_of(new_study(store), created=NOON - timedelta(days=1)))
    newest = best_of(new_study(store), epoch_seconds=300.0)
    concluded(store, newest)
    concluded(store, best_of(new_study(store), plan=PADDED_PLAN))
    assert store.find_plan(newest.plan.id[:8].upper()).won == newest


@on_both_databases
def test_of_a_plan_that_won_several_studies_the_one_that_holds_best_is_found(store: Store) -> None:
    drifted, elsewhere = changed("hardware.driver", "550.1"), changed("hardware.device_name", "NVIDIA H100")
    for day, workload in enumerate((WORKLOAD, drifted, elsewhere)):
        concluded(store, best_of(new_study(store, workload), workload=workload, created=NOON + timedelta(days=day)))
    for workload in (WORKLOAD, drifted, elsewhere):
        assert store.find_plan(packed_plan().id, always(workload)).workload == workload
    found = store.find_plan(packed_plan().id, lambda then, _: changed("model.family", "other", then))
    assert found.workload == elsewhere


def test_a_plan_that_did_not_win_is_found_with_its_trials_and_the_winner(store: Store) -> None:
    study = new_study(store)
    plans = (PADDED_PLAN, packed_plan(3), packed_plan())
    tie, given_up, first = (store.start_trial(study, plan, "sampled") for plan in plans)
    again = store.start_trial(study, PADDED_PLAN, "confirm")
    for trial in (tie, first, again):
        store.finish_trial(result_of(trial.id))
    store.abandon_trial(given_up.id)
    best = concluded(store, best_of(study, ties=(PADDED_PLAN.id,)))
    found = store.find_plan(PADDED_PLAN.id[:8])
    assert (found.plan, found.workload, found.study.id) == (PADDED_PLAN, WORKLOAD, study)
    assert (found.won, found.winner) == (None, best)
    assert [trial.id for trial in found.trials] == [tie.id, again.id]
    assert [trial.id for trial in store.find_plan(packed_plan(3).id).trials] == [given_up.id]


def test_of_a_plan_that_won_elsewhere_and_was_tried_here_the_study_of_here_is_found(store: Store) -> None:
    elsewhere = changed("hardware.device_name", "NVIDIA H100")
    tried_here = new_study(store)
    store.finish_trial(result_of(store.start_trial(tried_here, packed_plan(), "sampled").id))
    won = concluded(store, best_of(new_study(store, elsewhere), workload=elsewhere))
    assert store.find_plan(packed_plan().id, always(WORKLOAD)).study.id == tried_here
    assert store.find_plan(packed_plan().id, always(elsewhere)).won == store.find_plan(packed_plan().id).won == won


def test_an_id_that_fits_several_plans_is_refused_with_their_ids(store: Store) -> None:
    plans = packed_plan(13), PADDED_PLAN
    assert {plan.id[0] for plan in plans} == {"0"}
    for plan in plans:
        concluded(store, best_of(new_study(store), plan=plan))
    with pytest.raises(AmbiguousId, match=PADDED_PLAN.id):
        store.find_plan("0")


def test_an_empty_name_is_no_beginning_of_the_only_study_or_plan(store: Store) -> None:
    study = new_study(store)
    concluded(store, best_of(study))
    for find in (store.find_plan, partial(store.find_plan, study_id=study)):
        with pytest.raises(UnknownPlan, match="the id of a plan is empty"):
            find("")
    with pytest.raises(UnknownRecord, match="the name of a study is empty"):
        store.find_study("")
    with pytest.raises(UnknownRecord, match="begins with ''"):
        store.find_subject("")


def test_an_unknown_plan_is_answered_with_the_nearest_ids(store: Store) -> None:
    with pytest.raises(UnknownPlan, match="run a search first"):
        store.find_plan("feed")
    concluded(store, best_of(new_study(store)))
    mistyped = packed_plan().id[:6] + "%"
    with pytest.raises(UnknownPlan, match=packed_plan().id):
        store.find_plan(mistyped)


def test_a_plan_is_found_in_the_study_that_is_asked_for(store: Store) -> None:
    elsewhere = changed("hardware.device_name", "NVIDIA H100")
    first = concluded(store, best_of(new_study(store), created=NOON))
    concluded(store, best_of(new_study(store, elsewhere), workload=elsewhere))
    other = new_study(store)
    assert store.find_plan(packed_plan().id, always(elsewhere), study_id=first.study_id).won == first
    with pytest.raises(UnknownPlan, match=f"study {other} did not try plan {packed_plan().id}"):
        store.find_plan(packed_plan().id, study_id=other)


@on_both_databases
def test_studies_and_winners_have_the_names_of_their_own_models(store: Store) -> None:
    first, second = store.add_workload(WORKLOAD), store.add_workload(OTHER)
    assert first == second
    own = WORKLOAD.model.name
    names = (own, OTHER.model.name)
    studies = [store.create_study(first, {}, seed=0, model_name=name) for name in names]
    for study, name in zip(studies, names, strict=True):
        assert study.name == f"{name}-{study.id[:8]}"
        store.finish_trial(result_of(store.start_trial(study.id, packed_plan(), "default").id))
        concluded(store, best_of(study.id))
    for study, name in zip(studies, names, strict=True):
        winner = store.winner(study.id)
        assert winner is not None
        assert winner.workload.model.name == name
        assert study.named(store.workload(first)).model.name == name
        assert [each.id for each in store.studies(model_name=name.upper())] == [study.id]
        assert [best.study_id for best in store.best_plans(model_name=name)] == [study.id]
    assert {best.workload.model.name for best in store.best_plans()} == set(names)
    best = store.last_winner(first)
    assert best is not None
    assert best.workload.model.name == OTHER.model.name
    for text in (studies[0].id[:8], "my%", "myXother"):
        assert store.studies(model_name=text) == ()


def test_a_study_is_joined_whatever_the_name_of_the_folder(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)
    first = store.create_study(fingerprint, {}, seed=0, model_name="first")
    assert store.join_study(fingerprint, {}, 0, lambda _: True, model_name="second") == first
    other = store.join_study(fingerprint, {}, 0, lambda _: False, model_name="second")
    assert other.name.startswith("second-")


def test_the_last_winner_is_that_of_a_study_for_the_same_trainer_where_there_is_one(store: Store) -> None:
    def won(plan: Plan, trainer: str | None) -> BestPlan:
        study = store.create_study(store.add_workload(WORKLOAD), {"trainer": trainer}, 0)
        return replace(concluded(store, best_of(study.id, plan=plan)), trainer=trainer)

    for_swift = won(packed_plan(1), "ms-swift")
    assert store.last_winner(WORKLOAD.fingerprint) == for_swift
    assert store.last_winner(WORKLOAD.fingerprint, "qwen-vl") == for_swift
    own = won(packed_plan(2), None)
    later = won(packed_plan(3), "ms-swift")
    assert store.last_winner(WORKLOAD.fingerprint) == own
    assert store.last_winner(WORKLOAD.fingerprint, "ms-swift") == later
    assert store.last_winner(WORKLOAD.fingerprint, "qwen-vl") == later


@on_both_databases
def test_names_are_found_in_any_case_of_any_script(store: Store) -> None:
    work = changed("hardware.device_name", "GRÜN Ж")
    study = store.create_study(store.add_workload(work), {}, seed=0, model_name="Ünïcode-Я")
    concluded(store, best_of(study.id, workload=work))
    for name in ("ÜNÏ", "ünï", "я"):
        assert [each.id for each in store.studies(model_name=name)] == [study.id]
    assert store.find_study("ünï").id == store.find_study("ÜNÏCODE-я").id == study.id
    assert len(store.best_plans(hardware_name="grün ж")) == 1
