"""A database file that others use, replace, link to or lock while it is opened and repaired."""

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from threading import Thread

import pytest
from sqlalchemy import text

from storage.database.url import of_file, parse, sqlite_path
from storage.errors import BadUrl, DatabaseUnavailable
from storage.store import Store, open_store
from storage.upkeep import repair as repairing
from storage.upkeep.repair import Repaired, repair
from tests.programs.damage import filled
from tests.values.storage import WORKLOAD, packed_plan, result_of


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store.db"
    filled(path, trials=3).close()
    return path


def record(store: Store, qv: int) -> None:
    """Store one more result, in a new study."""
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
    store.finish_trial(result_of(store.start_trial(study.id, packed_plan(qv), "sampled").id))


def results(path: Path) -> int:
    with open_store(of_file(path)) as store:
        return len(store.answers(WORKLOAD.fingerprint))


def test_what_is_written_after_a_repair_goes_into_the_new_file(path: Path) -> None:
    with open_store(of_file(path)) as store:
        record(store, 50)
        repair(of_file(path))
        record(store, 51)
    assert results(path) == 5


def test_what_is_written_during_a_repair_ends_it_and_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rebuild = repairing._rebuild

    def slowly(*arguments: object) -> object:
        found = rebuild(*arguments)  # type: ignore[arg-type]
        with open_store(of_file(path)) as store:
            record(store, 50)
        return found

    monkeypatch.setattr(repairing, "_rebuild", slowly)
    with pytest.raises(DatabaseUnavailable, match="was written to during the repair and was left unchanged"):
        repair(of_file(path))
    assert results(path) == 4
    assert {file.name for file in path.parent.iterdir()} <= {f"store.db{end}" for end in ("", ".lock", "-wal", "-shm")}


def test_who_waits_for_a_file_that_is_replaced_does_not_write_into_the_old_one(path: Path) -> None:
    messages: list[str] = []
    new = path.with_name("new.db")

    def write(store: Store) -> None:
        try:
            record(store, 50)
        except DatabaseUnavailable as error:
            messages.append(str(error))

    with open_store(of_file(path)) as store, closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        shutil.copy(path, new)
        thread = Thread(target=write, args=(store,))
        thread.start()
        thread.join(0.5)
        new.replace(path)
        holder.execute("COMMIT")
        thread.join()
        assert len(messages) == 1
        assert "it was replaced meanwhile" in messages[0]
        record(store, 51)
        assert len(store.answers(WORKLOAD.fingerprint)) == 4


def test_a_deleted_database_file_is_reported_and_not_created_again(path: Path) -> None:
    with open_store(of_file(path)) as store:
        record(store, 50)
        path.unlink()
        for _ in range(2):
            with pytest.raises(DatabaseUnavailable, match="No such file"):
                record(store, 51)
    assert not path.exists()


def test_a_link_is_repaired_where_it_leads_to_with_what_its_log_holds(tmp_path: Path) -> None:
    path, link = tmp_path / "real" / "store.db", tmp_path / "link.db"
    path.parent.mkdir()
    with filled(path, trials=3):  # its last rows stand in its log
        link.symlink_to(path)
        os.chmod(path, 0o660)  # noqa: PTH101  # as a group shares it
        done = repair(of_file(link))
    assert isinstance(done, Repaired)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o660
    assert results(link) == results(path) == 3


def test_a_link_in_a_circle_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.db").symlink_to(tmp_path / "b.db")
    (tmp_path / "b.db").symlink_to(tmp_path / "a.db")
    with pytest.raises((BadUrl, DatabaseUnavailable), match=r"a\.db"):
        open_store(f"sqlite:///{tmp_path / 'a.db'}")


@pytest.mark.parametrize("name", ["per%20cent.db", "what?.db", "a b&c#d.db", "ü'\".db"])
def test_a_file_of_any_name_is_named_by_its_url_and_repaired(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert sqlite_path(parse(of_file(path))) == path
    with open_store(of_file(path)) as store:
        record(store, 1)
    repair(of_file(path))
    assert results(path) == 1


@pytest.fixture
def rollback(path: Path) -> Path:
    """A database in rollback mode, whose locks are on the file instead of the log."""
    with closing(sqlite3.connect(path)) as file:
        file.execute("PRAGMA journal_mode = DELETE")
    return path


def test_opening_a_file_again_drops_no_lock_of_the_process(rollback: Path) -> None:
    other = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0, isolation_level=None).execute('BEGIN IMMEDIATE')"
    with open_store(of_file(rollback)) as store, store._database.transaction(write=True) as connection:
        connection.execute(text("SELECT 1"))
        with pytest.raises(DatabaseUnavailable):
            open_store(f"sqlite:///{rollback}/store.db")
        open_store(of_file(rollback)).close()
        done = subprocess.run([sys.executable, "-c", other, rollback], capture_output=True, text=True, check=False)
    assert "database is locked" in done.stderr
