"""The databases that tests run on: SQLite files, and a real PostgreSQL."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import postgres


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a database from which others can be created."""
    with postgres.server() as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a database that does not exist yet (SQLite) or is empty (PostgreSQL)."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    with postgres.database(request.getfixturevalue("postgres_server")) as url:
        yield url
