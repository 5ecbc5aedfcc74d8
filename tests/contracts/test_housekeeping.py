"""Deletion, archiving, notes and tags, and vacuum."""

import hashlib
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from sqlalchemy import Engine, inspect, text

from storage.annotation import MOST_TAGS, Annotation
from storage.errors import (
    AmbiguousId,
    BadAnnotation,
    BadBundle,
    DeletedRecord,
    StudyInUse,
    Superseded,
    UnknownPlan,
    UnknownRecord,
)
from storage.queries import studies
from storage.records import DisturbedRun, LaunchResult
from storage.spool import Spool
from storage.store import Store, open_store
from storage.upkeep.repair import repair
from tests.storage_values import (
    COSTS,
    NOON,
    OUTCOMES,
    WORKLOAD,
    best_of,
    changed,
    completed,
    concluded,
    new_study,
    packed_plan,
    result_of,
)
from trials import wire
from trials.plan import Plan

SHARED, OWN = packed_plan(), packed_plan(40)
OF_STUDIES = ("study", "trial", "outcome", "attempt", "stage_measurement", "best_plan", "launch", "note", "tag", "plan")


def searched(store: Store, *, plans: tuple[int, ...] = (9, 40), winner: int = 9) -> str:
    """A finished study with every outcome, a disturbed run and a trial that was given up."""
    study = new_study(store)
    for name, outcome in OUTCOMES.items():
        store.finish_trial(result_of(store.start_trial(study, packed_plan(plans[0]), name).id, outcome))
    for qv in plans:
        trial = store.start_trial(study, packed_plan(qv), "sampled")
        store.finish_trial(replace(result_of(trial.id), disturbed=(DISTURBED,)))
    store.abandon_trial(store.start_trial(study, packed_plan(plans[-1]), "sampled").id)
    concluded(store, best_of(study, plan=packed_plan(winner)))
    return study


DISTURBED = DisturbedRun(outcome=completed(), epoch_seconds=1.0, contamination="others")


def launched(store: Store, plan: Plan = OWN, agent: str | None = None) -> str:
    return store.start_launch(plan, WORKLOAD.fingerprint, 1.5, agent).id


def counts(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        names = [name for name in inspect(connection).get_table_names() if name.startswith("autotune_")]
        return {name: connection.scalar(text(f"SELECT count(*) FROM {name}")) or 0 for name in names}


# --- deletion ---


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


def test_an_agent_that_has_joined_a_study_keeps_it_before_its_first_trial(store: Store) -> None:
    agent = store.add_agent("host-7 boot", "77 5").id
    fingerprint = store.add_workload(WORKLOAD)
    study = store.join_study(fingerprint, {}, 0, lambda _: True, agent)
    other = store.add_agent("host-8 boot", "78 5").id
    assert store.join_study(fingerprint, {}, 0, lambda _: True, other) == study
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
        LaunchResult(launch_id=launch, status="finished", steps=1, samples_per_second=None, finished=NOON)
    )
    assert store.delete_studies([study]).launches == 1


def test_an_agent_that_was_taken_for_dead_is_refused_and_its_results_are_dropped(store: Store, tmp_path: Path) -> None:
    study, spool = new_study(store), Spool(tmp_path / "spool")
    agent = store.add_agent("host-7 boot", "77 5").id
    late, done = (store.start_trial(study, OWN, "sampled", agent_id=agent) for _ in range(2))
    launch = launched(store)
    spool.put(result_of(done.id))
    spool.put(result_of(late.id, OUTCOMES["crash"]))
    spool.put(LaunchResult(launch_id=launch, status="finished", steps=1, samples_per_second=None, finished=NOON))
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


