"""Stores of what is known already, which create no database."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from storage.database import url
from storage.database.engine import LOCK_TIMEOUT_SECONDS, Database, is_absent
from storage.errors import DatabaseUnavailable
from storage.store import Store, open_store
from storage.upkeep import schema


@contextmanager
def read_store(database_url: str | None = None) -> Iterator["Store"]:
    """Open a store for what is known already: no database is created, and older tables are upgraded.

    The user's own file is read as an empty database until it is there. Raise what `open_store` raises, and
    DatabaseUnavailable where a named database does not exist or has no tables of autotune.
    """
    parsed = url.parse(url.default_url() if database_url is None else database_url)
    path = url.sqlite_path(parsed)
    absent = path is not None and is_absent(path)
    if absent and database_url is not None:
        raise DatabaseUnavailable(
            f"the database {url.masked(parsed)} does not exist; check --db, AUTOTUNE_DB_URL or `database` of the job, "
            "or run `autotune tune JOB`, which creates it"
        )
    if absent:
        with TemporaryDirectory() as folder, open_store(url.of_file(Path(folder) / "autotune.db")) as store:
            yield store
        return
    with closing(Database(parsed, LOCK_TIMEOUT_SECONDS)) as database:
        schema.check_known(database)
    with open_store(database_url) as store:
        yield store
