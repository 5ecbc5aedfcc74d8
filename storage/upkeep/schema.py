"""Creation and upgrade of the tables, by one process at a time."""

import logging
import pkgutil
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import Connection, column, inspect, select, table, text

from storage.database.engine import Database, lock_path
from storage.database.url import masked, sqlite_path
from storage.errors import DatabaseUnavailable, OtherVersion
from storage.migrations import versions
from storage.upkeep.backup import back_up

VERSION_TABLE = "autotune_alembic_version"  # Optuna keeps its own in `alembic_version` of the same database
_ADVISORY_LOCK = 0x6175746F74756E65  # "autotune"
_log = logging.getLogger(__name__)


def prepare(database: Database) -> None:
    """Create the tables, or back them up and upgrade them; any number of processes may call this at once.

    Raise DatabaseUnavailable, and OtherVersion, with nothing written, for tables that this version does not know.
    """
    path = sqlite_path(database.url)
    if (path is None or path.exists()) and _is_current(database):
        return
    with lock(database):
        is_new = database.create_file()
        if _is_current(database):
            return
        if path is not None:
            # Once, since the mode stays in the file: a newer database is not touched, a converted one respected.
            with database.errors(), database.engine.connect() as connection:
                connection.connection.cursor().execute("PRAGMA journal_mode = WAL")
        with database.transaction(write=True) as connection:
            old = _revision(connection)
            if old is None and path is not None and not is_new:
                _log.warning("%s was empty and is set up again", masked(database.url))
            if old is not None:
                kept = back_up(connection, old)
                _log.warning("upgrading %s; a backup is kept as %s", masked(database.url), kept)
            upgrade(connection)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Upgrade the tables to a revision. The caller holds the lock."""
    from alembic import command  # noqa: PLC0415 - most commands find current tables, and Alembic takes 0.2 s to import
    from alembic.config import Config  # noqa: PLC0415

    config = Config()
    config.set_main_option("script_location", "storage:migrations")
    config.attributes.update(connection=connection, version_table=VERSION_TABLE)
    command.upgrade(config, revision)


@contextmanager
def lock(database: Database) -> Iterator[None]:
    """Hold the lock of this database against other processes. Raise DatabaseUnavailable."""
    path = sqlite_path(database.url)
    if path is None:
        with _connection(database) as connection:
            with database.errors():
                connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _ADVISORY_LOCK})
            yield
        return
    from filelock import FileLock  # noqa: PLC0415 - look-ups find current tables, and need no lock

    file = FileLock(lock_path(path), timeout=database.lock_timeout_seconds, mode=0o600)
    with database.errors():
        file.acquire()
    try:
        yield
    finally:
        file.release()


@contextmanager
def _connection(database: Database) -> Iterator[Connection]:
    """Open a connection without a transaction, which a server might end as idle. Closing it releases its locks."""
    with database.errors():
        connection = database.engine.connect()
    try:
        yield connection.execution_options(isolation_level="AUTOCOMMIT")
    finally:
        connection.invalidate()
        connection.close()


def check_known(database: Database) -> None:
    """Raise OtherVersion for tables that this version does not know, and DatabaseUnavailable without tables."""
    with database.transaction() as connection:
        if _checked_revision(database, connection) is None:
            raise DatabaseUnavailable(
                f"{masked(database.url)} has no tables of autotune; create them by `autotune db upgrade --db URL`, or "
                "name another database"
            )


def revision(database: Database) -> str | None:
    """Return the revision of the tables, or None if there are none."""
    with database.transaction() as connection:
        return _revision(connection)


def _is_current(database: Database) -> bool:
    with database.transaction() as connection:
        return _checked_revision(database, connection) == known_revisions()[-1]


def _checked_revision(database: Database, connection: Connection) -> str | None:
    """Return the revision of the tables, or None if there are none. Raise OtherVersion."""
    found, known = _revision(connection), known_revisions()
    if found is None or found in known:
        return found
    if found < known[0]:
        raise OtherVersion(
            f"{masked(database.url)} was made by a version before 0.1.0 (tables {found}); export its studies with that "
            "version (`autotune db export --study STUDY --out FILE`), move it away or name another database, and "
            "import them with this one (`autotune db import FILE`)"
        )
    raise OtherVersion(
        f"{masked(database.url)} was made by a newer version (tables {found}, this version knows {known[-1]}); "
        "upgrade vlm-autotune, or name another database"
    )


def known_revisions() -> tuple[str, ...]:
    """Return the revisions of this version, oldest first, by the names of their files: importing one needs Alembic."""
    return tuple(sorted(module.name[1:5] for module in pkgutil.iter_modules(versions.__path__)))


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(select(column("version_num")).select_from(table(VERSION_TABLE)))
