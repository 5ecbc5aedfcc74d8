"""The ranks that a job gets, and the software they run; torch is not imported."""

import logging
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version

from autotune.errors import HardwareError
from autotune.machine import Machine, this_machine
from autotune.nvml import Accelerator, accelerators
from trials.job import HardwareSection
from trials.workload import Hardware, Software

DEFAULT_CPU_RANKS = 2
MOST_RANKS_PER_CORE = 4

_log = logging.getLogger(__name__)


def probe_hardware(section: HardwareSection) -> Hardware:
    """The devices of this machine that the job may use. Raises HardwareError when it asks for more than there are.

    Warns when a CPU build of torch leaves accelerators unused, and when CPU ranks outnumber the cores.
    """
    found = visible(accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return choose(section.devices, machine=this_machine(), found=usable(found, torch_version=version("torch")))


def accelerators_of(hardware: Hardware) -> tuple[Accelerator, ...]:
    """Those that the ranks of a job on `hardware`, which is this machine's, compute on; none on a CPU."""
    if hardware.accelerator == "cpu":
        return ()
    return visible(accelerators(), os.environ.get("CUDA_VISIBLE_DEVICES"))[: hardware.devices]


def software() -> Software:
    """The installed versions; nothing of it is imported."""
    return Software(
        python=platform.python_version(),
        torch=version("torch"),
        deepspeed=version("deepspeed"),
        transformers=version("transformers"),
    )


def default_memory_limit(hardware: Hardware) -> int:
    """Bytes per rank when the job names no limit.

    An accelerator keeps 5 %, at least 1 GiB, for its driver and for the allocator's gaps; CPU ranks share 80 % of the
    memory.
    """
    if hardware.accelerator == "cpu":
        return hardware.ram_bytes * 8 // 10 // hardware.devices
    reserve = max(hardware.device_memory_bytes // 20, 1 << 30)
    return hardware.device_memory_bytes - reserve


def visible(found: Sequence[Accelerator], choice: str | None) -> tuple[Accelerator, ...]:
    """The accelerators that CUDA would offer, in its order, when `CUDA_VISIBLE_DEVICES` is `choice`.

    Its entries are numbers or beginnings of UUIDs; the first that names no device ends the list (CUDA C++ Programming
    Guide, environment variables).
    """
    if choice is None:
        return tuple(found)
    chosen: list[Accelerator] = []
    for entry in map(str.strip, choice.split(",")):
        if entry.isdigit():
            named = list(found[int(entry) : int(entry) + 1])
        else:
            named = [one for one in found if entry and one.uuid.startswith(entry)]
        if len(named) != 1:
            break
        chosen += named
    return tuple(chosen)


def usable(found: Sequence[Accelerator], *, torch_version: str) -> tuple[Accelerator, ...]:
    """`found`, or nothing, with a warning, when torch is a CPU build."""
    if not found or not torch_version.endswith("+cpu"):
        return tuple(found)
    _log.warning("torch %s cannot use the %s here; install torch's CUDA build", torch_version, found[0].name)
    return ()


def choose(devices: int | None, *, machine: Machine, found: Sequence[Accelerator]) -> Hardware:
    """`devices` ranks on `found`, or on the CPU where nothing is found. Raises HardwareError like `probe_hardware`."""
    return _accelerated(devices or len(found), machine, found) if found else _on_cpu(devices, machine)


def _accelerated(devices: int, machine: Machine, found: Sequence[Accelerator]) -> Hardware:
    if devices > len(found):
        raise HardwareError(
            f"hardware.devices asks for {devices} ranks but {len(found)} accelerators are visible, "
            f"{devices - len(found)} too few; set it to {len(found)} or less, or look at CUDA_VISIBLE_DEVICES"
        )
    used = found[:devices]
    return Hardware(
        accelerator="cuda",
        device_name=" + ".join(dict.fromkeys(one.name for one in used)),
        devices=devices,
        device_memory_bytes=min(one.memory_bytes for one in used),
        compute_capability=min((one.compute_capability for one in used), key=_capability),
        driver=used[0].driver,
        cpu_name=machine.cpu_name,
        cpu_cores=machine.cpu_cores,
        ram_bytes=machine.ram_bytes,
    )


def _capability(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _on_cpu(devices: int | None, machine: Machine) -> Hardware:
    ranks, most = devices or DEFAULT_CPU_RANKS, machine.cpu_cores * MOST_RANKS_PER_CORE
    if ranks > most:
        raise HardwareError(
            f"hardware.devices asks for {ranks} ranks but no accelerator is visible, and {machine.cpu_cores} CPU cores "
            f"run at most {machine.cpu_cores} x {MOST_RANKS_PER_CORE} = {most}; set it to {most} or less"
        )
    if ranks > machine.cpu_cores:
        _log.warning(
            "%d ranks share %d CPU cores, so measured times will not hold; set hardware.devices to %d or less",
            ranks,
            machine.cpu_cores,
            machine.cpu_cores,
        )
    return Hardware(
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