def test_deletions_among_agents_that_join_and_start_trials_break_nothing(store: Store, database_url: str) -> None:
    fingerprint = store.add_workload(WORKLOAD)

    def search(number: int) -> int:
        done, dice = 0, random.Random(number)
        with open_store(database_url) as own:
            for _ in range(12):
                agent = own.add_agent("a host", f"{number} 1").id
                study = own.join_study(fingerprint, {}, 0, lambda study: study.finished is None, agent).id
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
            for _ in range(25):
                for study in own.studies(archived=True):
                    try:
                        deleted += len(own.delete_studies([study.id]).studies)
                    except (StudyInUse, UnknownRecord):  # another one has deleted it
                        continue
        return deleted

    with ThreadPoolExecutor(5) as threads:
        searches = [threads.submit(search, number) for number in range(3)]
        deletions = [threads.submit(delete, number) for number in range(2)]
        assert [each.result(timeout=300) for each in searches] == [24] * 3
        assert all(each.result(timeout=300) >= 0 for each in deletions)
    assert store.problems() == ()
    for study in store.studies():
        store.delete_studies([study.id])
    assert store.problems() == ()


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


# --- archiving ---


def test_an_archived_study_is_used_by_name_alone_until_it_is_unarchived(store: Store) -> None:
    study = searched(store)
    name = store.study(study).name

    def uses() -> list[bool]:
        joined = store.join_study(WORKLOAD.fingerprint, {"new": True}, 0, lambda _: True)
        found = (
            store.best_plans(),
            store.nearest_plans({}),
            store.answers(WORKLOAD.fingerprint),
            store.comparable_trials(WORKLOAD),
            store.lessons(WORKLOAD),
            store.last_winner(WORKLOAD.fingerprint),
            joined.id == study,
        )
        if joined.id != study:
            store.delete_studies([joined.id])
        return [bool(each) for each in found]

    assert all(uses())
    store.archive_studies([study])
    archived = store.study(study).archived
    assert archived is not None
    assert not any(uses())
    assert store.studies() == ()
    assert [each.id for each in store.studies(archived=True)] == [study]
    assert len(store.best_plans(archived=True)) == len(store.nearest_plans({}, archived=True)) == 1
    assert store.find_study(name).id == store.find_plan(SHARED.id).study.id == study
    assert store.winner(study) == best_of(study)
    store.archive_studies([study])
    assert store.study(study).archived == archived
    store.unarchive_studies([study])
    assert all(uses())
    assert store.study(study).archived is None


def test_a_plan_is_shown_as_a_study_found_it_that_is_not_archived(store: Store) -> None:
    first, second = searched(store), searched(store, winner=40)
    assert store.find_plan(SHARED.id).study.id == first
    store.archive_studies([first])
    assert store.find_plan(SHARED.id).study.id == second


def test_what_is_archived_here_is_not_exported_and_stays_after_an_import(store: Store, tmp_path: Path) -> None:
    study = searched(store)
    bundle = tmp_path / "bundle.jsonl"
    store.archive_studies([study])
    bundle.write_text("".join(store.export_studies([study], "here")))
    assert "archived" not in bundle.read_text()
    assert store.import_bundle(bundle).new == 0
    assert store.study(study).archived is not None


# --- notes and tags ---


def test_notes_and_tags_come_back_on_studies_and_plans(store: Store) -> None:
    study = searched(store)
    subjects = store.find_subject(store.study(study).name.upper()), store.find_subject(OWN.id[:8])
    assert [(each.kind, each.id) for each in subjects] == [("study", study), ("plan", OWN.id)]
    note = "  'quoted'; DROP TABLE autotune_note; --\n\x1b[31m\u202e\u96ea  "
    for subject in subjects:
        store.set_note(subject, note)
        assert store.change_tags(subject, ["z", "a b", "z", "cafe\u0301"]).tags == ("a b", "caf\u00e9", "z")
        assert store.change_tags(subject, ["new"], ["z", "cafe\u0301"]).tags == ("a b", "new")
        found = Annotation(note=note.strip(), tags=("a b", "new"))
        assert store.annotations(subject.kind) == store.annotations(subject.kind, [subject.id]) == {subject.id: found}
    assert store.annotations("study", [OWN.id]) == {}
    assert store.problems() == ()
    for subject in subjects:
        store.set_note(subject, "again")
        assert store.annotations(subject.kind)[subject.id].note == "again"
        store.set_note(subject, None)
        store.change_tags(subject, (), ["new", "a b"])
        assert store.annotations(subject.kind) == {}


