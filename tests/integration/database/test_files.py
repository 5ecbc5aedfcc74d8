"""The SQLite file: its modes and settings, and what a user reads when it cannot be used."""

import errno
import re
import sqlite3
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import filelock
import pytest
from sqlalchemy import text

from storage.database.engine import Database, explain
from storage.database.url import parse
from storage.errors import DatabaseUnavailable, OtherVersion, StorageError
from storage.store import open_store
from tests.programs import unprivileged
from tests.values.parameters import parameters
from tests.values.storage import WORKLOAD

CANARY = "c4nary"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@contextmanager
def foreign_lock(path: Path) -> Iterator[None]:
    """Hold a lock like another program, such as a backup, that blocks all writes."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_a_new_file_and_its_new_folders_are_the_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "deep" / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        store.add_workload(WORKLOAD)
        assert {mode(file) for file in path.parent.iterdir()} == {0o600}
    assert mode(path.parent) == mode(path.parent.parent) == 0o700


def test_modes_that_the_user_chose_are_kept(tmp_path: Path) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / "store.db"
    shared.mkdir()
    path.touch()
    shared.chmod(0o770)
    path.chmod(0o660)
    open_store(f"sqlite:///{path}").close()
    assert (mode(shared), mode(path)) == (0o770, 0o660)


def test_commits_are_durable_and_readers_do_not_block(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    database = Database(parse(f"sqlite:///{path}"), 60.0)
    with database.transaction() as connection:
        settings = {
            name: connection.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    database.close()
    assert settings == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 60_000, "foreign_keys": 1}


def test_an_error_rolls_the_whole_transaction_back(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    database = Database(parse(f"sqlite:///{path}"), 60.0)

    def fail_halfway() -> None:
        with database.transaction(write=True) as connection:
            connection.execute(text("DELETE FROM autotune_alembic_version"))
            raise FileExistsError

    with pytest.raises(DatabaseUnavailable):
        fail_halfway()
    with database.transaction() as connection:
        assert connection.scalar(text("SELECT count(*) FROM autotune_alembic_version")) == 1
    database.close()


def test_a_database_of_a_newer_version_keeps_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    open_store(f"sqlite:///{path}").close()
    with closing(sqlite3.connect(path)) as newer, newer:
        newer.execute("PRAGMA journal_mode = DELETE")
        newer.execute("UPDATE autotune_alembic_version SET version_num = '9999'")
    before = contents(tmp_path)
    with pytest.raises(OtherVersion, match=str(path)):
        open_store(f"sqlite:///{path}")
    assert contents(tmp_path) == before


def test_a_path_below_a_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "store.db"
    with pytest.raises(DatabaseUnavailable, match=rf"{path}.*name another database"):
        open_store(f"sqlite:///{path}")


def test_a_folder_that_cannot_be_written_is_named_with_the_remedy() -> None:
    with pytest.raises(DatabaseUnavailable, match=r"/proc/autotune/store\.db.*name another database"):
        open_store("sqlite:////proc/autotune/store.db")


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/full/a.db"), "grant the right to write there"),
        (OSError(errno.EROFS, "Read-only file system", "/data/full/a.db"), "name another database"),
        (OSError('connection to server at "full.example" failed: timeout expired'), "check that it exists and can be"),
        (OSError('could not write to file "pg_wal": No space left: disk full'), "free some space"),
        (OSError('FATAL: too many connections for role "readonly"'), "wait, end other programs that use it"),
        (OSError("remaining connection slots are reserved for roles with the SUPERUSER attribute"), "wait, end other"),
        (OSError("cannot execute LOCK TABLE during recovery"), "name its primary server"),
    ],
)
def test_a_remedy_follows_from_the_error_and_not_from_a_name(error: OSError, remedy: str) -> None:
    assert f"; {remedy}" in explain("it", error)


@pytest.mark.parametrize(
    "arguments",
    parameters({each: each for each in ("plans", "studies", "doctor", "db check")}, short=("doctor",)),
)
def test_a_new_user_who_may_not_write_in_the_data_folder_reads_that_nothing_is_known(
    tmp_path: Path, arguments: str
) -> None:
    tmp_path.chmod(0o555)
    answer = unprivileged.autotune(*arguments.split(), HOME=tmp_path, XDG_DATA_HOME=tmp_path, AUTOTUNE_DB_URL="")
    assert answer.returncode == 0, answer
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("arguments", "has_database"),
    [
        *(pytest.param(each, True, marks=pytest.mark.long) for each in ("studies", "doctor", "db check")),
        *(pytest.param(each, True, marks=pytest.mark.long) for each in ("plans", "db upgrade")),
        ("note x y", True),
        ("db upgrade", False),
    ],
)
def test_a_user_who_may_not_write_in_the_data_folder_is_told_so(
    tmp_path: Path, arguments: str, has_database: bool
) -> None:
    folder = tmp_path / "data"
    if has_database:
        open_store(f"sqlite:///{folder}/autotune/autotune.db").close()
    folder.mkdir(exist_ok=True)
    places = [folder, *folder.rglob("*")]
    for place in places:
        place.chmod(0o444 if place.is_file() else 0o555)
    answer = unprivileged.autotune(*arguments.split(), HOME=folder, XDG_DATA_HOME=folder, AUTOTUNE_DB_URL="")
    assert answer.returncode == 4, answer
    (message,) = re.findall("^Error: (.*)$", answer.stderr, flags=re.MULTILINE)
    assert f"{folder}/autotune" in message
    assert message.endswith("grant the right to write there, or name another database")
    assert "Traceback" not in answer.stderr
    assert [folder, *folder.rglob("*")] == places


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n" * 100)
    before = contents(tmp_path)
    with pytest.raises(DatabaseUnavailable, match=rf"{path}.*move the file away"):
        open_store(f"sqlite:///{path}")
    assert contents(tmp_path) == before


def test_a_lock_of_another_program_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with open_store(f"sqlite:///{path}") as store:
        writer = threading.Thread(target=store.add_workload, args=(WORKLOAD,))
        with foreign_lock(path):
            writer.start()
            time.sleep(1.0)
            assert writer.is_alive()
        writer.join(timeout=30)
        assert store.workload(WORKLOAD.fingerprint) == WORKLOAD


def test_a_lock_that_lasts_is_reported_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    reported = pytest.raises(DatabaseUnavailable, match=rf"{path}.*locked; another program holds it")
    with open_store(f"sqlite:///{path}", lock_timeout_seconds=0.1) as store, foreign_lock(path), reported:
        store.add_workload(WORKLOAD)


def test_a_creation_that_never_ends_is_reported_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with filelock.FileLock(f"{path}.lock"), pytest.raises(DatabaseUnavailable, match="creating its tables"):
        open_store(f"sqlite:///{path}", lock_timeout_seconds=0.1)


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://me:{CANARY}@127.0.0.1:1/results",
        f"postgresql://127.0.0.1:1/results?password={CANARY}",
        f"postgresql://127.0.0.1:1/results?no_such_option=1&sslpassword={CANARY}",
        f"postgresql://me:{CANARY}@127.0.0.1:port/results",
    ],
)
def test_no_error_shows_a_password(url: str) -> None:
    with pytest.raises(StorageError, match="database") as failed:
        open_store(url)
    assert CANARY not in "".join(traceback.format_exception(failed.value))
    assert CANARY not in str(failed.value)


def test_a_password_in_the_words_of_the_driver_is_hidden() -> None:
    database = Database(parse(f"postgresql://me:{CANARY}@127.0.0.1:1/results?sslpassword=second{CANARY}"), 60.0)

    def fail() -> None:
        with database.errors():
            raise OSError(f"cannot use {CANARY} and second{CANARY}")

    with pytest.raises(DatabaseUnavailable, match=r"cannot use \*\*\*") as failed:
        fail()
    assert CANARY not in "".join(traceback.format_exception(failed.value))
    assert CANARY not in str(failed.value)


def test_a_missing_driver_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class NotInstalled:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "psycopg":
                raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.delitem(sys.modules, "psycopg", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NotInstalled, *sys.meta_path])
    with pytest.raises(DatabaseUnavailable, match=r"pip install 'psycopg\[binary\]'"):
        open_store("postgresql://host/results")


def test_a_server_that_cannot_be_reached_is_named_with_the_remedy() -> None:
    with pytest.raises(
        DatabaseUnavailable,
        match=r"me:\*\*\*@127\.0\.0\.1:1/results.*check host and port in the URL, and that the server runs",
    ):
        open_store(f"postgresql://me:{CANARY}@127.0.0.1:1/results")
