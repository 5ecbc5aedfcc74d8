"""Creates and upgrades the tables, one process at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

import filelock
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import text
from sqlalchemy.orm import Session

from storage.engine import Database
from storage.errors import DatabaseTooNew
from storage.url import masked, sqlite_path

VERSION_TABLE = "autotune_alembic_version"  # Optuna keeps its own in `alembic_version` of the same database
_ADVISORY_LOCK = 0x6175746F74756E65  # "autotune"


def prepare(database: Database) -> None:
    """Brings the tables to this version; any number of processes may do so at once.

    Raises DatabaseTooNew, before anything is written, when a newer version made the tables; DatabaseUnavailable.
    """
    if _is_current(database):
        return
    with lock(database):
        if _is_current(database):
            return
        if sqlite_path(database.url) is not None:
            _use_write_ahead_log(database)
        with database.session(write=True) as session:
            command.upgrade(_config(session), "head")


@contextmanager
def lock(database: Database) -> Iterator[None]:
    """Keeps other processes from creating tables in the same database. Raises DatabaseUnavailable."""
    path = sqlite_path(database.url)
    if path is None:
        with database.session() as session:  # the lock goes with the transaction, and so with a killed process
            session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            yield
        return
    file = filelock.FileLock(f"{path}.lock", timeout=database.lock_timeout_seconds, mode=0o600)
    with database.errors():
        file.acquire()
    try:
        yield
    finally:
        file.release()


def _is_current(database: Database) -> bool:
    with database.session() as session:
        context = MigrationContext.configure(session.connection(), opts={"version_table": VERSION_TABLE})
        revision = context.get_current_revision()
        script = ScriptDirectory.from_config(_config(session))
    if revision is not None and revision not in {known.revision for known in script.walk_revisions()}:
        raise DatabaseTooNew(
            f"{masked(database.url)} was made by a newer version (tables {revision}, this version knows "
            f"{script.get_current_head()}); upgrade vlm-autotune, or name another database"
        )
    return revision == script.get_current_head()


def _use_write_ahead_log(database: Database) -> None:
    # The mode stays in the file, so it is set once: a newer database must not be touched, a converted one respected.
    with database.errors(), database.engine.connect() as connection:
        connection.connection.cursor().execute("PRAGMA journal_mode = WAL")


def _config(session: Session) -> Config:
    config = Config()
    config.set_main_option("script_location", "storage:migrations")
    config.attributes.update(connection=session.connection(), version_table=VERSION_TABLE)
    return config
