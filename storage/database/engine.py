"""Connections to SQLite and PostgreSQL, and the transaction in which every query runs."""

import errno
import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import Connection, Engine, create_engine, event, exc
from sqlalchemy.engine import URL
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError, ProgrammingError, StatementError
from sqlalchemy.pool import ConnectionPoolEntry

from storage.database.url import masked, secrets, sqlite_path
from storage.errors import DatabaseDamaged, DatabaseUnavailable, NotStorable, UnknownRecord
from trials.errors import TrialsError

LOCK_TIMEOUT_SECONDS = 120.0
"""Backups and viewers may hold a lock for a minute, and a waiting result has cost minutes of device time."""
_OTHER_TABLES = "its tables are not those of this version: restore it from a backup, or name another database"
_MORE_CONNECTIONS = "wait, end other programs that use it, or have more connections allowed (max_connections)"
_PRIMARY = "name its primary server where this is a standby, else have default_transaction_read_only switched off"
_REMEDIES = (
    ("password authentication failed", "check user and password in the URL; write special characters as %XX"),
    ("no password supplied", "write the password into the URL, or into ~/.pgpass"),
    ("no pg_hba.conf entry", "have the server admit this user from this host (pg_hba.conf)"),
    ('role "" does not exist', "check the user in the URL"),
    ('database "" does not exist', "check its name in the URL, or create it"),
    ("connection refused", "check host and port in the URL, and that the server runs"),
    ("resolve host", "check the host in the URL"),
    ("translate host name", "check the host in the URL"),
    ("locked", "another program holds it: close that program, or wait and try again"),
    ("could not be acquired", "another process is creating its tables: wait and try again"),
    ("lock timeout", "another program holds it: close that program, or wait and try again"),
    ("too many c", _MORE_CONNECTIONS),  # clients, or connections for a role or a database
    ("connection slots", _MORE_CONNECTIONS),
    ("read-only transaction", _PRIMARY),
    ("during recovery", _PRIMARY),
    ("full", "free some space and try again"),
    ("disk i/o error", "free some space, look whether the disk is sound, and try again"),
    ("read-only file system", "name another database, on a disk that can be written"),
    ("readonly", "make the file and its folder writable, or name another database"),
    ("unable to open", "make the file and its folder writable, or name another database"),
    ("is a directory", "name a file, also one that is not there yet"),
    ("not a directory", "a part of its path is a file: name another database"),
    ("privilege", "grant the user the right to create tables, or name another database"),
    ("permission denied", "grant the right to write there, or name another database"),
    ("not a database", "move the file away, or name another database"),
    ("no module named", "run `pip install 'psycopg[binary]'`, or name another database"),
    ("no longer compatible", "use the version of Optuna that made them, or name another database"),
    ("can't decode", "run `autotune db repair`, or restore the file from a backup"),
    ("replaced", "try again"),
    ("no such table", _OTHER_TABLES),
    ("no such column", _OTHER_TABLES),
    ('relation "', _OTHER_TABLES),
    ("column ", _OTHER_TABLES),
    ("malformed", "run `autotune db repair`, or restore the file from a backup"),
)
_OTHER_REMEDY = "check that it exists and can be reached, or name another database"
_CONFIGURATION_ERRORS = {None, "42501", "3D000", "3F000", "42P01", "42703", "42P07"}
"""SQLSTATE of a bad URL option, missing privilege, unknown database, schema, table or column, and duplicate table."""
WRITES = "autotune_writes"
"""Execution option of connections whose transactions write."""
_FILE = "file"
UNREADABLE = (TrialsError, ValueError, TypeError, LookupError, AssertionError, AttributeError, ArithmeticError)
"""Errors that reading a damaged row raises."""


