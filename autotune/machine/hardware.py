"""The ranks that a job gets, and the software they run; torch is not imported."""

import logging
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distribution
from pathlib import Path

from autotune.errors import HardwareError
from autotune.machine.nvml import FROM_FAST_TO_SLOW, Accelerator, accelerators
from trials.machine.control_groups import usable_cores, usable_memory_bytes
from trials.units import number_of
from trials.workload import Hardware, Software


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


# A choice: the least number with which pipelines and data parallelism can be tried without a GPU.
DEFAULT_CPU_RANKS = 2
# A choice: more ranks on a core would mostly wait for each other, and each holds some hundred MB of torch.
MOST_RANKS_PER_CORE = 4

_log = logging.getLogger(__name__)
# A choice: each worker holds packs of pixels in memory; `data.workers` names more.
_MOST_WORKERS = 4
_VERSION = re.compile(r"^Version: *(\S+)", re.MULTILINE)
# Entries of CUDA_VISIBLE_DEVICES by which a user ends the list; the words are of containers.
_ENDS = frozenset({"", "-1", "none", "void", "NoDevFiles"})
ENOUGH_SHARED_BYTES = 1 << 30
"""For some packs of images per rank; the default of a Docker container is 64 MiB."""


def probe_hardware(devices: int | None = None, groups: int = 1) -> Hardware:
    """Describe this machine with all its devices, or `devices` of them. Raise HardwareError for more than there are.

    `groups` such sets of devices are used at the same time. Warns when they, or a CPU build of torch, leave
    accelerators unused.
    """
    found = visible(accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    usable_ones = usable(found, torch_version=software().torch)
    return choose(devices, machine=this_machine(), found=usable_ones, groups=groups)


def whole_machine() -> Hardware:
    """Describe this machine with everything that ranks may use: all accelerators, or as many ranks as the CPU takes."""
    machine = this_machine()
    found = usable(visible(accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES")), torch_version=software().torch)
    if found:
        return choose(None, machine=machine, found=found)
    return replace(choose(1, machine=machine, found=()), devices=machine.cpu_cores * MOST_RANKS_PER_CORE)


def accelerators_of(hardware: Hardware, group: int = 0) -> tuple[Accelerator, ...]:
    """Return the accelerators that a group of ranks uses on `hardware`, which is this machine's; none on a CPU."""
    if hardware.accelerator == "cpu":
        return ()
    seen = visible(accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return seen[group * hardware.of_node :][: hardware.of_node]


@cache
def software() -> Software:
    """Return the installed versions without importing the packages. Raise PackageNotFoundError."""
    return Software(
        python=platform.python_version(),
        torch=_version("torch"),
        deepspeed=_version("deepspeed"),
        transformers=_version("transformers"),
    )


def _version(package: str) -> str:
    # `importlib.metadata.version` parses the whole file, with the package's readme, as an e-mail.
    found = _VERSION.search(distribution(package).read_text("METADATA") or "")
    assert found, f"{package} has no version"
    return found[1]


def default_memory_limit(hardware: Hardware, groups: int = 1, *, held_bytes: int = 0) -> int:
    """Return the bytes per rank that apply when the job names no limit.

    5 % of an accelerator, at least 1 GiB, are left to its driver and to fragmentation, and `held_bytes` to other
    processes. CPU ranks of all groups share 80 % of the memory. Raise HardwareError where nothing is left.
    """
    if hardware.accelerator == "cpu":
        return hardware.ram_bytes * 8 // 10 // (hardware.of_node * groups)
    reserve = max(hardware.device_memory_bytes // 20, 1 << 30)
    left = hardware.device_memory_bytes - reserve - held_bytes
    if left <= 0:
        raise HardwareError(
            f"other processes hold {held_bytes >> 30} GiB of {hardware.device_name}, which leaves none for a rank; "
            "end them, or choose other devices with CUDA_VISIBLE_DEVICES"
        )
    return left


def default_workers(hardware: Hardware, groups: int = 1, *, shared_bytes: int = ENOUGH_SHARED_BYTES) -> int:
    """Return the loading processes per rank that apply when the job names no number.

    They pass packs to their rank through shared memory of `shared_bytes`; where it is full, training ends.
    """
    return 0 if shared_bytes < ENOUGH_SHARED_BYTES else min(hardware.spare_cores(groups), _MOST_WORKERS)


def visible(found: Sequence[Accelerator], choice: str | None) -> tuple[Accelerator, ...]:
    """Return the accelerators that CUDA would offer, in its order, when `CUDA_VISIBLE_DEVICES` is `choice`.

    Its entries are numbers or beginnings of UUIDs; the first that names no device ends the list (CUDA C++ Programming
    Guide, environment variables). One that is named twice leaves none.
    """
    return _chosen(found, choice)[0]


def fault_of_choice() -> str | None:
    """Return which entry of `CUDA_VISIBLE_DEVICES` names no accelerator of this machine, or one again; None for none.

    None also for an entry that is meant to end the list, and without accelerators.
    """
    found = accelerators()
    return _chosen(found, os.environ.get("CUDA_VISIBLE_DEVICES"))[1] if found else None


def _chosen(found: Sequence[Accelerator], choice: str | None) -> tuple[tuple[Accelerator, ...], str | None]:
    """Return (the accelerators, the entry that ends the list by mistake)."""
    if choice is None:
        return tuple(found), None
    chosen: list[Accelerator] = []
    for entry in map(str.strip, choice.split(",")):
        if entry.isdigit():
            named = list(found[int(entry) : int(entry) + 1])
        else:
            named = [one for one in found if entry and one.uuid.startswith(entry)]
        if len(named) != 1:
            fault = f"{entry}, which is not one of the {number_of(len(found), 'device')} here"
            return tuple(chosen), None if entry in _ENDS else fault
        if named[0] in chosen:
            return (), f"{entry}, a device that it has named before"
        chosen += named
    return tuple(chosen), None


def usable(found: Sequence[Accelerator], *, torch_version: str) -> tuple[Accelerator, ...]:
    """Return `found`, or nothing, with a warning, when torch is a CPU build."""
    if not found or not torch_version.endswith("+cpu"):
        return tuple(found)
    _log.warning("torch %s cannot use the %s here; install torch's CUDA build", torch_version, found[0].name)
    return ()


def choose(devices: int | None, *, machine: Machine, found: Sequence[Accelerator], groups: int = 1) -> Hardware:
    """Describe `devices` ranks on `found`, or on the CPU where nothing is found, for each of `groups` groups.

    Raise HardwareError like `probe_hardware`.
    """
    return _accelerated(devices, machine, found, groups) if found else _on_cpu(devices, machine, groups)


def _accelerated(devices: int | None, machine: Machine, found: Sequence[Accelerator], groups: int) -> Hardware:
    ranks = devices or max(1, len(found) // groups)
    if ranks * groups > len(found):
        raise HardwareError(
            f"{_asked(ranks, groups)} but {len(found)} accelerators are visible, {ranks * groups - len(found)} too "
            f"few; {_lower(len(found), groups)}, or check CUDA_VISIBLE_DEVICES"
        )
    if devices is None and groups > 1:
        _log.warning(
            "each trial, and the training, uses %d of the %d accelerators, because of search.parallel: %d; give "
            "hardware.devices if that is meant, or set search.parallel to 1 for plans that use all",
            ranks,
            len(found),
            groups,
        )
    used = found[: ranks * groups]
    link, topology = _connections(used[:ranks])
    power_limits = [one.power_limit_watts for one in used if one.power_limit_watts is not None]
    return Hardware(
        accelerator="cuda",
        device_name=" + ".join(dict.fromkeys(one.name for one in used)),
        devices=ranks,
        device_memory_bytes=min(one.memory_bytes for one in used),
        # Compared as numbers: "10.0" is above "9.0".
        compute_capability=min((one.compute_capability for one in used), key=lambda text: [*map(int, text.split("."))]),
        driver=used[0].driver,
        cpu_name=machine.cpu_name,
        cpu_cores=machine.cpu_cores,
        ram_bytes=machine.ram_bytes,
        link=link,
        topology=topology,
        power_limit_watts=min(power_limits, default=None),
    )


def _connections(used: Sequence[Accelerator]) -> tuple[str | None, str | None]:
    """Return (slowest connection, connection of every pair); None for one device, and where the driver has none."""
    pairs = [
        (f"{first}-{second}", dict(one.links).get(used[second].uuid))
        for first, one in enumerate(used)
        for second in range(first + 1, len(used))
    ]
    known = [link for _, link in pairs if link is not None]
    if not known or len(known) < len(pairs):
        return None, None
    return max(known, key=_slowness), ", ".join(f"{pair} {link}" for pair, link in pairs)


def _slowness(link: str) -> tuple[int, int]:
    name = link.rstrip("0123456789")
    # NV18 is faster than NV12: the number counts links.
    return FROM_FAST_TO_SLOW.index(name), -int(link.removeprefix(name) or 0)


def _asked(ranks: int, groups: int) -> str:
    if groups == 1:
        return f"hardware.devices asks for {number_of(ranks, 'rank')}"
    return f"search.parallel asks for {groups} times {number_of(ranks, 'rank')}"


def _lower(most: int, groups: int) -> str:
    if most >= groups > 1:
        return f"set hardware.devices to {most // groups} or less, or lower search.parallel"
    return f"set it to {most} or less"


def _on_cpu(devices: int | None, machine: Machine, groups: int) -> Hardware:
    ranks, most = devices or DEFAULT_CPU_RANKS, machine.cpu_cores * MOST_RANKS_PER_CORE
    if ranks * groups > most:
        cores = number_of(machine.cpu_cores, "CPU core")
        raise HardwareError(
            f"{_asked(ranks, groups)} but no accelerator is visible, and {cores} can run at most {machine.cpu_cores} x "
            f"{MOST_RANKS_PER_CORE} = {most}; {_lower(most, groups)}"
        )
    whole = Hardware(
        accelerator="cpu",
        device_name=machine.cpu_name,
        devices=ranks,
        device_memory_bytes=machine.ram_bytes,
        compute_capability=None,
        driver=None,
        cpu_name=machine.cpu_name,
        cpu_cores=machine.cpu_cores,
        ram_bytes=machine.ram_bytes,
    )
    group = whole.of_group(groups)
    if groups > 1:
        _log.warning(
            "each trial, and the training, uses %d of the %d CPU cores, because of search.parallel: %d; set it to 1 "
            "for plans that use all",
            group.cpu_cores,
            whole.cpu_cores,
            groups,
        )
    return group
