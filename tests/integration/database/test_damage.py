"""Damaged files and full disks: one clear message, and no acknowledged result is lost or overwritten."""

import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import optuna
import psutil
import pytest
from click.testing import CliRunner

from autotune.cli import main
from storage.errors import DatabaseDamaged, DatabaseUnavailable, StorageError
from storage.store import open_store
from storage.upkeep.repair import repair
from tests.programs.damage import DAMAGES, PAGE, damaged, filled, mishandled, on_a_small_disk
from tests.values.storage import WORKLOAD


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with 200 trials: only copy it."""
    path = tmp_path_factory.mktemp("large") / "store.db"
    filled(path, trials=200).close()
    return path


@pytest.mark.parametrize("seed", [1, pytest.param(7, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_reported_and_never_overwritten(tmp_path: Path, kind: str, seed: int) -> None:
    assert mishandled(damaged(tmp_path, kind, random.Random(seed))) == []


def test_a_database_of_which_only_the_log_is_left_is_not_created_again(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.with_name("store.db-wal").write_bytes(b"results")
    with pytest.raises(DatabaseDamaged, match=r"put the file back"):
        open_store(f"sqlite:///{path}")
    assert not path.exists()


def test_a_repair_saves_what_other_pages_hold(large: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(large, tmp_path / "store.db"))
    with open_store(f"sqlite:///{path}") as store:
        before = {trial.id: trial for trial in store.answers(WORKLOAD.fingerprint)}
    with closing(sqlite3.connect(path)) as file:
        (page,) = file.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'autotune_stage_measurement'"
        ).fetchone()
        (size,) = file.execute("PRAGMA page_size").fetchone()
    with path.open("r+b") as raw:  # the ranks' measurements follow from the outcomes
        raw.seek((page - 1) * size)
        raw.write(os.urandom(size))
    code = CliRunner().invoke(main, ["db", "check", "--db", f"sqlite:///{path}"]).exit_code
    assert code in (1, 4)
    answer = CliRunner().invoke(main, ["db", "repair", "--db", f"sqlite:///{path}"])
    assert answer.exit_code == 0, answer.output
    assert "Copy from before the repair" in answer.output
    with open_store(f"sqlite:///{path}") as store:
        assert {trial.id: trial for trial in store.answers(WORKLOAD.fingerprint)} == before
        assert store.problems() == ()
        assert len(store.best_plans()) == 1


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_repair_keeps_tables_of_other_programs_and_names_those_it_cannot_read(tmp_path: Path, is_lost: bool) -> None:
    path = tmp_path / "store.db"
    filled(path, trials=1).close()
    url = f"sqlite:///{path}"
    optuna.create_study(storage=url, study_name="other").optimize(lambda trial: trial.suggest_float("x", 0, 1), 2)
    with closing(sqlite3.connect(path)) as file:
        file.executescript(
            'CREATE TABLE "my notes" (text UNIQUE, size AS (length(text)));'
            "INSERT INTO \"my notes\" VALUES ('milk'), (x'ff');"
            'CREATE VIEW shown AS SELECT * FROM "my notes"; CREATE VIRTUAL TABLE words USING fts5(word);'
        )
        file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page,) = file.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trial_params'").fetchone()
    if is_lost:
        lose_page(path, page - 1)
    answer = CliRunner().invoke(main, ["db", "repair", "--db", url])
    assert answer.exit_code == 0, answer.output
    with closing(sqlite3.connect(path)) as file:
        assert file.execute("SELECT * FROM shown").fetchall() == [("milk", 4), (b"\xff", 1)]
        assert file.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    named = answer.output.partition("Left out of other programs: ")[2]
    assert "words, words_config" in named
    assert [name in named for name in ("studies", "trials", "trial_params")] == [is_lost] * 3
    assert optuna.get_all_study_names(url) == ([] if is_lost else ["other"])
    assert is_lost or len(optuna.load_study(storage=url, study_name="other").trials) == 2


def test_nothing_that_can_be_read_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    path.write_text("remember the milk\n" * 1000)
    before = path.read_bytes()
    with pytest.raises(StorageError):
        repair(f"sqlite:///{path}")
    assert path.read_bytes() == before


@pytest.mark.long
def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    try:
        assert on_a_small_disk(tmp_path, rounds=12) == []
    except PermissionError as error:
        pytest.skip(f"no disk can be mounted here: {error}")


def test_an_emptied_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    filled(path, trials=1).close()
    path.write_bytes(b"")
    open_store(f"sqlite:///{path}").close()
    assert "was empty and is set up again" in caplog.text


def mounted(monkeypatch: pytest.MonkeyPatch, *kinds: tuple[Path, str]) -> None:
    mounts = [SimpleNamespace(mountpoint=str(place), fstype=kind) for place, kind in kinds]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **_: mounts)


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "fuse.glusterfs"])
def test_a_file_on_a_network_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    mounted(monkeypatch, (Path("/"), "ext4"), (tmp_path, "autofs"), (tmp_path, kind))
    with pytest.raises(DatabaseUnavailable, match=rf"network file system \({kind}\).*PostgreSQL"):
        open_store(f"sqlite:///{tmp_path / 'new' / 'store.db'}")
    assert not (tmp_path / "new").exists()


def test_local_file_systems_are_not_network_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted(monkeypatch, (Path("/"), "nfs"), (tmp_path, "fuse.ext2"))
    open_store(f"sqlite:///{tmp_path / 'store.db'}").close()


def pages_with(path: Path, text: bytes) -> list[int]:
    """Numbers, from 0, of the leaves of tables that hold the text (https://sqlite.org/fileformat2.html, 1.6)."""
    content = path.read_bytes()
    pages = (content[start : start + PAGE] for start in range(0, len(content), PAGE))
    return [number for number, page in enumerate(pages) if page[:1] == b"\x0d" and text in page]


def lose_page(path: Path, number: int) -> None:
    with path.open("r+b") as raw:
        raw.seek(number * PAGE)
        raw.write(os.urandom(PAGE))


def test_agents_that_are_lost_take_no_measurement_with_them(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    with filled(path, trials=20) as store:
        before = store.answers(WORKLOAD.fingerprint)
    (page,) = pages_with(path, b"a host")
    lose_page(path, page)
    done = repair(f"sqlite:///{path}")
    assert not any(done.dropped.values())
    with open_store(f"sqlite:///{path}") as store:
        assert store.answers(WORKLOAD.fingerprint) == before
        assert len(store.best_plans()) == 1
        assert store.problems() == ()


@pytest.mark.parametrize(
    "which", [pytest.param(0, marks=pytest.mark.long), 0.5, pytest.param(1, marks=pytest.mark.long)]
)
def test_rows_before_and_behind_a_lost_page_are_saved(large: Path, tmp_path: Path, which: float) -> None:
    path = Path(shutil.copy(large, tmp_path / "store.db"))
    with open_store(f"sqlite:///{path}") as store:
        outcomes = {trial.id for trial in store.answers(WORKLOAD.fingerprint)}
    leaves = pages_with(path, b'{"measurement":')
    lost = leaves[round(which * (len(leaves) - 1))]
    content = path.read_bytes()[lost * PAGE :][:PAGE]
    there = {trial for trial in outcomes if trial.encode() in content}
    assert there
    lose_page(path, lost)
    repair(f"sqlite:///{path}")
    with open_store(f"sqlite:///{path}") as store:
        assert {trial.id for trial in store.answers(WORKLOAD.fingerprint)} == outcomes - there
        assert store.problems() == ()
