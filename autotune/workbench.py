"""Everything that a command on a job needs, opened together: the job, its database, and these devices for itself."""

import hashlib
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_cache_path, user_data_path

from autotune.errors import AutotuneError, DeviceBusy
from autotune.workload import Prepared, look_at, read_data
from storage.store import Store, open_store
from storage.url import default_url, masked, parse
from trials.data.indexing import Reading
from trials.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """A prepared job, its store, and a folder for what its ranks read and write."""

    prepared: Prepared
    store: Store
    folder: Path


@contextmanager
def workbench(
    job: Job, database_url: str | None, progress: Callable[[Reading], None] | None = None
) -> Iterator[Workbench]:
    """Takes the devices, looks at the model, opens the database and reads the data, in this order.

    So a job that names a wrong file leaves no database behind, and a database that fails is told before a long
    reading. Raises DeviceBusy when another agent measures or trains on this machine: neither's times would hold.
    """
    url = parse(default_url() if database_url is None else database_url)
    data = user_data_path("autotune")
    # Results wait for the database that knows their trials, so each database has a folder of its own.
    folder = data / "work" / hashlib.sha256(masked(url).encode()).hexdigest()[:12]
    with _devices(devices_lock()):
        outline = look_at(job)
        with open_store(database_url) as store:
            _make(folder)
            prepared = read_data(job, outline, folder, progress, cache=lengths_folder())
            yield Workbench(prepared=prepared, store=store, folder=folder)


def lengths_folder() -> Path:
    """Where measured lengths are kept for every job of this user."""
    return user_cache_path("autotune") / "lengths"


def devices_lock() -> Path:
    """The file that whoever uses the devices holds; machines may share the folder."""
    return user_data_path("autotune") / f"devices-{platform.node()}.lock"


@contextmanager
def _devices(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    _make(path.parent)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DeviceBusy(f"another autotune uses the devices of this machine (it holds {path}); wait for it") from None
    except OSError as error:
        raise AutotuneError(_unwritable(path, error)) from error
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AutotuneError(_unwritable(folder, error)) from error


def _unwritable(path: Path, error: OSError) -> str:
    return f"cannot write {path} ({error.strerror}); make its folder writable, or set XDG_DATA_HOME to another one"
