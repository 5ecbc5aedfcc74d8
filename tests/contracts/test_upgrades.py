"""Databases of every released schema, and of versions that this one does not know."""

import os
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from click.testing import CliRunner
from sqlalchemy import Engine, MetaData, create_engine, inspect, text

from autotune.cli import main
from storage.database.engine import Database
from storage.database.url import parse
from storage.migrations import versions
from storage.store import Store, open_store
from storage.upkeep import schema
from storage.upkeep.repair import repair
from storage.upkeep.schema import VERSION_TABLE
from tests.contracts.conftest import on_both_databases
from tests.programs import postgres
from tests.values.storage import OUTCOMES, WORKLOAD, best_of, packed_plan, result_of, slow_window, window_of

FROZEN = sorted((Path(__file__).parents[1] / "assets" / "databases").glob("*.db"))
"""SQLite files as the release with this schema left them, Optuna's tables included. Never change one."""


NEXT_REVISION = """
from alembic import op
from sqlalchemy import BigInteger, Column, text

revision, down_revision = "9998", {last!r}


def upgrade():
    op.add_column("autotune_plan", Column("next", BigInteger(), nullable=False, server_default=text("1")))
"""


@pytest.fixture(params=FROZEN, ids=lambda path: path.stem)
def frozen(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture
def next_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this version have one more revision of the tables, with a new column."""
    folder, last = tmp_path / "next", schema.known_revisions()[-1]
    folder.mkdir()
    (folder / "r9998_next.py").write_text(NEXT_REVISION.format(last=last))
    places = [*versions.__path__, str(folder)]
    monkeypatch.setattr(versions, "__path__", places)
    usual = ScriptDirectory.from_config

    def from_config(config: Config) -> ScriptDirectory:
        config.set_main_option("path_separator", "os")
        config.set_main_option("version_locations", os.pathsep.join(places))
        return usual(config)

    monkeypatch.setattr(ScriptDirectory, "from_config", from_config)


@pytest.fixture(scope="session")
def old_tables(postgres_server: str) -> Iterator[Callable[[Path], str]]:
    """Return the name of a database on the server that has what a file holds; copied once, since it is slow."""
    with ExitStack() as databases:

        @cache
        def copied(frozen: Path) -> str:
            url = databases.enter_context(postgres.database(postgres_server))
            _copy_to_server(frozen, url)
            return str(parse(url).database)

        yield copied


@pytest.fixture
def database_url(database_url: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of a database with everything in it for tests that use `old_database`."""
    if "old_database" not in request.fixturenames:
        yield database_url
        return
    frozen = request.getfixturevalue("frozen")
    if database_url.startswith("sqlite"):
        shutil.copy(frozen, database_url.removeprefix("sqlite:///"))
        yield database_url
        return
    template = request.getfixturevalue("old_tables")(frozen)
    with postgres.database(request.getfixturevalue("postgres_server"), template) as url:
        yield url


@pytest.fixture
def old_database(frozen: Path, database_url: str) -> str:
    """A database of the schema of `frozen` with everything in it."""
    return database_url


def _copy_to_server(frozen: Path, url: str) -> None:
    database = Database(parse(url), 60.0)
    with database.transaction(write=True) as connection:
        schema.upgrade(connection, frozen.stem)
    source = create_engine(f"sqlite:///{frozen}")
    tables = MetaData()
    tables.reflect(database.engine, only=lambda name, _: name.startswith("autotune_") and name != VERSION_TABLE)
    with source.connect() as old, database.transaction(write=True) as connection:
        for table in tables.sorted_tables:
            for row in old.execute(table.select()).mappings():
                connection.execute(table.insert().values(dict(row)))
    source.dispose()
    database.close()


def contents(url: str) -> dict[str, list[Any]]:
    engine = create_engine(parse(url))
    with engine.connect() as connection:
        tables = [name for name in inspect(connection).get_table_names() if name.startswith("autotune_")]
        found = {name: [tuple(row) for row in connection.execute(text(f"SELECT * FROM {name}"))] for name in tables}
    engine.dispose()
    return found


def test_a_schema_is_frozen_for_every_revision_but_the_last() -> None:
    known, frozen = schema.known_revisions(), {path.stem for path in FROZEN}
    assert {*known[:-1]} <= frozen <= {*known}


def test_the_names_of_the_revisions_files_are_the_revisions_that_alembic_runs() -> None:
    config = Config()
    config.set_main_option("script_location", "storage:migrations")
    found = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert schema.known_revisions() == tuple(reversed(found))


def check_contents(store: Store) -> None:
    (best,) = (best for best in store.best_plans() if best.imported_from is None)
    assert best == best_of(best.study_id, workload=WORKLOAD)
    assert store.find_plan(best.plan.id).won == store.last_winner(WORKLOAD.fingerprint) == best
    answers = {trial.role: trial for trial in store.answers(WORKLOAD.fingerprint)}
    assert {role: trial.result for role, trial in answers.items()} == {
        role: result_of(answers[role].id, outcome) for role, outcome in OUTCOMES.items()
    }
    assert len(store.comparable_trials(WORKLOAD)) == len(OUTCOMES)
    assert store.workload(WORKLOAD.fingerprint) == WORKLOAD
    assert store.layer_profile(WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software)
    launches = store.launches(packed_plan().id)
    assert len(launches) == 2
    assert [each.windows for each in launches if each.windows] in (
        [],
        [(window_of(each.id), slow_window(each.id, 12)) for each in launches],
    )
    assert not list(store.problems())


def counts(url: str) -> dict[str, int]:
    return {name: len(rows) for name, rows in contents(url).items()}


@pytest.mark.usefixtures("next_revision")
@on_both_databases
def test_an_older_database_keeps_everything(old_database: str, caplog: pytest.LogCaptureFixture) -> None:
    before = counts(old_database)
    with open_store(old_database) as store:
        assert "upgrading" in caplog.text
        assert store.revision == "9998"
        check_contents(store)
        assert before.items() <= counts(old_database).items()
        store.start_trial(store.studies()[0].id, packed_plan(), "sampled")


_OF_STUDIES = ("study", "trial", "outcome", "stage_measurement", "best_plan")
_KEYS = ("id", "study_id", "trial_id")


@pytest.mark.long
@pytest.mark.usefixtures("next_revision")
def test_an_older_database_of_500_studies_keeps_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    shutil.copy(FROZEN[0], path)
    with closing(sqlite3.connect(path)) as old, old:
        (studies,) = old.execute("SELECT count(*) FROM autotune_study").fetchone()
        for name in _OF_STUDIES:
            _copy_rows(old, f"autotune_{name}", -(-500 // studies) - 1)
    url = f"sqlite:///{path}"
    before, counted = _plans_by_study(url), counts(url)
    studies = counted["autotune_study"]
    assert studies >= 500
    with open_store(url) as store:
        assert len(store.studies()) == studies
        assert not list(store.problems())
    assert _plans_by_study(url) == before
    assert counted.items() <= counts(url).items()


def _copy_rows(database: sqlite3.Connection, table: str, copies: int) -> None:
    """Add `copies` of each row of the table, with keys and names of their own."""
    found = database.execute(f"SELECT * FROM {table}")
    columns = [name for name, *_ in found.description]
    rows = [
        [
            f"{value[:24]}{number:08x}" if name in _KEYS else f"{value} {number}" if name == "name" else value
            for name, value in zip(columns, row, strict=True)
        ]
        for row in found.fetchall()
        for number in range(copies)
    ]
    database.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(columns))})", rows)


