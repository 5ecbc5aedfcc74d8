"""Servers of PostgreSQL that refuse connections or writes: each message has the remedy for that."""

import os
from contextlib import ExitStack

import psycopg
import pytest

from storage.errors import DatabaseUnavailable
from storage.store import open_store
from tests.programs import postgres
from tests.values.storage import WORKLOAD


@pytest.mark.skipif("AUTOTUNE_TEST_POSTGRES_URL" in os.environ, reason="the server is not of this test alone")
def test_a_server_with_as_many_connections_as_it_allows_is_to_be_freed() -> None:
    with postgres.server() as url, ExitStack() as others:
        with pytest.raises(psycopg.OperationalError):  # noqa: PT012 (which one fails depends on the server)
            while True:
                others.enter_context(psycopg.connect(url))
        with pytest.raises(DatabaseUnavailable, match="too many clients already") as refused:
            open_store(url)
    assert str(refused.value).endswith(
        "wait, end other programs that use it, or have more connections allowed (max_connections)"
    )


@pytest.mark.parametrize("has_tables", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_database_that_is_read_only_is_to_be_made_writable(postgres_server: str, has_tables: bool) -> None:
    with postgres.database(postgres_server) as url:
        if has_tables:
            open_store(url).close()
        with psycopg.connect(url, autocommit=True) as server:
            server.execute(f"ALTER DATABASE {server.info.dbname} SET default_transaction_read_only = on")
        with pytest.raises(DatabaseUnavailable, match="read-only transaction") as refused, open_store(url) as store:
            store.add_workload(WORKLOAD)
    assert str(refused.value).endswith(
        "name its primary server where this is a standby, else have default_transaction_read_only switched off"
    )
