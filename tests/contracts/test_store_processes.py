"""Other programs and other versions on one database."""

import optuna
import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from storage.database.tables import METADATA
from storage.database.url import parse
from storage.errors import DatabaseUnavailable, OtherVersion
from storage.store import Store, open_store
from storage.upkeep.schema import VERSION_TABLE
from tests.contracts.conftest import on_both_databases
from tests.programs import postgres
from tests.values.storage import WORKLOAD

HEAD = "0100"


def revision(engine: Engine) -> str:
    with engine.connect() as connection:
        return str(connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")))


@on_both_databases
def test_the_migrated_tables_are_the_declared_ones(store: Store, engine: Engine) -> None:
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"version_table": VERSION_TABLE, "compare_server_default": True}
        )
        assert compare_metadata(context, METADATA) == []


@on_both_databases
def test_a_creation_that_fails_halfway_leaves_nothing_and_can_be_repeated(database_url: str, engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE autotune_launch (id INTEGER)"))
    with pytest.raises(Exception, match=r"autotune_launch.* already exists"):
        open_store(database_url)
    with engine.begin() as connection:
        assert inspect(connection).get_table_names() == ["autotune_launch"]
        connection.execute(text("DROP TABLE autotune_launch"))
    with open_store(database_url) as store:
        store.add_workload(WORKLOAD)


@on_both_databases
def test_a_lock_that_lasts_is_reported_with_the_remedy(database_url: str, engine: Engine) -> None:
    with open_store(database_url, lock_timeout_seconds=0.2) as store:
        with engine.begin() as other:
            postgresql = engine.dialect.name == "postgresql"
            other.execute(text("LOCK TABLE autotune_hardware" if postgresql else "DELETE FROM autotune_hardware"))
            with pytest.raises(DatabaseUnavailable, match="another program holds it"):
                store.add_workload(WORKLOAD)
        store.add_workload(WORKLOAD)


@on_both_databases
def test_a_database_of_a_newer_version_is_refused_and_left_alone(database_url: str, engine: Engine) -> None:
    open_store(database_url).close()
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '9999'"))
        connection.execute(text("DROP TABLE autotune_launch_window"))
    with pytest.raises(OtherVersion, match=r"9999.*upgrade vlm-autotune"):
        open_store(database_url)
    assert revision(engine) == "9999"
    with engine.connect() as connection:
        assert not engine.dialect.has_table(connection, "autotune_launch_window")


@pytest.mark.parametrize(
    ("database_url", "optuna_first"),
    [
        ("sqlite", True),
        ("postgresql", False),
        pytest.param("sqlite", False, marks=pytest.mark.long),
        pytest.param("postgresql", True, marks=pytest.mark.long),
    ],
    indirect=["database_url"],
)
def test_optuna_and_the_store_live_in_one_database(database_url: str, engine: Engine, *, optuna_first: bool) -> None:
    if not optuna_first:
        open_store(database_url).close()
    storage = optuna.storages.RDBStorage(parse(database_url).render_as_string(hide_password=False))
    with open_store(database_url) as store:
        again = optuna.storages.RDBStorage(store.optuna_url)
        study = optuna.create_study(storage=again, study_name="beside")
        study.add_trial(optuna.trial.create_trial(value=1.0))
        store.add_workload(WORKLOAD)
    with open_store(database_url) as store:
        assert store.workload(WORKLOAD.fingerprint) == WORKLOAD
    assert optuna.load_study(storage=storage, study_name="beside").best_value == 1.0
    assert revision(engine) == HEAD
    for each in (storage, again):
        each.remove_session()
        each.engine.dispose()


def test_a_lock_whose_connection_is_cut_ends_without_a_word(postgres_server: str) -> None:
    """As servers do with connections that are idle for long; the lock is lost, what it was for is not."""
    with postgres.database(postgres_server) as url, open_store(url) as store:
        with store.exclusive(), psycopg.connect(url, autocommit=True) as other:
            cut = "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
            assert other.execute(cut).fetchall() == [(True,)]
            store.add_workload(WORKLOAD)
        assert store.workload(WORKLOAD.fingerprint) == WORKLOAD
        with store.exclusive():
            pass