def _plans_by_study(url: str) -> dict[str, list[tuple[str, str]]]:
    """Return the plans of the trials and winners of each study, as (table and number, id of the plan)."""
    engine, found = create_engine(parse(url)), defaultdict(list)
    with engine.connect() as connection:
        for query in (
            "SELECT study_id, 'trial ' || number, plan_id FROM autotune_trial ORDER BY study_id, number",
            "SELECT study_id, 'winner', plan_id FROM autotune_best_plan",
        ):
            for study, what, plan in connection.execute(text(query)):
                found[study].append((what, plan))
    engine.dispose()
    return dict(found)


@pytest.mark.usefixtures("next_revision")
@on_both_databases
def test_a_repair_of_an_older_database_keeps_everything(old_database: str) -> None:
    before = counts(old_database)
    assert not repair(old_database).dropped
    with open_store(old_database) as store:
        check_contents(store)
    assert before.items() <= counts(old_database).items()


@pytest.mark.usefixtures("next_revision")
def test_a_damaged_row_of_an_older_database_is_not_made_to_look_right(old_database: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_data_profile SET samples = samples + 1"))
    with open_store(old_database) as store:
        assert {"autotune_data_profile", "autotune_workload"} == {problem.table for problem in store.problems()}


@pytest.mark.usefixtures("next_revision")
@on_both_databases
def test_an_older_database_is_backed_up_first(old_database: str, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(old_database)
    open_store(old_database).close()
    place = caplog.messages[-1].rpartition(" ")[2]
    if old_database.startswith("sqlite"):
        assert Path(place).stat().st_mode & 0o777 == 0o600
        assert contents(f"sqlite:///{place}") == before
        return
    engine = create_engine(parse(old_database))
    with engine.connect() as connection:
        kept = {name: connection.execute(text(f"SELECT * FROM {place}.{name}")).all() for name in before}
    engine.dispose()
    assert {name: [tuple(row) for row in rows] for name, rows in kept.items()} == before


def test_a_database_that_is_current_is_not_backed_up(database_url: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        open_store(database_url).close()
    assert not caplog.messages


@pytest.mark.parametrize(
    ("version", "remedy"), [("9999", "upgrade vlm-autotune"), ("0013", "autotune db export --study STUDY --out FILE")]
)
def test_a_database_of_another_version_exits_with_5_and_keeps_every_byte(
    version: str, remedy: str, tmp_path: Path
) -> None:
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as other, other:
        other.execute(f"UPDATE {VERSION_TABLE} SET version_num = '{version}'")
    before = path.read_bytes()
    for arguments in (["plans"], ["db", "check"], ["db", "upgrade"], ["db", "repair"], ["doctor"], ["studies"]):
        answer = CliRunner().invoke(main, [*arguments, "--db", f"sqlite:///{path}"])
        assert answer.exit_code == 5, answer.output
        assert remedy in answer.stderr
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".db"] == ["store.db"]