def test_studies_and_plans_are_found_by_their_tags(store: Store) -> None:
    first, second = searched(store), searched(store, plans=(7, 50), winner=7)
    store.change_tags(store.find_subject(first), ["paper", "100%"])
    store.change_tags(store.find_subject(packed_plan(7).id), ["paper"])
    assert [study.id for study in store.studies(tag="paper")] == [first]
    assert [best.study_id for best in store.best_plans(tag="paper")] == [second]
    assert [near.best.study_id for near in store.nearest_plans({}, tag="paper")] == [second]
    assert not store.studies(tag="100_")
    assert not store.best_plans(tag="pape")
    assert not store.nearest_plans({}, tag="100%")


BAD_NOTES = {"": "at least one", " \n": "at least one", "x" * 4001: "at most 4000", "a\0b": "NUL", "\udcff": "UTF-8"}
BAD_TAGS = ("", " ", "x" * 65, "a\0b", "\ud800", "a\nb", "a\x1b[31m", "\u202ea", "a,b", "a\tb")


def test_a_note_that_is_no_text_is_refused(store: Store) -> None:
    subject = store.find_subject(new_study(store))
    store.set_note(subject, "kept")
    for note, message in BAD_NOTES.items():
        with pytest.raises(BadAnnotation, match=message):
            store.set_note(subject, note)
    assert store.annotations("study")[subject.id].note == "kept"


def test_a_tag_that_is_no_line_of_text_is_refused(store: Store) -> None:
    subject = store.find_subject(new_study(store))
    for tag in BAD_TAGS:
        with pytest.raises(BadAnnotation):
            store.change_tags(subject, ["good", tag])
        with pytest.raises(BadAnnotation):
            store.change_tags(subject, (), [tag])
    assert store.annotations("study") == {}


def test_too_many_tags_and_unknown_ones_are_refused(store: Store) -> None:
    subject = store.find_subject(new_study(store))
    tags = [f"tag {number}" for number in range(MOST_TAGS)]
    store.change_tags(subject, tags)
    with pytest.raises(BadAnnotation, match=f"{MOST_TAGS + 1} tags"):
        store.change_tags(subject, ["one more"])
    with pytest.raises(BadAnnotation, match="has no tag 'other'; its tags are: tag 0"):
        store.change_tags(subject, ["new"], ["tag 0", "other"])
    assert len(store.annotations("study")[subject.id].tags) == MOST_TAGS


def test_a_name_of_nothing_or_of_several_is_refused(store: Store) -> None:
    study = searched(store)
    with pytest.raises(UnknownRecord, match="no study and no plan begins with 'zz'"):
        store.find_subject("zz")
    with pytest.raises(AmbiguousId, match=r"several plans"):
        store.find_subject("")
    searched(store)
    with pytest.raises(AmbiguousId, match="several studies"):
        store.find_subject("tiny-")
    store.delete_studies([study])
    with pytest.raises(UnknownRecord):
        store.find_subject(study)


def test_tags_that_are_added_at_once_are_all_kept(store: Store) -> None:
    subject = store.find_subject(new_study(store))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda number: store.change_tags(subject, [f"{number % 8}", "same"]), range(16)))
        list(threads.map(lambda number: store.set_note(subject, f"note {number}"), range(8)))
    assert store.annotations("study")[subject.id].tags == (*map(str, range(8)), "same")


def test_notes_and_tags_travel_and_what_is_written_here_stays(store: Store, tmp_path: Path) -> None:
    study = searched(store)
    for subject in (store.find_subject(study), store.find_subject(SHARED.id)):
        store.set_note(subject, f"{subject.kind} there")
        store.change_tags(subject, ["there"])
    lines = list(store.export_studies([study], "there"))
    bundle = tmp_path / "bundle.jsonl"
    bundle.write_text("".join(lines))
    with open_store(f"sqlite:///{tmp_path / 'here.db'}") as here:
        here.import_bundle(bundle)
        assert here.annotations("study") == store.annotations("study")
        assert here.annotations("plan") == store.annotations("plan") != {}
        subject = here.find_subject(SHARED.id)
        here.set_note(subject, "here")
        here.change_tags(subject, ["here"])
        assert here.import_bundle(bundle).new == 0
        assert here.annotations("plan") == {SHARED.id: Annotation(note="here", tags=("here", "there"))}
        assert here.problems() == ()


