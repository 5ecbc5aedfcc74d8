"""Archiving, notes and tags, and vacuum."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from storage.annotation import MOST_TAGS, Annotation
from storage.errors import (
    AmbiguousId,
    BadAnnotation,
    BadBundle,
    UnknownRecord,
)
from storage.store import Store, open_store
from storage.upkeep.repair import repair
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    OWN,
    SHARED,
    WORKLOAD,
    best_of,
    new_study,
    packed_plan,
    result_of,
    searched,
)

# --- archiving ---


@on_both_databases
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
            store.calibration_state(WORKLOAD),
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


@on_both_databases
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


@on_both_databases
def test_studies_and_plans_are_found_by_their_tags(store: Store) -> None:
    first, second = searched(store), searched(store, plans=(7, 50), winner=7)
    tag, forms = "caf\u00e9", ("caf\u00e9", "cafe\u0301", " caf\u00e9 ")
    store.change_tags(store.find_subject(first), [tag, "100%"])
    store.change_tags(store.find_subject(packed_plan(7).id), [tag])
    for form in forms:
        assert [study.id for study in store.studies(tag=form)] == [first]
        assert [best.study_id for best in store.best_plans(tag=form)] == [second]
        assert [near.best.study_id for near in store.nearest_plans({}, tag=form)] == [second]
    assert not store.studies(tag="100_")
    assert not store.best_plans(tag="caf")
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
    study = searched(store, plans=(9, 5))
    with pytest.raises(UnknownRecord, match="no study and no plan begins with 'zz'"):
        store.find_subject("zz")
    assert packed_plan(9).id[0] == packed_plan(5).id[0] == "3"
    with pytest.raises(AmbiguousId, match=r"several plans"):
        store.find_subject("3")
    searched(store)
    with pytest.raises(AmbiguousId, match="several studies"):
        store.find_subject("tiny-")
    store.delete_studies([study])
    with pytest.raises(UnknownRecord):
        store.find_subject(study)


@on_both_databases
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
        for removed in (subject, here.find_subject(study)):
            here.set_note(removed, None)
            here.change_tags(removed, (), ["there"])
        assert here.import_bundle(bundle).new == 0
        assert (here.annotations("study"), here.annotations("plan")) == ({}, {SHARED.id: Annotation(tags=("here",))})
        assert here.problems() == ()


def test_tags_beyond_the_limit_that_an_import_brought_are_removed_one_by_one(store: Store, tmp_path: Path) -> None:
    study = searched(store)
    store.change_tags(store.find_subject(SHARED.id), ["theirs", "their other"])
    bundle = tmp_path / "bundle.jsonl"
    bundle.write_text("".join(store.export_studies([study], "there")))
    with open_store(f"sqlite:///{tmp_path / 'here.db'}") as here:
        searched(here)
        subject = here.find_subject(SHARED.id)
        here.change_tags(subject, [f"ours {number}" for number in range(MOST_TAGS)])
        here.import_bundle(bundle)
        assert len(here.change_tags(subject, (), ["ours 0"]).tags) == MOST_TAGS + 1
        with pytest.raises(BadAnnotation, match=f"{MOST_TAGS + 1} tags"):
            here.change_tags(subject, ["new"], ["ours 1"])


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


@on_both_databases
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
