"""Everything that a command on a job needs, opened together: the job, its database, and these devices for itself."""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout
from platformdirs import user_data_path

from autotune.errors import DeviceBusy
from autotune.workload import Prepared, prepare
from storage.store import Store, open_store
from storage.url import default_url, masked
from trials.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """A prepared job, its store, and a folder for what its ranks read and write."""

    prepared: Prepared
    store: Store
    folder: Path


@contextmanager
def workbench(job: Job, database_url: str | None, progress: Callable[[int], None] | None = None) -> Iterator[Workbench]:
    """Opens the database first, so that a wrong URL costs nothing, then takes the devices and looks at the data.

    Raises DeviceBusy when another agent measures or trains on this machine: neither's times would hold.
    """
    with open_store(database_url) as store:
        data = user_data_path("autotune")
        # Results wait for the database that knows their trials, so each database has a folder of its own.
        name = hashlib.sha256(masked(database_url or default_url()).encode()).hexdigest()[:12]
        folder = data / "work" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _devices(data / "devices.lock"):
            yield Workbench(prepared=prepare(job, folder, progress), store=store, folder=folder)


@contextmanager
def _devices(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DeviceBusy(f"another autotune uses the devices of this machine (it holds {path}); wait for it") from None
    try:
        yield
    finally:
        lock.release()