def resigned(lines: list[str]) -> list[str]:
    body = "".join(lines[:-1])
    end = {"rows": len(lines) - 2, "sha256": hashlib.sha256(body.encode()).hexdigest()}
    return [*lines[:-1], f"{json.dumps(end)}\n"]


SPOILT = {
    ('"autotune_study", "key": "', '"autotune_study", "key": "x'): "a row that is missing",
    ('"kind": "autotune_study"', '"kind": "autotune_trial"'): "a row that is missing",
    ("a text", r"a\u0000text"): "cannot be stored|NUL",
    ("a text", r"\ud800"): "half of a character",
    ("a text", "x" * 4001): "at most 4000",
    ("a tag", "a,tag"): "is not a tag",
    ("a tag", " "): "at least one character",
}


def test_a_bundle_with_bad_notes_is_refused(store: Store, tmp_path: Path) -> None:
    with open_store(f"sqlite:///{tmp_path / 'there.db'}") as there:
        study = searched(there)
        there.set_note(there.find_subject(study), "a text")
        there.change_tags(there.find_subject(study), ["a tag"])
        lines = list(there.export_studies([study], "there"))
    bundle = tmp_path / "bundle.jsonl"
    for (old, new), message in SPOILT.items():
        spoilt = [line.replace(old, new) if "_note" in line or "_tag" in line else line for line in lines]
        assert spoilt != lines
        bundle.write_text("".join(resigned(spoilt)))
        with pytest.raises(BadBundle, match=message):
            store.import_bundle(bundle)
        assert store.studies() == ()


# --- health and vacuum ---


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("INSERT INTO autotune_note VALUES ('autotune_study', 'none', 'x')", "is of no stored study or plan"),
        ("INSERT INTO autotune_tag VALUES ('autotune_trial', 'none', 'x')", "is of no stored study or plan"),
        ("UPDATE autotune_note SET text = ''", "at least one character"),
        ("UPDATE autotune_tag SET tag = 'a,b'", "is not a tag"),
        ("INSERT INTO autotune_deleted VALUES ('none', 'x', '2026-11-20 12:00:00')", "names no table"),
    ],
)
def test_bad_notes_are_found_and_a_repair_drops_them(
    store: Store, database_url: str, engine: Engine, spoil: str, message: str
) -> None:
    study = searched(store)
    for name in (study, SHARED.id):
        store.set_note(store.find_subject(name), "x")
    store.change_tags(store.find_subject(SHARED.id), ["x"])
    with engine.begin() as connection:
        connection.execute(text(spoil))
    assert any(message in str(problem) for problem in store.problems()), store.problems()
    store.close()
    engine.dispose()
    done = repair(database_url)
    assert set(done.dropped) <= {"autotune_note", "autotune_tag"}
    with open_store(database_url) as again:
        assert again.problems() == ()
        assert again.winner(study) == best_of(study)


def test_a_vacuum_keeps_everything_and_gives_the_space_of_deleted_studies_back(store: Store, engine: Engine) -> None:
    kept = searched(store)
    for _ in range(3):
        study = new_study(store)
        for qv in range(12):
            store.finish_trial(result_of(store.start_trial(study, packed_plan(100 + qv), "sampled").id))
        store.delete_studies([study])
    before = store.study(kept), store.trials(kept), store.winner(kept)
    done = store.vacuum()
    if engine.dialect.name == "sqlite":
        assert 0 < done.bytes_after < done.bytes_before
        assert store.vacuum().bytes_after == store.vacuum().bytes_before
    else:
        assert done.bytes_after > 0
        with engine.connect() as connection:
            dead = "SELECT last_vacuum IS NOT NULL FROM pg_stat_user_tables WHERE relname = 'autotune_outcome'"
            assert connection.scalar(text(dead)) is True
    assert (store.study(kept), store.trials(kept), store.winner(kept)) == before
    assert store.problems() == ()
