"""Results that wait in the spool are never lost."""

import errno
import logging
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from autotune.training.window_writer import WindowWriter
from storage.errors import DatabaseUnavailable, SpoolUnavailable
from storage.records import FinishedTrial
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.processes import wait_for
from tests.values.storage import (
    OUTCOMES,
    WORKLOAD,
    completed,
    packed_plan,
    result_of,
    slow_window,
    window_of,
)
from trials.errors import WireError

ROOT = Path(__file__).parents[3]
PUT_THEN_COMMIT = """
import sys
from pathlib import Path
from storage.spool import Spool
from storage.store import open_store
from tests.values.storage import result_of

url, directory, trial = sys.argv[1:]
with open_store(url) as store:
    spool = Spool(Path(directory))
    spool.put(result_of(trial))
    print("put", flush=True)
    spool.replay(store)
    print("committed", flush=True)
"""


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'store.db'}"


def started(store: Store) -> str:
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
    return store.start_trial(study.id, packed_plan(), "search").id


@pytest.mark.parametrize("name", OUTCOMES)
def test_a_result_goes_through_the_spool_unchanged(url: str, tmp_path: Path, name: str) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store:
        result = result_of(started(store), OUTCOMES[name])
        spool.put(result)
        assert len(spool.pending()) == 1
        assert spool.replay(store) == 1
        (answer,) = store.answers(WORKLOAD.fingerprint)
        assert answer.result == result
        assert spool.replay(store) == 0
    assert list((tmp_path / "spool").iterdir()) == []


