"""Every contract of the store is checked on SQLite and on a real PostgreSQL."""

from collections.abc import Iterator

import pytest
from sqlalchemy import Engine, create_engine

from storage.database.url import parse
from storage.store import Store, open_store


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
