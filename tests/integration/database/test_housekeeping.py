"""Deleting, archiving and annotating studies by commands, the vacuum, and what an interrupted search leaves."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import optuna
import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.folders import spool_folder, work_folder
from autotune.machine import agent as agents
from autotune.search.sampling.proposals import database
from storage.database.url import default_url
from storage.records import StudyRecord
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.processes import wait_for
from tests.programs.users import refusal
from tests.values.storage import WORKLOAD, best_of, changed, concluded, packed_plan, result_of

PLAN, OWN = packed_plan().id, packed_plan(3).id
QUESTION = "Delete? [y/N]:"
HOSTILE = "\x1b[31mred\u202e"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    """The user's own database with two studies; the older one also tried a plan of its own."""
    with open_store() as store:
        for workload, plans in ((WORKLOAD, (9, 3)), (changed("hardware.device_name", "NVIDIA H100"), (9,))):
            study = store.create_study(store.add_workload(workload), {}, seed=0).id
            for qv in plans:
                store.finish_trial(result_of(store.start_trial(study, packed_plan(qv), "sampled").id))
            concluded(store, best_of(study, workload=workload))
        yield store


@pytest.fixture
def older(store: Store) -> StudyRecord:
    return store.studies()[-1]


def run(*arguments: str) -> str:
    answer = CliRunner().invoke(main, arguments)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def document(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(*arguments, "--json"))
    return found


def optuna_studies(store: Store) -> list[str]:
    with database(store.optuna_url) as storage:
        return [study.study_name for study in storage.get_all_studies()]


@contextmanager
def living_agent(store: Store) -> Iterator[str]:
    """An agent of this process."""
    agent = store.add_agent(agents.machine(), agents.process(os.getpid()) or "").id
    yield agent
    store.end_agent(agent)


def test_a_trial_whose_search_was_interrupted_is_not_said_to_run(store: Store) -> None:
    study = store.create_study(WORKLOAD.fingerprint, {}, seed=0)
    with living_agent(store) as running:
        with living_agent(store) as ended:
            store.start_trial(study.id, packed_plan(5), "sampled", agent_id=ended)
        store.start_trial(study.id, packed_plan(6), "sampled", agent_id=running)
        shown = run("studies", study.name)
    lines = [line for line in shown.splitlines() if line.startswith("trial ")]
    assert [line.split(maxsplit=3)[3] for line in lines] == ["ended without a result", "running, or its process died"]


def test_a_trial_whose_result_waits_is_not_said_to_be_given_up(store: Store) -> None:
    study = store.create_study(WORKLOAD.fingerprint, {}, seed=0)
    trial = store.start_trial(study.id, packed_plan(5), "sampled").id
    (given_up,) = document("doctor")["findings"]
    assert "has no result, and its process is gone" in given_up["what"]
    Spool(spool_folder(work_folder(default_url()))).put(result_of(trial))
    (waiting,) = document("doctor")["findings"]
    assert waiting["remedy"] == "nothing to do: the next search or training stores them"


def test_a_study_is_deleted_with_its_copy_for_optuna_and_its_waiting_results(store: Store, older: StudyRecord) -> None:
    newer = store.studies()[0]
    with database(store.optuna_url) as storage:
        for study in (older, newer):
            optuna.create_study(storage=storage, study_name=study.name)
    spool = Spool(spool_folder(work_folder(default_url())))
    spool.put(result_of(store.trials(older.id)[0].id))
    text = run("studies", "delete", older.id[:12], older.name, "--yes")
    assert f"Deleted study {older.name}, with 2 trials, 1 best plan, 1 plan that no other study tried." in text
    assert store.studies() == (newer,)
    assert optuna_studies(store) == [newer.name]
    assert spool.replay(store) == len(spool.pending()) == 0
    assert document("plans")["plans"][0]["id"] == PLAN
    assert refusal("show", OWN)[0] == 2
    found = document("studies", "delete", newer.name, "--yes")
    assert (found["studies"], found["trials"]) == ([newer.name], 1)
    assert document("db", "check")["problems"] == []


def test_without_a_terminal_nothing_is_deleted_unless_it_is_confirmed(store: Store, older: StudyRecord) -> None:
    code, message = refusal("studies", "delete", older.name)
    assert code == 2
    assert f"This deletes study {older.name}, with 2 trials" in message
    assert "give --yes" in message
    assert len(store.studies()) == 2


