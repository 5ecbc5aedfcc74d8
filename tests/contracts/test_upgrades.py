"""Databases of every released schema, and of a later one."""

import hashlib
import shutil
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from click.testing import CliRunner
from pydantic_core import to_json
from sqlalchemy import Connection, Engine, MetaData, create_engine, inspect, text

from autotune.cli import main
from storage.database.engine import Database
from storage.database.url import parse
from storage.migrations import versions
from storage.migrations.versions import r0003_models
from storage.store import Store, open_store
from storage.upkeep import schema
from storage.upkeep.repair import repair
from storage.upkeep.schema import VERSION_TABLE
from tests.programs import postgres
from tests.values.parameters import parameters
from tests.values.storage import OUTCOMES, WORKLOAD, best_of, changed, packed_plan, result_of, slow_window, window_of
from trials.plan import Layout
from trials.workload import Workload

FROZEN = sorted((Path(__file__).parents[1] / "assets" / "databases").glob("*.db"))
"""SQLite files as the release with this schema left them, Optuna's tables included. Never change one."""


KEYED_BY_PATH = [path for path in FROZEN if path.stem < "0003"]


def oldest_and_newest(files: Sequence[Path]) -> list[Any]:
    """Return the files as parameters; all but the first and the last are marked `long`."""
    return parameters({path.stem: path for path in files}, short=[files[0].stem, files[-1].stem])


every_schema = pytest.mark.parametrize("frozen", FROZEN, ids=lambda path: path.stem)
keyed_by_path, without_tensor, with_old_names = (
    pytest.mark.parametrize("frozen", oldest_and_newest([path for path in FROZEN if path.stem < first]))
    for first in ("0003", "0007", "0009")
)


