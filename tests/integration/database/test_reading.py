"""Commands that only read, or are refused, create no database."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from storage.errors import DatabaseUnavailable
from storage.reading import read_store
from storage.store import open_store
from tests.programs import postgres
from tests.programs.users import JobFile, databases, document, refusal

READING = [
    "plans",
    "plans --here",
    "studies",
    "studies abc",
    "studies delete abc --yes",
    "studies archive abc",
    "show abc",
    "compare abc def",
    "note abc",
    "tag abc",
    "report",
    "db check",
    "db vacuum",
    "db export --study abc",
]


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize("command", READING)
def test_a_database_that_does_not_exist_is_refused_and_not_created(command: str, tmp_path: Path) -> None:
    code, message = refusal(*command.split(), "--db", f"sqlite:///{tmp_path}/wrong/results.db")
    assert code == 4
    assert f"the database sqlite:///{tmp_path}/wrong/results.db does not exist; check --db" in message
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("plan", [(), ("--plan", "abc"), ("--resume-with", "abc")])
def test_a_launch_of_a_plan_that_only_a_database_can_have_creates_none(
    plan: tuple[str, ...], job: JobFile, home: Path, tmp_path: Path
) -> None:
    code, message = refusal("launch", job.path, *plan, "--db", f"sqlite:///{tmp_path}/wrong/results.db")
    assert (code, "results.db does not exist; check --db" in message) == (4, True)
    assert not (tmp_path / "wrong").exists()
    assert "no study has tried a plan yet" in refusal("launch", job.path, "--plan", "abc")[1]
    assert not databases(home)


def test_a_repair_without_a_database_leaves_nothing_behind(tmp_path: Path) -> None:
    code, message = refusal("db", "repair", "--db", f"sqlite:///{tmp_path}/wrong/results.db")
    assert (code, "results.db to repair; name one with --db" in message) == (4, True)
    assert not (tmp_path / "wrong").exists()
    (tmp_path / "results.db-wal").touch()  # an empty log holds no rows
    assert refusal("db", "repair", "--db", f"sqlite:///{tmp_path}/results.db")[1].startswith("there is no database")


@pytest.mark.parametrize(("command", "known"), [("plans", "plans"), ("studies", "studies"), ("db check", "problems")])
def test_a_new_user_knows_nothing_yet_and_gets_no_database(command: str, known: str, home: Path) -> None:
    answer = CliRunner().invoke(main, [*command.split(), "--json"])
    assert (answer.exit_code, json.loads(answer.stdout)) == (0, {known: []})
    assert not databases(home)


def test_doctor_says_that_the_database_is_not_there_yet(home: Path) -> None:
    answer = CliRunner().invoke(main, ["doctor"])
    assert (answer.exit_code, "autotune.db, which is not there yet: 0 studies" in answer.stdout) == (0, True)
    assert not databases(home)
    assert CliRunner().invoke(main, ["db", "upgrade"]).exit_code == 0
    assert "autotune.db, tables of revision 0100: 0 studies" in CliRunner().invoke(main, ["doctor"]).stdout


def test_reading_makes_no_tables(database_url: str) -> None:
    with (
        pytest.raises(
            DatabaseUnavailable,
            match=r"(create them by `autotune db upgrade|run `autotune tune JOB`, which creates it)",
        ),
        read_store(database_url),
    ):
        pass
    with open_store(database_url):
        pass
    with read_store(database_url) as store:
        assert store.studies() == ()


def test_a_file_without_tables_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.db").touch()
    with (
        pytest.raises(DatabaseUnavailable, match="has no tables of autotune"),
        read_store(f"sqlite:///{tmp_path}/other.db"),
    ):
        pass
    assert not (tmp_path / "other.db").stat().st_size


def test_what_the_message_for_a_database_without_tables_names_creates_them(home: Path, postgres_server: str) -> None:
    with postgres.database(postgres_server) as url:
        code, message = refusal("plans", "--db", url)
        assert code == 4
        assert "has no tables of autotune; create them by `autotune db upgrade --db URL`, or name another" in message
        document("db", "upgrade", "--db", url)
        assert document("studies", "--db", url) == {"studies": []}
    assert not databases(home)


@pytest.mark.parametrize("contents", [None, "{}\n"], ids=["missing", "no bundle"])
def test_an_import_of_a_file_that_is_refused_makes_no_database(
    contents: str | None, home: Path, tmp_path: Path
) -> None:
    if contents is not None:
        (tmp_path / "bundle.jsonl").write_text(contents)
    assert refusal("db", "import", tmp_path / "bundle.jsonl")[0] == 2
    assert not databases(home)
