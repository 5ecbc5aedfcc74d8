"""Damage to database files. Run as a module, it fills the small disk that it is given."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from click.testing import CliRunner

from autotune.cli import main
from autotune.search.sampling.proposals import database
from storage.errors import StorageError
from storage.records import FinishedTrial
from storage.spool import Spool
from storage.store import Store, open_store
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan, result_of

PAGE = 4096
_LOOKING = ("plans", "plans --here", "studies", "studies tiny", f"show {packed_plan().id}", "doctor", "db check")


def filled(path: Path, trials: int = 40) -> Store:
    """Provide an open database with a finished and a started study; its last rows may be only in the log."""
    store = open_store(f"sqlite:///{path}")
    study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
    for qv in range(trials):
        store.finish_trial(result_of(store.start_trial(study, packed_plan(qv), "sampled", {"qv": qv}).id))
    concluded(store, best_of(study))
    store.start_trial(store.create_study(WORKLOAD.fingerprint, {}, seed=1).id, packed_plan(), "default")
    return store


def _truncated(content: bytes, dice: random.Random) -> bytes:
    return content[: dice.randrange(1, len(content))]


def _flipped(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    start = dice.randrange(0, len(content) // PAGE) * PAGE
    changed[start : start + PAGE] = dice.randbytes(PAGE)
    return bytes(changed)


def _flipped_bits(content: bytes, dice: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(20):
        changed[dice.randrange(len(content))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _wrong_magic(content: bytes, dice: random.Random) -> bytes:
    return dice.randbytes(16) + content[16:]


MISSING_LOG = "missing log"
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "truncated": _truncated,
    "a flipped page": _flipped,
    "flipped bits": _flipped_bits,
    "wrong magic": _wrong_magic,
    MISSING_LOG: lambda content, _: content,
}


def damaged(folder: Path, kind: str, dice: random.Random) -> Path:
    """Write a file with one kind of damage to an empty folder."""
    whole, path = folder / "whole.db", folder / "store.db"
    with filled(whole, trials=dice.randrange(1, 40)) as store:
        if kind != MISSING_LOG:
            store.close()
        shutil.copy(whole, path)
    path.write_bytes(DAMAGES[kind](path.read_bytes(), dice))
    return path


def mishandled(path: Path) -> list[str]:
    """Return what the commands do wrong with a damaged file: a traceback, or a silent overwrite.

    Queries and checks may work, or exit with one message; only a repair may change what stands in the file, and it
    keeps a copy of every byte.
    """
    url, wrong = f"sqlite:///{path}", []
    before, was_empty = path.read_bytes(), _is_empty(path)
    for command in (
        "plans",
        "plans --here",
        "studies",
        "studies tiny",
        f"show {packed_plan().id}",
        "doctor",
        "db check",
    ):
        wrong += _run(command.split(), url)
    if not was_empty and path.read_bytes()[PAGE:] != before[PAGE:]:  # readers of a log write into the header
        wrong.append("the file was changed")
    now = path.read_bytes()
    wrong += _run(["db", "repair"], url)
    copies = [copy for copy in path.parent.glob(f"{path.name}.before-repair-*") if not copy.name.endswith("-wal")]
    if now not in [copy.read_bytes() for copy in (path, *copies)]:
        wrong.append("the repair kept no copy")
    return wrong


def _is_empty(path: Path) -> bool:
    """Return whether SQLite sees a valid file without tables: all rows were in the log that is gone."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as file:
            return bool(file.execute("SELECT count(*) = 0 FROM sqlite_master").fetchone()[0])
    except (sqlite3.Error, UnicodeDecodeError):  # a message may quote what is damaged
        return False


def _run(arguments: list[str], url: str) -> list[str]:
    answer = CliRunner().invoke(main, [*arguments, "--db", url])
    description = f"{' '.join(arguments)}: {answer.output[-300:]}"
    if answer.exception is not None and not isinstance(answer.exception, SystemExit):
        return [f"{description}: {answer.exception!r}"]
    return [] if answer.exit_code in (0, 1, 2, 3, 4, 5) and "Traceback" not in answer.output else [description]


def on_a_small_disk(folder: Path, *, rounds: int) -> list[str]:
    """Return what goes wrong on a disk of 2 MiB that gets full at a different moment in each round.

    It is mounted in a namespace of its own, which needs the rights of root there; raises PermissionError without.
    """
    inner = f'mount -t tmpfs -o size=2m none "$1" && exec "{sys.executable}" -P -m tests.programs.damage "$1" {rounds}'
    command = ["unshare", "--map-root-user", "--user", "--mount", "sh", "-c", inner, "sh", str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=_environment(root), check=False)
    if "Operation not permitted" in done.stderr:
        raise PermissionError(done.stderr)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}


def _fill_up(disk: Path, rounds: int) -> list[str]:
    """Let the disk get full after more bytes in each round: while a database is created, imported into or written."""
    wrong = list[str]()
    bundle = _bundle()
    for number in range(rounds):
        url, spool = f"sqlite:///{disk}/{number}/store.db", disk / f"{number}" / "spool"
        acknowledged = list[str]()
        with _fill_all_but(disk, leave=number * 24 * 1024):
            try:
                _record(url, spool, bundle, acknowledged)
            except StorageError as error:
                if "free some space" not in str(error):
                    wrong.append(f"round {number}: {error}")
            else:
                wrong.append(f"round {number}: the disk was never full")
            wrong += [f"round {number}: {error}" for error in _vacuumed(url)]
        with open_store(url) as store:
            Spool(spool).replay(store)
            kept = {trial.id for trial in store.answers(WORKLOAD.fingerprint) if isinstance(trial, FinishedTrial)}
            wrong += [f"round {number}: lost {trial}" for trial in acknowledged if trial not in kept]
            wrong += [f"round {number}: {problem}" for problem in store.problems()]
        shutil.rmtree(disk / f"{number}")
    return wrong


def _vacuumed(url: str) -> Iterator[str]:
    """Vacuum a database on a full disk, which must be refused with the remedy."""
    try:
        with open_store(url) as store:
            store.vacuum()
    except StorageError as error:
        if "free some space" not in str(error):
            yield str(error)
    else:
        yield "there was space for a vacuum"


@contextmanager
def _fill_all_but(disk: Path, leave: int) -> Iterator[None]:
    """Fill the disk except for this number of bytes."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(PAGE))
        except OSError:
            file.truncate(max(file.tell() - leave, 0))
    try:
        yield
    finally:
        ballast.unlink()


def _bundle() -> Path:
    """Return a bundle of another database, on another disk."""
    folder = Path(tempfile.mkdtemp())
    with filled(folder / "there.db") as store:
        studies = [study.id for study in store.studies() if study.finished]
        (folder / "bundle.jsonl").write_text("".join(store.export_studies(studies, "there")))
    return folder / "bundle.jsonl"


def _record(url: str, folder: Path, bundle: Path, acknowledged: list[str]) -> None:
    with open_store(url) as store, database(store.optuna_url):
        store.import_bundle(bundle)
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
        spool = Spool(folder)
        for qv in range(5000):
            trial = store.start_trial(study, packed_plan(qv), "sampled").id
            spool.put(result_of(trial))
            acknowledged.append(trial)
            spool.replay(store)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_fill_up(Path(sys.argv[1]), int(sys.argv[2]))))