@pytest.fixture(params=oldest_and_newest(FROZEN))
def frozen(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


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
    known = sorted(path.stem[1:5] for path in Path(versions.__file__).parent.glob("r*.py"))
    assert [path.stem for path in FROZEN] == known[:-1]


def test_the_names_of_the_revisions_files_are_the_revisions_that_alembic_runs() -> None:
    config = Config()
    config.set_main_option("script_location", "storage:migrations")
    found = [script.revision for script in ScriptDirectory.from_config(config).walk_revisions()]
    assert schema.known_revisions() == tuple(reversed(found))


UNKNOWN = changed("model.config_digest", "path:c0ffee")
"""The workload of databases up to revision 0002 after their upgrade: a digest of its path does not say what the model
is."""


def workload_of(frozen: Path) -> Workload:
    return UNKNOWN if frozen in KEYED_BY_PATH else WORKLOAD


def check_contents(store: Store, workload: Workload) -> None:
    (best,) = (best for best in store.best_plans() if best.imported_from is None)
    assert best == best_of(best.study_id, workload=workload)
    assert store.find_plan(best.plan.id).won == store.last_winner(workload.fingerprint) == best
    answers = {trial.role: trial for trial in store.answers(workload.fingerprint)}
    assert {role: trial.result for role, trial in answers.items()} == {
        role: result_of(answers[role].id, outcome) for role, outcome in OUTCOMES.items()
    }
    assert len(store.comparable_trials(workload)) == len(OUTCOMES)
    assert store.workload(workload.fingerprint) == workload
    assert store.layer_profile(workload.hardware.fingerprint, workload.model.fingerprint, workload.software)
    launches = store.launches(packed_plan().id)
    assert len(launches) == 2
    assert [each.windows for each in launches if each.windows] in (
        [],
        [(window_of(each.id), slow_window(each.id, 12)) for each in launches],
    )
    assert not list(store.problems())


def counts(url: str) -> dict[str, int]:
    return {name: len(rows) for name, rows in contents(url).items()}


@every_schema
def test_an_older_database_keeps_everything(frozen: Path, old_database: str, caplog: pytest.LogCaptureFixture) -> None:
    before = counts(old_database)
    with open_store(old_database) as store:
        assert "upgrading" in caplog.text
        check_contents(store, workload_of(frozen))
        assert before.items() <= counts(old_database).items()
        store.start_trial(store.studies()[0].id, packed_plan(), "sampled")


_OF_STUDIES = ("study", "trial", "outcome", "stage_measurement", "best_plan")
_KEYS = ("id", "study_id", "trial_id")


@pytest.mark.long
def test_an_older_database_of_500_studies_keeps_all_of_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    shutil.copy(FROZEN[0], path)
    with closing(sqlite3.connect(path)) as old, old:
        (studies,) = old.execute("SELECT count(*) FROM autotune_study").fetchone()
        for name in _OF_STUDIES:
            _copy_rows(old, f"autotune_{name}", 500 // studies - 1)
    url = f"sqlite:///{path}"
    before, counted = _plans_by_study(url), counts(url)
    assert counted["autotune_study"] == 500
    with open_store(url) as store:
        assert len(store.studies()) == 500
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


@keyed_by_path
def test_a_model_of_an_older_database_is_recognised_in_the_same_place_alone(old_database: str) -> None:
    with open_store(old_database) as store:
        for digest in ("another place", "c0ffee", "c0ffee"):
            store.adopt_model(WORKLOAD.model, digest)
        check_contents(store, WORKLOAD)
        assert WORKLOAD.model.fingerprint != UNKNOWN.model.fingerprint
    assert UNKNOWN.model.fingerprint not in {row[0] for row in contents(old_database)["autotune_model"]}


def test_a_repair_of_an_older_database_keeps_everything(frozen: Path, old_database: str) -> None:
    before = counts(old_database)
    assert not repair(old_database).dropped
    with open_store(old_database) as store:
        check_contents(store, workload_of(frozen))
    assert before.items() <= counts(old_database).items()


@without_tensor
def test_the_tensor_degree_of_a_plan_that_an_older_version_launched_gets_its_column(
    old_database: str, engine: Engine
) -> None:
    plan = replace(packed_plan(), layout=Layout(pipeline=2, data=2, zero=1, tensor=2))
    values = {"pipeline": 2, "data": 2, "zero": 1, "qv": 9, "qt": 4096, "document": plan.document}
    with engine.begin() as connection:
        tables = MetaData()
        tables.reflect(connection, only=["autotune_plan"])
        connection.execute(tables.tables["autotune_plan"].insert().values(id=plan.id, **values))
    with open_store(old_database) as store:
        assert not list(store.problems())
    with engine.connect() as connection:
        degrees = {row.id: row.tensor for row in connection.execute(text("SELECT id, tensor FROM autotune_plan"))}
    assert degrees.pop(plan.id) == 2
    assert set(degrees.values()) == {1}


@with_old_names
@pytest.mark.parametrize("opened", [open_store, repair])
def test_the_current_plan_of_an_older_database_has_its_role_in_trials_and_winners(
    old_database: str, engine: Engine, opened: Callable[[str], object]
) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_trial SET role = 'present' WHERE number = 0"))
        connection.execute(
            text("UPDATE autotune_best_plan SET baselines = replace(baselines, :old, :new)"),
            {"old": '"role":"baseline-a"', "new": '"role":"present"'},
        )
    if isinstance(store := opened(old_database), Store):
        store.close()
    with open_store(old_database) as store:
        roles = {trial.role for study in store.studies() for trial in store.trials(study.id) if trial.number == 0}
        assert roles == {"current-plan"}
        assert {best.baselines[0].role for best in store.best_plans()} == {"current-plan"}
        assert not list(store.problems())


@keyed_by_path
def test_an_older_model_under_two_names_is_one_after_the_upgrade(old_database: str, engine: Engine) -> None:
    with engine.begin() as connection:
        _add_second_model(connection, name="renamed")
    with open_store(old_database) as store:
        check_contents(store, UNKNOWN)
        assert len([study for study in store.studies() if study.workload_fingerprint == UNKNOWN.fingerprint]) == 2
    assert "renamed" not in {row[1] for row in contents(old_database)["autotune_model"]}


@keyed_by_path
def test_an_older_model_of_two_places_is_one_when_both_are_recognised(old_database: str, engine: Engine) -> None:
    with engine.begin() as connection:
        _add_second_model(connection, config_digest="bad")
    with open_store(old_database) as store:
        check_contents(store, UNKNOWN)
        for digest in ("bad", "c0ffee"):
            store.adopt_model(WORKLOAD.model, digest)
        check_contents(store, WORKLOAD)
        assert len([study for study in store.studies() if study.workload_fingerprint == WORKLOAD.fingerprint]) == 2


def _add_second_model(connection: Connection, **changes: str) -> None:
    """The workload of the database a second time, as an older version stored it for another place or name."""
    tables = MetaData()
    tables.reflect(connection, only=lambda name, _: name.startswith("autotune_"))

    def rows(name: str, key: str) -> Any:
        table = tables.tables[f"autotune_{name}"]
        return dict(connection.execute(table.select().where(table.c[0] == key)).mappings().one())

    def add(name: str, row: dict[str, Any]) -> None:
        connection.execute(tables.tables[f"autotune_{name}"].insert().values(row))

    workload = rows("workload", "8b21b3cf40baf721")
    hardware = {"nodes": 1, "link": None, "topology": None, **rows("hardware", workload["hardware_fingerprint"])}
    data = rows("data_profile", workload["data_fingerprint"])
    old = rows("model", workload["model_fingerprint"])
    document = {name: value for name, value in (old | changes).items() if name != "fingerprint"}
    model = {**document, "fingerprint": hashlib.sha256(to_json(document)).hexdigest()[:16]}
    assert r0003_models.is_old(old)
    key = r0003_models.old_workload_key(workload, model, hardware, data)
    add("model", model)
    add("workload", {**workload, "fingerprint": key, "model_fingerprint": model["fingerprint"]})
    profile = tables.tables["autotune_layer_profile"]
    first = dict(connection.execute(profile.select()).mappings().first() or {})
    add("layer_profile", {**first, "model_fingerprint": model["fingerprint"], "document": "{}"})
    study = tables.tables["autotune_study"]
    given = {"id": "0" * 32, "name": "a second", "workload_fingerprint": key, "seed": 0, "settings": {}}
    connection.execute(study.insert().values(**given, started=datetime(2026, 11, 1, tzinfo=UTC)))


def test_a_damaged_row_of_an_older_database_is_not_made_to_look_right(old_database: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_data_profile SET samples = samples + 1"))
    with open_store(old_database) as store:
        assert {"autotune_data_profile", "autotune_workload"} == {problem.table for problem in store.problems()}


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