@pytest.mark.parametrize(("answer", "left"), [("n", 2), pytest.param("y", 1, marks=pytest.mark.long)])
def test_on_a_terminal_a_deletion_asks_first(store: Store, older: StudyRecord, answer: str, left: int) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    command = [sys.executable, "-m", "autotune", "studies", "delete", older.name]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, check=False)
    os.close(ours)
    os.close(theirs)
    assert QUESTION in done.stderr
    assert (done.returncode == 0) == (left == 1), done.stderr
    assert len(store.studies()) == left


def test_a_signal_at_the_question_ends_with_its_code_and_deletes_nothing(store: Store, older: StudyRecord) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "autotune", "studies", "delete", older.name]
    with subprocess.Popen(command, stdin=theirs, stderr=subprocess.PIPE, text=True) as asking:
        assert asking.stderr is not None
        said = ""
        while QUESTION not in said and (more := asking.stderr.read(1)):
            said += more

        def ends() -> bool:
            # Perhaps more than once: one may come before the answer is awaited. SIGINT is ignored where scripts run in
            # the background.
            asking.terminate()
            return asking.poll() is not None

        try:
            wait_for(ends)
        finally:
            asking.kill()
    os.close(ours)
    os.close(theirs)
    assert asking.returncode == 143
    assert len(store.studies()) == 2


def test_a_study_in_use_is_neither_deleted_nor_archived_and_the_user_learns_by_what(
    store: Store, older: StudyRecord
) -> None:
    dead = store.add_agent(agents.machine(), "1 1").id
    store.start_trial(older.id, packed_plan(), "sampled", agent_id=dead)
    with living_agent(store) as agent:
        store.start_trial(older.id, packed_plan(), "sampled", agent_id=agent)
        for command in (["delete", "--yes"], ["archive"]):
            code, message = refusal("studies", *command, older.name)
            assert (code, f"process {os.getpid()} on " in message) == (6, True)
            assert f"searches in study {older.name}; wait for it" in message
    with living_agent(store) as agent:
        store.start_launch(packed_plan(3), WORKLOAD.fingerprint, None, agent)
        code, message = refusal("studies", "delete", "--yes", older.name)
        assert (code, f"trains with plan {OWN}" in message) == (6, True)
    run("studies", "delete", "--yes", older.name)  # the dead agent is no obstacle
    assert not store.agents()


def test_an_archived_study_is_hidden_until_it_is_asked_for(store: Store, older: StudyRecord) -> None:
    run("studies", "archive", older.name)
    assert [study["id"] for study in document("studies")["studies"]] != [older.id]
    assert len(document("plans")["plans"]) == 1
    shown = document("plans", "--archived", "--hardware", "a100")["plans"]
    assert [plan["archived"] for plan in shown] == [True]
    assert f"{PLAN} is of an archived study" in run("plans", "--archived")
    assert ", archived" in run("studies", "--archived")
    assert ", archived" in run("studies", older.name)
    assert document("doctor")["database"]["archived_studies"] == 1
    (shown,) = document("studies")["studies"]
    other, newer = shown["id"], shown["name"]
    run("studies", "archive", other)
    for what, known in (("plans", "2 known plans"), ("studies", "2 known studies")):
        assert run(what) == f"None of {known} matches; `autotune {what} --archived` lists all of them.\n"
    assert refusal("report") == (2, "all studies are archived; name one of `autotune studies --archived`")
    assert run("studies", "archive", other) == f"Was archived already: {newer}\n"
    assert run("studies", "unarchive", other) == f"No longer archived: {newer}\n"
    text = run("studies", "unarchive", other, older.name)
    assert text == f"No longer archived: {older.name}\nWas not archived: {newer}\n"
    assert document("studies", "unarchive", older.name) == {"studies": [older.name], "archived": False}
    assert len(document("plans")["plans"]) == 2


def test_all_studies_but_archived_ones_are_exported(store: Store, older: StudyRecord, tmp_path: Path) -> None:
    command = ("db", "export", "--all", "--out", str(tmp_path / "all.jsonl"))
    assert sorted(document(*command)["studies"]) == sorted(study.id for study in store.studies())
    run("studies", "archive", older.name)
    assert document(*command)["studies"] == [study.id for study in store.studies() if study.id != older.id]
    store.archive_studies([study.id for study in store.studies()])
    code, message = refusal(*command)
    assert (code, message.startswith("no finished study is here, but archived or imported ones; ")) == (2, True)


