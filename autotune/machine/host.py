"""The machine around the accelerators: processor, cores, and the memory that this process may use."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (only its size is read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu_name: str
    cpu_cores: int
    """Number that this process may run on."""
    ram_bytes: int
    """Of the machine, or of the control group where that is less."""


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    total = int(psutil.virtual_memory().total)
    return Machine(
        cpu_name=cpu_name(_read(Path("/proc/cpuinfo"))),
        # `os.cpu_count()` would also count cores that taskset, Slurm or a container forbid.
        cpu_cores=len(os.sched_getaffinity(0)),
        ram_bytes=steady(min((total, *cgroup_limits(_read(Path("/proc/self/cgroup")), Path("/sys/fs/cgroup"))))),
    )


def shared_memory_bytes() -> int:
    """Return the size of /dev/shm, through which processes pass tensors; containers often have little. 0 without it."""
    return shutil.disk_usage(_SHARED_MEMORY).total if _SHARED_MEMORY.is_dir() else 0


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's model from the text of /proc/cpuinfo, else its architecture."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def cgroup_limits(membership: str, mount: Path) -> Iterator[int]:
    """Yield the memory limits of the control groups of this process, in bytes, from the text of /proc/self/cgroup.

    Version 2 has one line `0::/path` and `memory.max`; version 1 a line `n:memory:/path` and `memory.limit_in_bytes`.
    A group is also limited by those around it. In a container the path may be the host's; then only the mount exists.
    """
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (mount / "memory", "memory.limit_in_bytes") if controllers else (mount, "memory.max")
        inner = top / path.lstrip("/")
        for group in (inner, *inner.parents):
            limit = _read(group / name).strip()
            if limit.isdigit():  # "max" means none
                yield int(limit)
            if group == top:
                break


def steady(size: int) -> int:
    """Round `size` down by at most 3 %, so that small differences after a reboot do not make another machine."""
    return size - size % (1 << max(size.bit_length() - 6, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
