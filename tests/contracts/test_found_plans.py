"""Which plan an id means, on every database."""

from datetime import timedelta

import pytest

from storage.errors import AmbiguousId, UnknownPlan
from storage.store import Store
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


def test_a_plan_is_found_by_the_beginning_of_its_id(store: Store) -> None:
    concluded(store, best_of(new_study(store), created=NOON - timedelta(days=1)))
    newest = best_of(new_study(store), epoch_seconds=300.0)
    concluded(store, newest)
    concluded(store, best_of(new_study(store), plan=PADDED_PLAN))
    assert store.find_plan(newest.plan.id[:8].upper()).won == newest


def test_of_a_plan_that_won_several_studies_the_one_that_holds_best_is_found(store: Store) -> None:
    drifted, elsewhere = changed("hardware.driver", "550.1"), changed("hardware.device_name", "NVIDIA H100")
    for day, workload in enumerate((WORKLOAD, drifted, elsewhere)):
        concluded(store, best_of(new_study(store, workload), workload=workload, created=NOON + timedelta(days=day)))
    for workload in (WORKLOAD, drifted, elsewhere):
        assert store.find_plan(packed_plan().id, workload).workload == workload
    assert store.find_plan(packed_plan().id, changed("model.family", "other")).workload == elsewhere


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
    assert store.find_plan(packed_plan().id, WORKLOAD).study.id == tried_here
    assert store.find_plan(packed_plan().id, elsewhere).won == store.find_plan(packed_plan().id).won == won


def test_an_id_that_fits_several_plans_is_refused_with_their_ids(store: Store) -> None:
    for plan in (packed_plan(), PADDED_PLAN):
        concluded(store, best_of(new_study(store), plan=plan))
    with pytest.raises(AmbiguousId, match=PADDED_PLAN.id):
        store.find_plan("")


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
    assert store.find_plan(packed_plan().id, elsewhere, study_id=first.study_id).won == first
    with pytest.raises(UnknownPlan, match=f"study {other} did not try plan {packed_plan().id}"):
        store.find_plan(packed_plan().id, study_id=other)
