"""Every contract of the store is checked on SQLite and, mostly in `make test-long`, on a real PostgreSQL."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine

from storage.database.url import parse
from storage.store import Store, open_store
from tests.programs import postgres


@pytest.fixture(scope="session")
def sqlite_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with all tables."""
    path = tmp_path_factory.mktemp("tables") / "store.db"
    with open_store(f"sqlite:///{path}"):
        return path


@pytest.fixture(scope="session")
def postgres_tables(postgres_server: str) -> Iterator[str]:
    """Name of a database with all tables."""
    with postgres.database(postgres_server) as url:
        with open_store(url):
            pass
        yield str(parse(url).database)


on_both_databases = pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
"""Also `make test` runs the test on PostgreSQL: it is about SQL, locks or several processes."""


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database with all tables for tests that use `store`; without any, as for a new user, for the others."""
    has_tables = "store" in request.fixturenames
    if request.param == "sqlite":
        path = tmp_path / "store.db"
        if has_tables:
            shutil.copy(request.getfixturevalue("sqlite_tables"), path)
        yield f"sqlite:///{path}"
        return
    template = request.getfixturevalue("postgres_tables") if has_tables else "template1"
    with postgres.database(request.getfixturevalue("postgres_server"), template) as url:
        yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """Another program on the same database."""
    engine = create_engine(parse(database_url))
    yield engine
    engine.dispose()


@pytest.fixture
def store(database_url: str) -> Iterator[Store]:
    with open_store(database_url) as store:
        yield store