def test_an_export_replaces_no_file_of_the_user(store: Store, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"messages": []}\n')
    code, message = refusal("db", "export", "--all", "--out", data)
    assert (code, message.startswith(f"{data} exists and is not an earlier output of this kind")) == (2, True)
    assert data.read_text() == '{"messages": []}\n'


def test_notes_and_tags_are_shown_where_a_study_or_plan_is(store: Store, older: StudyRecord) -> None:
    run("note", older.name, f"before the new driver {HOSTILE}\nsecond line")
    run("tag", older.name, "paper", "slow")
    assert document("tag", older.name, "fast", "--remove", "slow")["tags"] == ["fast", "paper"]
    run("note", OWN, "kept for later")
    run("tag", PLAN[:8], "production")
    (listed,) = document("studies", "--tag", "paper")["studies"]
    assert (listed["id"], listed["tags"]) == (older.id, ["fast", "paper"])
    assert listed["note"].endswith("\nsecond line")
    assert "fast, paper" in run("studies")
    assert "second line" not in run("studies")
    history = run("studies", older.name)
    assert "Note: before the new driver \\x1b[31mred\\u202e\nsecond line" in history
    assert HOSTILE not in history
    assert {plan["id"] for plan in document("plans", "--tag", "production")["plans"]} == {PLAN}
    for what in ("plans", "studies"):
        assert run(what, "--tag", "unknown").endswith(f" matches; `autotune {what} --archived` lists all of them.\n")
    assert document("plans", "--tag", "paper")["plans"] == []
    assert "production" in run("plans")
    assert "Tags: production" in run("show", PLAN)
    assert document("show", OWN)["note"] == "kept for later"
    assert run("note", OWN) == "kept for later\n"
    run("note", OWN, "--remove")
    assert run("note", OWN) == f"plan {OWN} has no note\n"
    assert run("tag", OWN) == f"plan {OWN}: no tags\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["note", "tiny", "x"], "several studies"),
        (
            ["note", "no-such", "x"],
            "begins with 'no-such'; `autotune studies --archived` and `autotune plans --archived`",
        ),
        (["note", PLAN, ""], "--remove removes it"),
        (["note", PLAN, "\udcff"], "UTF-8"),
        (["note", PLAN, "x", "--remove"], "either a text or --remove"),
        (["tag", PLAN, "a,b"], "without commas"),
        (["tag", PLAN, HOSTILE], "is not a tag"),
        (["tag", PLAN, "--remove", "none"], "has no tag 'none'"),
        (["studies", "delete", "no-such", "--yes"], "begins with 'no-such'"),
        (["studies", "archive", "tiny"], "several studies"),
    ],
)
def test_what_cannot_be_annotated_or_kept_is_refused(store: Store, arguments: list[str], message: str) -> None:
    code, output = refusal(*arguments)
    assert (code, message in output) == (2, True), output
    assert store.annotations("plan") == {}


def test_a_study_with_the_name_of_a_command_is_shown_by_list(store: Store) -> None:
    work = changed("model.name", "delete", changed("model.config_digest", "other"))
    study = store.create_study(store.add_workload(work), {}, seed=0)
    assert document("studies", "list", "delete")["name"] == document("studies", study.name)["name"] == study.name
    assert "Usage: autotune studies [OPTIONS] COMMAND" in run("studies", "-h").replace("main", "autotune")


def test_a_vacuum_waits_for_no_process_but_names_it(store: Store) -> None:
    with living_agent(store):
        code, message = refusal("db", "vacuum")
        assert (code, f"process {os.getpid()} on " in message) == (6, True)
        assert "before the vacuum" in message
    found = document("db", "vacuum")
    assert min(found.values()) > 0
    assert "MiB before" in run("db", "vacuum")
    assert document("db", "check")["problems"] == []


def test_an_interrupted_search_is_no_problem(store: Store) -> None:
    agent = store.add_agent(agents.machine(), agents.process(os.getpid()) or "?").id
    study = store.create_study(WORKLOAD.fingerprint, {}, seed=0, model_name="mine")
    store.start_trial(study.id, packed_plan(), "default", agent_id=agent)
    store.end_agent(agent)
    assert document("doctor")["findings"] == []