def test_the_speed_of_a_training_goes_through_the_spool_unchanged(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store:
        launch = store.start_launch(packed_plan(), store.add_workload(WORKLOAD), 8.0)
        windows = (window_of(launch.id), slow_window(launch.id, 12))
        for window in windows:
            spool.put(window)
        spool.put(replace(windows[0], launch_id="0" * 32))
        assert spool.replay(store) == 2
        assert [found.windows for found in store.launches(packed_plan().id)] == [windows]
    assert len(spool.pending()) == 1, "the launch of another database stays"


def test_a_training_goes_on_while_the_database_is_away_and_its_speed_is_stored_later(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url, lock_timeout_seconds=0.1) as store:
        launch = store.start_launch(packed_plan(), store.add_workload(WORKLOAD), 8.0)
        with WindowWriter(spool, store) as writer:
            with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                for first in (2, 12):
                    writer.add(window_of(launch.id, first))
                wait_for(lambda: "the speed of the training is not stored yet" in caplog.text)
                assert len(spool.pending()) == 2
            writer.add(window_of(launch.id, 22))
        assert [window.first_step for window in store.launches(packed_plan().id)[0].windows] == [2, 12, 22]
    assert spool.pending() == ()


def test_the_spool_is_the_users_alone(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    spool.put(result_of("0" * 32))
    (path,) = spool.pending()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_result_that_is_stored_already_only_leaves_the_spool(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store:
        result = result_of(started(store))
        spool.put(result)
        store.finish_trial(result)
        assert spool.replay(store) == 1
        assert len(store.answers(WORKLOAD.fingerprint)) == 1
    assert spool.pending() == ()


def test_kill_9_between_put_and_commit_loses_nothing(url: str, tmp_path: Path) -> None:
    with open_store(url) as store:
        trial = started(store)
    command = [sys.executable, "-c", PUT_THEN_COMMIT, url, str(tmp_path / "spool"), trial]
    with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")  # the child can put, but it waits here before it can commit
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "put\n"
            child.kill()
            assert child.stdout.read() == ""
        assert child.returncode == -signal.SIGKILL
        other.execute("ROLLBACK")
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store:
        assert store.answers(WORKLOAD.fingerprint) == ()
        assert spool.replay(store) == 1
        (answer,) = store.answers(WORKLOAD.fingerprint)
        assert isinstance(answer, FinishedTrial)
        assert answer.result == result_of(trial)


def test_a_result_is_put_while_the_database_is_locked_for_long(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url, lock_timeout_seconds=0.5) as store:
        trial = started(store)
        with closing(sqlite3.connect(tmp_path / "store.db", isolation_level=None)) as other:
            other.execute("BEGIN EXCLUSIVE")
            spool.put(result_of(trial))
            for _ in range(3):
                with pytest.raises(DatabaseUnavailable, match="locked"):
                    spool.replay(store)
            assert [path.stem for path in spool.pending()] == [trial]
            other.execute("ROLLBACK")
        assert spool.replay(store) == 1
        assert [answer.id for answer in store.answers(WORKLOAD.fingerprint)] == [trial]


@pytest.mark.parametrize("damage", [b"", b'{"trial_id": "', b"\xff\x00", b'{"trial_id": 3}', b"null"])
def test_a_file_that_cannot_be_read_is_set_aside_and_holds_up_nothing(
    url: str, tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    damaged = tmp_path / "spool" / f"{'0' * 32}.json"
    damaged.write_bytes(damage)
    with open_store(url) as store, caplog.at_level(logging.WARNING):
        spool.put(result_of(started(store)))
        assert spool.replay(store) == 1
    assert damaged.with_suffix(".bad").read_bytes() == damage
    assert str(damaged.with_suffix(".bad")) in caplog.text
    assert spool.pending() == ()


def test_what_is_no_file_that_can_be_read_stays_and_holds_up_nothing(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spool = Spool(tmp_path / "spool")
    pipe, loop, zeros, large = (tmp_path / "spool" / f"{digit * 32}.json" for digit in "0123")
    os.mkfifo(pipe)
    loop.symlink_to(loop.name)
    zeros.symlink_to("/dev/zero")
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with open_store(url) as store, caplog.at_level(logging.WARNING):
        spool.put(result_of(started(store)))
        assert spool.replay(store) == 1
    assert spool.pending() == (pipe, loop, zeros, large)
    assert [line.split(":")[0] for line in caplog.messages] == [f"kept {path}" for path in spool.pending()]


def test_a_result_that_contradicts_the_stored_one_is_set_aside(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store:
        result = result_of(started(store))
        store.finish_trial(result)
        spool.put(replace(result, epoch_seconds=1.0))
        assert spool.replay(store) == 0
        (answer,) = store.answers(WORKLOAD.fingerprint)
        assert answer.result == result
    assert [path.suffix for path in (tmp_path / "spool").iterdir()] == [".bad"]


def test_a_result_of_another_database_waits_for_it(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    spool = Spool(tmp_path / "spool")
    with open_store(url) as store, open_store(f"sqlite:///{tmp_path / 'other.db'}") as other:
        spool.put(result_of(started(store)))
        assert spool.replay(other) == 0
        assert "is it the right database?" in caplog.text
        assert spool.replay(store) == 1


def test_an_unfinished_file_of_a_killed_process_is_ignored(url: str, tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    (tmp_path / "spool" / ".half.partial").write_text('{"trial_id"')
    with open_store(url) as store:
        assert spool.replay(store) == 0
    assert (tmp_path / "spool" / ".half.partial").exists()


def test_a_result_that_could_not_be_read_back_is_refused_at_once(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "spool")
    outcome = completed()
    outcome = replace(outcome, measurement=replace(outcome.measurement, losses=(float("nan"), 1.0)))
    with pytest.raises(WireError, match="losses"):
        spool.put(result_of("0" * 32, outcome))
    assert list((tmp_path / "spool").iterdir()) == []


def test_the_disk_has_the_result_before_its_name_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "spool"
    spool, seen = Spool(directory), []

    def fsync(descriptor: int) -> None:
        seen.append((Path(f"/proc/self/fd/{descriptor}").readlink(), len(spool.pending())))

    monkeypatch.setattr(os, "fsync", fsync)
    spool.put(result_of("0" * 32))
    (file, before), (folder, after) = seen
    assert file.parent == folder == directory
    assert (file.suffix, before, after) == (".partial", 0, 1)


def test_a_full_disk_is_reported_and_leaves_no_half_of_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    spool = Spool(tmp_path / "spool")
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SpoolUnavailable, match="No space left on device; free some space"):
        spool.put(result_of("0" * 32))
    assert list((tmp_path / "spool").iterdir()) == []
