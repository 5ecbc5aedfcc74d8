"""Deletion of studies."""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from storage.errors import (
    DeletedRecord,
    StudyInUse,
    Superseded,
    UnknownPlan,
    UnknownRecord,
)
from storage.queries import studies
from storage.records import LaunchResult
from storage.spool import Spool
from storage.store import Store, open_store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    COSTS,
    NOON,
    OUTCOMES,
    OWN,
    SHARED,
    WORKLOAD,
    best_of,
    changed,
    new_study,
    packed_plan,
    result_of,
    searched,
    window_of,
)
from trials import wire
from trials.plan import Plan

OF_STUDIES = (
    *("study", "trial", "outcome", "attempt", "stage_measurement", "best_plan"),
    *("launch", "launch_window", "note", "tag", "plan"),
)


def launched(store: Store, plan: Plan = OWN, agent: str | None = None) -> str:
    launch = store.start_launch(plan, WORKLOAD.fingerprint, 1.5, agent)
    store.add_window(window_of(launch.id))
    return launch.id


def counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        names = [name for name in inspect(connection).get_table_names() if name.startswith("autotune_")]
        return {name: connection.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in names}


@on_both_databases
def test_a_deleted_study_leaves_nothing_and_another_one_is_untouched(store: Store, engine: Engine) -> None:
    store.add_workload(WORKLOAD)
    store.save_layer_profile(
        WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software, wire.encode(COSTS)
    )
    empty = counts(engine)
    first = searched(store)
    store.set_note(store.find_subject(first), "the first")
    store.change_tags(store.find_subject(OWN.id), ["wide"])
    launched(store)
    second = searched(store, plans=(9, 50))
    launched(store, SHARED)
    before = store.study(second), store.trials(second), store.winner(second), store.launches(SHARED.id)
    names = store.study(first).name, store.study(second).name
    planned, done = store.deletion([first]), store.delete_studies([first])
    assert planned == done
    assert (done.studies, done.heirs, done.uses) == (names[:1], names[1:], ())
    assert f"{names[1]}. They may have used these results; their winners stay, but are judged without" in str(done)
    assert (done.trials, done.best_plans, done.plans, done.launches) == (8, 1, 1, 1)
    assert (done.notes, done.tags, done.calibrations) == (1, 1, 1)
    assert (store.study(second), store.trials(second), store.winner(second), store.launches(SHARED.id)) == before
    assert not store.trials(first)
    assert not store.launches(OWN.id)
    with pytest.raises(UnknownPlan):
        store.find_plan(OWN.id)
    assert store.problems() == ()
    store.delete_studies([second])
    after = counts(engine)
    assert [after[f"autotune_{name}"] for name in OF_STUDIES] == [0] * len(OF_STUDIES)
    local = {name: count for name, count in after.items() if name not in ("autotune_deleted", "autotune_agent")}
    assert local.items() <= empty.items()
    assert store.layer_profiles()


def test_a_plan_that_another_workload_tried_stays_with_its_trainings(store: Store) -> None:
    first = searched(store)
    other = changed("hardware.devices", 4)
    study = store.create_study(store.add_workload(other), {}, seed=0).id
    store.start_trial(study, OWN, "sampled")
    launch = launched(store)
    done = store.delete_studies([first])
    assert (done.plans, done.launches, done.heirs) == (1, 0, ())
    assert store.find_plan(OWN.id).study.id == study
    assert [each.id for each in store.launches(OWN.id)] == [launch]


def test_all_studies_are_deleted_or_none(store: Store) -> None:
    first, second = searched(store), searched(store)
    with pytest.raises(UnknownRecord, match="no study"):
        store.delete_studies([first, "0" * 32])
    agent = store.add_agent("host-7 boot", "77 5").id
    store.start_trial(second, OWN, "sampled", agent_id=agent)
    with pytest.raises(StudyInUse, match="process 77 on host-7 searches in study tiny-internvl"):
        store.delete_studies([first, second])
    assert {study.id for study in store.studies()} == {first, second}
    assert len(store.delete_studies([first, second], gone=[agent]).studies) == 2
    assert store.studies() == ()


def test_a_study_whose_search_could_not_begin_is_withdrawn_unless_it_has_trials_or_another_agent(store: Store) -> None:
    agent, other = (store.add_agent("host-7 boot", f"{number} 5").id for number in (77, 78))
    fingerprint = store.add_workload(WORKLOAD)
    empty, tried, joined = (store.create_study(fingerprint, {}, 0, agent_id=agent).id for _ in range(3))
    store.join_study(fingerprint, {}, 0, lambda study: study.id == joined, agent_id=other)
    store.abandon_trial(store.start_trial(tried, OWN, "sampled", agent_id=agent).id)
    for study in (empty, tried, joined):
        store.withdraw_study(study, agent)
    assert {study.id for study in store.studies()} == {tried, joined}


def test_an_agent_that_has_joined_a_study_keeps_it_before_its_first_trial(store: Store) -> None:
    agent = store.add_agent("host-7 boot", "77 5").id
    fingerprint = store.add_workload(WORKLOAD)
    study = store.join_study(fingerprint, {}, 0, lambda _: True, agent_id=agent)
    other = store.add_agent("host-8 boot", "78 5").id
    assert store.join_study(fingerprint, {}, 0, lambda _: True, agent_id=other) == study
    store.end_agent(agent)
    for refused in (store.delete_studies, store.archive_studies):
        with pytest.raises(StudyInUse, match="process 78 on host-8 searches"):
            refused([study.id])
    store.end_agent(other)
    store.delete_studies([study.id])


