"""Exclusive use of the devices of a job.

Lock files exclude other processes of this user, whichever database and data folder they write to. Leases exclude all
other agents of the database, including those of other users and containers that see the same accelerators. Cores are
leased within a container.
"""

import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from autotune.errors import DeviceBusy
from autotune.machine.agent import machine
from autotune.machine.hardware import accelerators_of
from storage.database.url import masked
from storage.user_folders import state_folder
from trials.errors import AutotuneError
from trials.workload import Hardware

_CPU = "cpu"


def device_names(hardware: Hardware, groups: int) -> tuple[str, ...]:
    """Return the accelerators of all groups, or one name for all cores: searches on one CPU disturb each other."""
    if hardware.accelerator == "cpu":
        return (_CPU,)
    return tuple(one.uuid for group in range(groups) for one in accelerators_of(hardware, group))


def resource(name: str) -> str:
    """Return a name of the device that is unique among the agents of a database, as UUIDs of accelerators are."""
    return f"{_CPU} of {machine()}" if name == _CPU else name


def lock_file(name: str = _CPU) -> Path:
    """Return the file that the user of the device locks; the folder may be shared between hosts."""
    return state_folder() / f"devices-{platform.node()}-{name}.lock"


@contextmanager
def locked(names: Sequence[str]) -> Iterator[None]:
    """Lock the devices. Raise DeviceBusy when another process of this user measures or trains on one of them."""
    with ExitStack() as stack:
        # In one order, so that of two processes with the same devices one gets them all.
        for name in sorted(names):
            path = lock_file(name)
            lock = FileLock(path)
            make_folder(path.parent, "XDG_STATE_HOME")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                raise DeviceBusy(
                    f"another autotune process uses the devices of this machine ({holder(path)} holds {path}); wait "
                    "for it, or end it"
                ) from None
            except OSError as error:
                raise AutotuneError(_unwritable(path, error, "XDG_STATE_HOME")) from error
            stack.callback(lock.release)
        yield


def any_in_use() -> bool:
    """Return whether a process of this user holds any device of this machine, as far as the kernel tells."""
    paths = lock_file().parent.glob(lock_file("*").name)
    return any(_locking(path) is not None for path in paths)


def holder(path: Path) -> str:
    """Return the process that locks a file, with its command and start, as far as the kernel tells."""
    with suppress(psutil.Error, ValueError):
        if (pid := _locking(path)) is not None:
            process = psutil.Process(pid)
            # A URL may hold a password.
            command = " ".join(masked(word) if "://" in word else word for word in process.cmdline())
            began = datetime.fromtimestamp(process.create_time(), UTC)
            return f"process {process.pid}, `{command}`, begun {began:%Y-%m-%d %H:%M} UTC"
    return "a process that is not seen from here"


def _locking(path: Path) -> int | None:
    """Return the process that locks a file.

    Locks are listed in /proc/locks as `NUMBER: FLOCK ADVISORY WRITE PID MAJOR:MINOR:INODE START END` (proc(5)).
    """
    with suppress(OSError, ValueError):
        inode = str(path.stat().st_ino)
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == inode:
                return int(fields[4])
    return None


def make_folder(folder: Path, variable: str = "XDG_DATA_HOME") -> None:
    """Make the folder, with mode 0700, if it is absent. Raise AutotuneError when it cannot be written.

    The `variable` decides where it is.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise AutotuneError(_unwritable(folder, error, variable)) from error


def _unwritable(path: Path, error: OSError, variable: str) -> str:
    return f"cannot write {path} ({error.strerror}); make its folder writable, or set {variable} to another one"
