"""What this process may use of its machine, which the control groups of a container, a pod or a Slurm job limit."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_MOUNT = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return how many cores this process may keep busy: its affinity, or the whole cores of a lower quota."""
    # `os.cpu_count()` would also count cores that taskset, Slurm or a container forbid.
    allowed = len(os.sched_getaffinity(0))
    return max(1, int(min((allowed, *core_quotas(_memberships())))))


def usable_memory_bytes() -> int:
    """Return the memory of the machine, or of the control group where that is less."""
    return min((int(psutil.virtual_memory().total), *memory_limits(_memberships())))


def memory_limits(membership: str, mount: Path = _MOUNT) -> Iterator[int]:
    """Yield the memory limits of the control groups of this process, in bytes, from the text of /proc/self/cgroup."""
    for group, version in _groups(membership, mount, "memory"):
        limit = _read(group / ("memory.limit_in_bytes" if version == 1 else "memory.max")).strip()
        if limit.isdigit():  # "max" means none
            yield int(limit)


def core_quotas(membership: str, mount: Path = _MOUNT) -> Iterator[float]:
    """Yield how many cores' time the control groups of this process allow, from the text of /proc/self/cgroup."""
    for group, version in _groups(membership, mount, "cpu"):
        if version == 1:
            numbers = [_read(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        else:
            numbers = _read(group / "cpu.max").split()
        if len(numbers) == 2 and all(number.isdigit() for number in numbers):  # "max", or -1, means none
            yield int(numbers[0]) / int(numbers[1])


class KillsForMemory:
    """Kills by the kernel because memory ran out, in the control group of this process, from now on.

    The processes that this one starts are in its group. Those of other containers, pods and jobs are not: what ends
    them says nothing about a process here. A machine without control groups has one count for all.
    """

    def __init__(self, membership: str | None = None, mount: Path = _MOUNT) -> None:
        """Count in the group that `membership`, the text of /proc/self/cgroup, names below `mount`."""
        groups = _groups(_memberships() if membership is None else membership, mount, "memory")
        files = (group / ("memory.oom_control" if version == 1 else "memory.events") for group, version in groups)
        self._file = next((file for file in files if _kills(file) is not None), Path("/proc/vmstat"))
        self._before = _kills(self._file)

    @property
    def any(self) -> bool:
        """Whether there was one; False where the kernel does not count them."""
        return (_kills(self._file) or 0) > (self._before or 0)


def _kills(file: Path) -> int | None:
    """Return the processes that were killed because memory ran out; None if the file does not say."""
    counts = (line.split() for line in _read(file).splitlines())
    return next((int(count) for name, count in counts if name == "oom_kill"), None)


def _groups(membership: str, mount: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the folder of each control group that limits this process, with the version of its files.

    Version 2 has one line `0::/path`; version 1 a line such as `4:memory:/path` for each tree of controllers. A group
    is also limited by those around it. In a container the path may be the host's; then only the mount exists.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top, version = (mount / controller, 1) if controllers else (mount, 2)
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            yield group, version
            if group == top:
                break


def _memberships() -> str:
    return _read(Path("/proc/self/cgroup"))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
