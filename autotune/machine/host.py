"""The machine around the accelerators: processor, cores, and the memory that this process may use."""

import platform
from dataclasses import dataclass
from pathlib import Path

from trials.machine.control_groups import usable_cores, usable_memory_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    cpu_name: str
    cpu_cores: int
    """Number that this process may keep busy."""
    ram_bytes: int
    """Of the machine, or of the control group where that is less."""


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    return Machine(
        cpu_name=cpu_name(_read(Path("/proc/cpuinfo"))),
        cpu_cores=usable_cores(),
        ram_bytes=steady(usable_memory_bytes()),
    )


def cpu_name(cpuinfo: str) -> str:
    """Return the processor's model from the text of /proc/cpuinfo, else its architecture."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and value.strip():
            return value.strip()
    return platform.machine()


def steady(size: int) -> int:
    """Round `size` down by at most 3 %, so that small differences after a reboot do not make another machine."""
    return size - size % (1 << max(size.bit_length() - 6, 0))


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