def test_a_study_whose_plan_trains_stays_until_the_training_ends(store: Store) -> None:
    study = searched(store)
    agent = store.add_agent("host-7 boot", "77 5").id
    launch = launched(store, agent=agent)
    with pytest.raises(StudyInUse, match=f"process 77 on host-7 trains with plan {OWN.id}"):
        store.delete_studies([study])
    store.archive_studies([study])
    store.finish_launch(
        LaunchResult(launch_id=launch, status="finished", steps=1, training_samples_per_second=None, finished=NOON)
    )
    assert store.delete_studies([study]).launches == 1


def test_an_agent_that_was_taken_for_dead_is_refused_and_its_results_are_dropped(store: Store, tmp_path: Path) -> None:
    study, spool = new_study(store), Spool(tmp_path / "spool")
    agent = store.add_agent("host-7 boot", "77 5").id
    late, done = (store.start_trial(study, OWN, "sampled", agent_id=agent) for _ in range(2))
    launch = launched(store)
    spool.put(result_of(done.id))
    spool.put(result_of(late.id, OUTCOMES["crash"]))
    spool.put(
        LaunchResult(launch_id=launch, status="finished", steps=1, training_samples_per_second=None, finished=NOON)
    )
    spool.put(window_of(launch, 12))
    store.finish_trial(result_of(done.id))
    kept = store.start_trial(new_study(store, changed("hardware.devices", 4)), SHARED, "default")
    spool.put(result_of(kept.id))
    unknown = result_of("0" * 32)
    spool.put(unknown)
    store.delete_studies([study], gone=[agent])
    with pytest.raises(Superseded):
        store.start_launch(OWN, WORKLOAD.fingerprint, None, agent)
    with pytest.raises(DeletedRecord, match="was deleted on"):
        store.start_trial(study, OWN, "sampled", agent_id=agent)
    with pytest.raises(DeletedRecord):
        store.finish_trial(result_of(late.id))
    assert spool.replay(store) == 1
    assert [path.stem for path in spool.pending()] == [unknown.trial_id]
    assert not list((tmp_path / "spool").glob("*.bad"))
    assert store.trials(study) == ()
    assert store.problems() == ()


def test_a_deleted_study_comes_back_whole_with_its_bundle(store: Store, engine: Engine, tmp_path: Path) -> None:
    shared = ("hardware", "model", "data_profile", "workload")
    study = searched(store)
    store.set_note(store.find_subject(study), "from the bundle")
    running = store.start_trial(study, packed_plan(77), "sampled")
    bundle = tmp_path / "bundle.jsonl"
    bundle.write_text("".join(store.export_studies([study], "here")))
    trials = [trial.id for trial in store.trials(study)]
    for _ in range(2):
        store.delete_studies([study])
        with engine.connect() as connection:
            origins = connection.execute(text("SELECT DISTINCT kind FROM autotune_provenance")).scalars()
            assert set(origins) <= {f"autotune_{name}" for name in shared}
        assert store.import_bundle(bundle).new > len(trials)
        assert store.study(study).imported_from == "here"
        assert [trial.id for trial in store.trials(study)] == trials
        assert store.annotations("study")[study].note == "from the bundle"
        assert store.problems() == ()
    store.finish_trial(result_of(running.id))


@on_both_databases
@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.long)])
def test_deletions_among_agents_that_join_and_start_trials_break_nothing(
    store: Store, database_url: str, rounds: int
) -> None:
    fingerprint = store.add_workload(WORKLOAD)

    def search(number: int) -> int:
        done, dice = 0, random.Random(number)
        with open_store(database_url) as own:
            for _ in range(rounds):
                agent = own.add_agent("a host", f"{number} 1").id
                study = own.join_study(fingerprint, {}, 0, lambda study: study.finished is None, agent_id=agent).id
                for _ in range(2):
                    trial = own.start_trial(study, packed_plan(dice.randrange(4)), "sampled", agent_id=agent)
                    own.finish_trial(result_of(trial.id))
                    done += 1
                if dice.random() < 0.3:
                    own.lead_study(study, agent)
                    own.conclude_study(best_of(study, plan=packed_plan(dice.randrange(4))), "{}", agent)
                own.end_agent(agent)
        return done

    def delete(_: int) -> int:
        deleted = 0
        with open_store(database_url) as own:
            for _ in range(2 * rounds):
                for study in own.studies(archived=True):
                    try:
                        deleted += len(own.delete_studies([study.id]).studies)
                    except (StudyInUse, UnknownRecord):  # another one has deleted it
                        continue
        return deleted

    with ThreadPoolExecutor(5) as threads:
        searches = [threads.submit(search, number) for number in range(3)]
        deletions = [threads.submit(delete, number) for number in range(2)]
        assert [each.result(timeout=300) for each in searches] == [2 * rounds] * 3
        assert all(each.result(timeout=300) >= 0 for each in deletions)
    assert store.problems() == ()
    for study in store.studies():
        store.delete_studies([study.id])
    assert store.problems() == ()


@on_both_databases
def test_a_plan_that_another_study_begins_to_try_during_a_deletion_stays(store: Store, engine: Engine) -> None:
    first, second = searched(store), new_study(store, changed("hardware.devices", 4))
    with ThreadPoolExecutor(1) as threads:
        with store._database.transaction(write=True) as connection:
            trial = studies.start_trial(connection, second, OWN, "sampled", {}, agent_id=None)
            deleting = threads.submit(store.delete_studies, [first])
            while engine.dialect.name == "postgresql" and not (waiting(engine) or deleting.done()):
                time.sleep(0.01)
        assert deleting.result(timeout=60).plans == 1
    assert store.trials(second) == (trial,)
    assert store.find_plan(OWN.id).study.id == second


def waiting(engine: Engine) -> bool:
    """Whether a transaction waits for a row that another one holds."""
    with engine.connect() as connection:
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'"
        return bool(connection.scalar(text(waits)))