class Database:
    """Connections to one database. Thread-safe; a forked child must open its own."""

    def __init__(self, url: URL, lock_timeout_seconds: float) -> None:
        """Prepare connections, and create missing folders of a SQLite file with mode 0700.

        Raise DatabaseUnavailable if the file cannot be written or the driver of PostgreSQL is not installed.
        """
        self.url = url
        self.lock_timeout_seconds = lock_timeout_seconds
        path = sqlite_path(url)
        with self.errors():
            if path is None:
                self.engine = _postgresql(url, lock_timeout_seconds)
            else:
                _check_place(url, path)
                self.engine = _sqlite(url, path, lock_timeout_seconds)
        self._writing = self.engine.execution_options(**{WRITES: True})
        is_server = path is None  # in SQLite every transaction is a snapshot
        self._snapshots = self.engine.execution_options(isolation_level="REPEATABLE READ") if is_server else self.engine

    @contextmanager
    def transaction(self, *, write: bool = False, snapshot: bool = False) -> Iterator[Connection]:
        """Run one transaction, committed at the end and rolled back by an exception.

        With `write`, take the write lock of SQLite at once: taken later, it fails instead of waiting if another
        process has written in between. With `snapshot`, all reads see the same state. Raise DatabaseUnavailable,
        DatabaseDamaged for an unreadable row, and NotStorable for a number that no column can hold.
        """
        engine = self._writing if write else self._snapshots if snapshot else self.engine
        with self.errors(), self._damage(), engine.begin() as connection:
            yield connection

    @contextmanager
    def _damage(self) -> Iterator[None]:
        """Turn errors of damaged rows into DatabaseDamaged, and those of values into NotStorable."""
        try:
            yield
        except StatementError as error:
            if not isinstance(error.orig, ValueError):  # a type of column refused it
                raise
            raise NotStorable(f"nothing was stored: {error.orig}; give a finite number of 64 bits") from None
        except UnicodeEncodeError as error:
            raise UnknownRecord(f"nothing is stored under {error.object!r}, which is no text") from None
        except UNREADABLE as error:
            raise DatabaseDamaged(
                f"{masked(self.url)} holds a row that cannot be read ({type(error).__name__}: {error}); run "
                "`autotune db check`, then `autotune db repair`"
            ) from error

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors that a user can fix into DatabaseUnavailable; programming errors pass."""
        try:
            yield
        except (DBAPIError, exc.TimeoutError, sqlite3.Error, UnicodeDecodeError, OSError, ImportError) as error:
            if _is_programming_error(error):
                raise
            what = f"the database {masked(self.url)}"
            raise DatabaseUnavailable(explain(what, error, secrets(self.url))) from None  # its cause shows the secrets

    def create_file(self) -> bool:
        """Create the SQLite file, with mode 0600, unless it exists, and return whether it was created."""
        path = sqlite_path(self.url)
        if path is None or path.exists():
            return False
        with self.errors():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        return True

    def close(self) -> None:
        self.engine.dispose()


def _sqlite(url: URL, path: Path, lock_timeout_seconds: float) -> Engine:
    engine = create_engine(url, connect_args={"timeout": lock_timeout_seconds})

    @event.listens_for(engine, "do_connect")
    def check(*_: object) -> None:
        _identity(path)  # a file that is gone is not begun anew here

    @event.listens_for(engine, "connect")
    def connect(connection: sqlite3.Connection, record: ConnectionPoolEntry) -> None:
        record.info[_FILE] = _identity(path)
        connection.isolation_level = None  # transactions are begun below, not by the sqlite3 module
        connection.execute("PRAGMA foreign_keys = ON")  # off by default, for each connection anew
        connection.create_function("lower", 1, _lower, deterministic=True)  # SQLite's own one folds ASCII alone
        connection.execute("PRAGMA synchronous = FULL")  # a result is worth minutes of devices, an fsync milliseconds

    @event.listens_for(engine, "checkout")
    def checkout(_connection: object, record: ConnectionPoolEntry, _proxy: object) -> None:
        if record.info.get(_FILE) != _identity(path):  # a repair has put another in its place
            raise exc.DisconnectionError

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(WRITES, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
        if connection.info.get(_FILE) != _identity(path):  # while it waited for the lock
            raise OSError(errno.ESTALE, "it was replaced meanwhile", str(path))

    return engine


def _lower(text: str | None) -> str | None:
    return None if text is None else text.lower()


def _identity(path: Path) -> tuple[int, int]:
    """Return device and inode of the file. Raise OSError if there is none."""
    found = path.stat()
    return found.st_dev, found.st_ino


def _postgresql(url: URL, lock_timeout_seconds: float) -> Engine:
    engine = create_engine(url, pool_pre_ping=True)  # a restarted server leaves dead connections in the pool

    @event.listens_for(engine, "connect")
    def connect(connection: Any, _record: object) -> None:
        connection.execute(f"SET lock_timeout = {round(lock_timeout_seconds * 1000)}")
        connection.commit()  # a rollback would undo the SET

    return engine


def lock_path(path: Path) -> Path:
    """Return the lock file for the creation of the tables of a SQLite file."""
    return path.with_name(f"{path.name}.lock")


def _check_place(url: URL, path: Path) -> None:
    """Raise OSError if the file cannot be written, and DatabaseUnavailable on a network file system."""
    if kind := shared_filesystem(path):
        raise DatabaseUnavailable(
            f"{masked(url)} lies on a network file system ({kind}), where SQLite cannot keep processes apart; name a "
            "file on a local disk, or a PostgreSQL database"
        )
    for folder in reversed([path.parent, *path.parent.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
    if path.exists():  # not opened: closing it would drop the locks of this process's other connections to it
        code = errno.EISDIR if path.is_dir() else 0 if os.access(path, os.R_OK | os.W_OK) else errno.EACCES
        if code:
            raise OSError(code, os.strerror(code), str(path))
        return
    if not is_absent(path):
        raise DatabaseDamaged(
            f"{masked(url)} is gone, but its log {path.name}-wal is still there; put the file back, or move the "
            "log away"
        )
    os.close(os.open(lock_path(path), os.O_RDWR | os.O_CREAT, 0o600))  # fails at once where the file itself would


def is_absent(path: Path) -> bool:
    """Return whether there is neither a SQLite file nor a log with rows that it left; also for what is no path."""
    log = f"{path}-wal"
    return not (os.path.exists(path) or (os.path.exists(log) and os.path.getsize(log)))  # noqa: PTH110, PTH202


def _is_programming_error(error: Exception) -> bool:
    if not isinstance(error, IntegrityError | ProgrammingError | DataError):
        return False
    return getattr(error.orig, "sqlstate", "none: SQLite") not in _CONFIGURATION_ERRORS


_SHORT_SECRET = 3


def explain(what: str, error: BaseException, hidden: tuple[str, ...] = ()) -> str:
    """Return the message for an error, with a remedy, without the failed statement and the `hidden` texts."""
    reason = " ".join(str(error.orig if isinstance(error, DBAPIError) else error).split())
    for secret in hidden:
        # A short one is a part of many words, which would be hidden with it.
        whole = re.escape(secret) if len(secret) > _SHORT_SECRET else rf"(?<!\w){re.escape(secret)}(?!\w)"
        reason = re.sub(whole, "***", reason)
    # Names of files, servers and databases may hold any of the signs.
    words = (isinstance(error, OSError) and error.strerror) or re.sub('"[^"]*"', '""', reason)
    remedy = next((remedy for sign, remedy in _REMEDIES if sign in words.lower()), _OTHER_REMEDY)
    return f"cannot use {what}: {reason}; {remedy}"


_SHARED = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "ocfs2", "gfs2", "pvfs2"}
_SHARED_FUSE = ("sshfs", "glusterfs", "s3fs", "gcsfuse", "juicefs", "goofys", "rclone", "ceph", "lustre", "beegfs")


def shared_filesystem(path: Path) -> str | None:
    """Return the type of the network file system of the path, which need not exist yet; None for a local one."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()).resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if existing.is_relative_to(mount.mountpoint)]
    # Of several at one place, such as an automount and what it mounted, the last one is seen.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype.lower() if mounts else ""
    is_shared = kind in _SHARED or (kind.startswith("fuse.") and kind.removeprefix("fuse.").startswith(_SHARED_FUSE))
    return kind if is_shared else None
