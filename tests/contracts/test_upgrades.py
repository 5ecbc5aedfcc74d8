"""Databases of every released schema, and of a later one."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import MetaData, create_engine, inspect, text

from autotune.cli import main
from storage import schema
from storage.engine import Database
from storage.schema import VERSION_TABLE
from storage.store import open_store
from storage.url import parse
from tests.storage_values import OUTCOMES, WORKLOAD, best_of, packed_plan, result_of

FROZEN = sorted((Path(__file__).parents[1] / "assets" / "databases").glob("*.db"))
"""SQLite files as the release with this schema left them, Optuna's tables included. Never change one."""


@pytest.fixture(params=FROZEN, ids=lambda path: path.stem)
def old_database(request: pytest.FixtureRequest, database_url: str) -> str:
    """A database of an older schema with everything in it."""
    frozen: Path = request.param
    if database_url.startswith("sqlite"):
        shutil.copy(frozen, database_url.removeprefix("sqlite:///"))
    else:
        _copy_to_server(frozen, database_url)
    return database_url


def _copy_to_server(frozen: Path, url: str) -> None:
    database = Database(parse(url), 60.0)
    with database.session(write=True) as session:
        schema.upgrade(session, frozen.stem)
    source = create_engine(f"sqlite:///{frozen}")
    tables = MetaData()
    tables.reflect(database.engine, only=lambda name, _: name.startswith("autotune_") and name != VERSION_TABLE)
    with source.connect() as old, database.session(write=True) as session:
        for table in tables.sorted_tables:
            for row in old.execute(table.select()).mappings():
                session.execute(table.insert().values(dict(row)))
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
    known = sorted(path.stem[1:5] for path in Path(schema.__file__).parent.glob("migrations/versions/r*.py"))
    assert [path.stem for path in FROZEN] == known[:-1]


def test_an_older_database_keeps_everything(old_database: str, caplog: pytest.LogCaptureFixture) -> None:
    before = contents(old_database)
    with open_store(old_database) as store:
        assert "upgrading" in caplog.text
        (best,) = store.best_plans()
        assert best == best_of(best.study_id)
        answers = {trial.role: trial for trial in store.answers(WORKLOAD.fingerprint)}
        assert {role: trial.result for role, trial in answers.items()} == {
            role: result_of(answers[role].id, outcome) for role, outcome in OUTCOMES.items()
        }
        assert store.workload(WORKLOAD.fingerprint) == WORKLOAD
        assert len(store.launches(packed_plan().id)) == 2
        assert not list(store.problems())
        store.start_trial(store.studies()[0].id, packed_plan(), "sampled")
    after = contents(old_database)
    assert {name: len(rows) for name, rows in before.items() if name != "autotune_trial"} == {
        name: len(after[name]) for name in before if name != "autotune_trial"
    }


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


def test_a_newer_database_exits_with_5_and_keeps_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute(f"UPDATE {VERSION_TABLE} SET version_num = '9999'")
    before = path.read_bytes()
    for arguments in (["plans"], ["db", "check"], ["db", "repair"], ["doctor"], ["studies"]):
        answer = CliRunner().invoke(main, [*arguments, "--db", f"sqlite:///{path}"])
        assert answer.exit_code == 5, answer.output
        assert "upgrade vlm-autotune" in answer.stderr
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir() if each.suffix == ".db"] == ["store.db"]
