"""Problems of the devices that a search or training would meet, each with its remedy."""

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import gettempdir

from autotune.errors import HardwareError
from autotune.machine.hardware import (
    ENOUGH_SHARED_BYTES,
    accelerators_of,
    default_memory_limit,
    fault_of_choice,
    software,
)
from autotune.machine.occupancy import Driver, Occupancy, driver, occupancies
from trials.machine.shared_memory import LONGEST_FOLDER, MORE, shared_memory_bytes
from trials.units import number_of, size_setting
from trials.workload import Hardware

# A choice: importing torch takes seconds, but much longer from a cold disk or on a busy machine.
_SECONDS = 120.0
_ASK = "import torch; print(*torch.cuda.get_arch_list())"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    version: str
    cuda: tuple[int, int] | None = None
    """The version of CUDA; None for a build without it."""
    architectures: tuple[str, ...] = ()
    """`sm_90` for kernels of compute capability 9.0, `compute_90` for code that newer devices compile; empty where they
    are not known."""


def torch_build(*, architectures: bool = False) -> TorchBuild:
    """Describe the build. Its architectures take a process that imports torch, for seconds, so only on request."""
    spec = find_spec("torch")
    # The version file is read as text: to import a part of torch imports all of it, for seconds.
    file = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = re.search(r"^cuda\b.*= '(\d+)\.(\d+)", file.read_text() if file else "", re.MULTILINE)
    return TorchBuild(
        version=software().torch,
        cuda=(int(found[1]), int(found[2])) if found else None,
        architectures=_architectures() if architectures else (),
    )


def runs_on(capability: str, architectures: tuple[str, ...]) -> bool:
    """Return whether a device of this compute capability, such as `8.6`, runs kernels of one of the architectures.

    Kernels run on devices of the same major and no lower minor number, and are compiled on all newer devices from
    `compute_*` (CUDA C++ Programming Guide, compatibility). A letter behind the number, as in `sm_90a`, names this
    device alone.
    """
    device = tuple(map(int, capability.split(".")))
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        if number.isdigit():
            built = int(number[:-1]), int(number[-1])
            if built <= device and (kind == "compute" or built[0] == device[0]):
                return True
        elif number[:-1].isdigit() and (int(number[:-2]), int(number[-2])) == device:
            return True
    return False


def _architectures() -> tuple[str, ...]:
    asked = subprocess.run(
        # -P: a module called torch in the current folder is not the installed one.
        [sys.executable, "-P", "-c", _ASK],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    return tuple(asked.stdout.split()) if asked.returncode == 0 else ()


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem, and what to do about it."""

    what: str
    remedy: str
    prevents: bool = False
    """Whether no rank can run as the job says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What the problems are found in."""

    hardware: Hardware
    driver: Driver
    build: TorchBuild
    devices: tuple[Occupancy, ...]
    """The accelerators that ranks use."""
    shared_bytes: int
    """Size of /dev/shm."""
    groups: int = 1
    """Groups of ranks that run at the same time."""
    limit_bytes: int | None = None
    """Limit of a rank that the job names."""
    fault_of_choice: str | None = None
    """The entry of CUDA_VISIBLE_DEVICES that ends its list by mistake."""


def situation(hardware: Hardware, groups: int = 1, limit_bytes: int | None = None) -> Situation:
    """Look at the devices that `groups` groups of ranks use, at the driver, and at the build of torch."""
    devices = _devices(hardware, groups)
    return Situation(
        hardware=hardware,
        driver=driver(),
        build=torch_build(architectures=bool(devices)),
        devices=devices,
        shared_bytes=shared_memory_bytes(),
        groups=groups,
        limit_bytes=limit_bytes,
        fault_of_choice=fault_of_choice(),
    )


def held_bytes(hardware: Hardware, groups: int = 1) -> int:
    """Return by how much the free memory of the fullest device is less than `Hardware.device_memory_bytes`."""
    free = [device.memory_bytes - device.held_bytes for device in _devices(hardware, groups)]
    return max(0, hardware.device_memory_bytes - min(free, default=hardware.device_memory_bytes))


def memory_limit(hardware: Hardware, groups: int = 1, wanted: int | None = None) -> int:
    """Return the bytes of a rank: those that the job names, or the default less what others hold.

    Raise HardwareError where nothing is left.
    """
    return wanted or default_memory_limit(hardware, groups, held_bytes=held_bytes(hardware, groups))


def check_devices(hardware: Hardware, groups: int = 1, limit_bytes: int | None = None) -> None:
    """Log the findings as warnings. Raise HardwareError for the first one with which no rank can run."""
    for finding in findings(situation(hardware, groups, limit_bytes)):
        if finding.prevents:
            raise HardwareError(f"{finding.what}; {finding.remedy}")
        warn_of([finding])


def warn_of(found: Iterable[Finding]) -> None:
    for finding in found:
        _log.warning("%s; %s", finding.what, finding.remedy)


def findings(found: Situation) -> Iterator[Finding]:
    """Yield what is wrong in a situation."""
    yield from _of_limit(found)
    if found.hardware.accelerator == "cpu":
        yield from _without_devices(found)
        return
    yield from _of_software(found)
    yield from _of_modes(found.devices, found.hardware.of_node * found.groups)
    if found.fault_of_choice is not None:
        yield Finding(
            what=f"CUDA_VISIBLE_DEVICES names {found.fault_of_choice}: its list ends there, and devices behind it are "
            "not used",
            remedy="correct it; `nvidia-smi -L` lists the devices",
        )
    for device in found.devices:
        if device.held_bytes:
            yield Finding(
                what=f"other processes hold {_gib(device.held_bytes)} of the {_gib(device.memory_bytes)} of "
                f"{_named(device)}{_processes(device)}",
                remedy="end them, or choose other devices with CUDA_VISIBLE_DEVICES; until then memory limits are "
                "lower by that, and their work makes times unreliable",
            )
        if device.has_mps:
            yield Finding(
                what=f"the Multi-Process Service (MPS) runs on {_named(device)}, so that other programs may compute "
                "there at the same time",
                remedy="end it with `echo quit | nvidia-cuda-mps-control` while plans are measured",
            )
    names = dict.fromkeys(device.name for device in found.devices)
    if len(names) > 1:
        yield Finding(
            what=f"the devices differ: {', '.join(names)}; all ranks wait for the slowest, and have the memory of the "
            "smallest",
            remedy="choose equal ones with CUDA_VISIBLE_DEVICES",
        )
    if found.shared_bytes < ENOUGH_SHARED_BYTES:
        yield Finding(
            what=f"shared memory (/dev/shm) has {_gib(found.shared_bytes)}, too little to pass packs to the ranks: "
            "they load data themselves, and NCCL may fail",
            remedy=MORE,
        )
    if (length := len(os.fsencode(gettempdir()))) > LONGEST_FOLDER:
        yield Finding(
            what=f"the folder for temporary files, {gettempdir()}, has a path of {length} characters, too long for "
            "sockets by which data workers pass packs to their rank",
            remedy=f"set TMPDIR to a folder with a path of at most {LONGEST_FOLDER} characters",
        )


def _without_devices(found: Situation) -> Iterator[Finding]:
    driver, build = found.driver, found.build
    if driver.error is not None and driver.is_installed:
        yield Finding(
            what=f"NVIDIA's driver does not answer ({driver.error}), so ranks run on the CPU",
            remedy="try `nvidia-smi`; after an update of the driver, restart the machine or reload its kernel module",
        )
    elif driver.error is not None and build.cuda is not None:
        yield Finding(
            what=f"torch {build.version} is built for CUDA, but there is no driver of NVIDIA, so ranks run on the CPU",
            remedy="install the driver, or start the container with `--gpus all`; without a GPU, install torch's CPU "
            "build",
        )
    elif found.fault_of_choice is not None and build.cuda is not None:
        yield Finding(
            what=f"CUDA_VISIBLE_DEVICES names {found.fault_of_choice}, so that no device is left",
            remedy="correct it, or set it to -1 for ranks on the CPU; `nvidia-smi -L` lists the devices",
            prevents=True,
        )


def _of_limit(found: Situation) -> Iterator[Finding]:
    here, limit = found.hardware, found.limit_bytes
    if limit is None:
        return
    remedy = "lower it, or remove it for a default that leaves a reserve"
    if limit > here.device_memory_bytes:
        yield Finding(
            what=f"hardware.memory_limit is {size_setting(limit)}, but {here.device_name} has "
            f"{_gib(here.device_memory_bytes)}, so plans would run out of memory within the limit",
            remedy=remedy,
            prevents=True,
        )
    elif here.accelerator == "cpu" and limit * (ranks := here.of_node * found.groups) > here.device_memory_bytes:
        yield Finding(
            what=f"hardware.memory_limit allows {number_of(ranks, 'rank')} {_gib(limit * ranks)} in all, but this "
            f"machine has {_gib(here.device_memory_bytes)}",
            remedy=remedy,
        )


def _of_software(found: Situation) -> Iterator[Finding]:
    build, runs = found.build, found.driver.cuda
    if build.cuda is None:
        yield Finding(
            what=f"torch {build.version} is built without CUDA and cannot use {found.hardware.device_name}",
            remedy="install torch's CUDA build, or set CUDA_VISIBLE_DEVICES to -1 for ranks on the CPU",
            prevents=True,
        )
    # Minor versions do not count: a driver runs builds for all CUDA versions of its major one (CUDA Compatibility).
    if build.cuda is not None and runs is not None and runs[0] < build.cuda[0]:
        yield Finding(
            what=f"the driver {found.hardware.driver} runs CUDA {_version(runs)} at most, but torch {build.version} is "
            f"built for CUDA {_version(build.cuda)}",
            remedy=f"update the driver to one for CUDA {build.cuda[0]}, or install a torch for CUDA {runs[0]}",
            prevents=True,
        )
    capability = found.hardware.compute_capability
    if build.architectures and capability is not None and not runs_on(capability, build.architectures):
        yield Finding(
            what=f"torch {build.version} has no kernels for {found.hardware.device_name} of compute capability "
            f"{capability}, but for {', '.join(build.architectures)}",
            remedy="install a torch whose list has it (`torch.cuda.get_arch_list()`): a newer one for a new device, an "
            "older one for an old device",
            prevents=True,
        )


def _of_modes(devices: Sequence[Occupancy], ranks: int) -> Iterator[Finding]:
    for device in devices:
        if device.mode == "prohibited":
            yield Finding(
                what=f"{_named(device)} is in compute mode prohibited, in which no process can use it",
                remedy=f"set it back with `sudo nvidia-smi -i {device.uuid} -c DEFAULT`, or choose other devices",
                prevents=True,
            )
        # Under MPS the one process is its server, through which others compute.
        if device.mode == "exclusive" and device.pids and not device.has_mps:
            yield Finding(
                what=f"{_named(device)} is in exclusive mode, for one process at a time, and another one has "
                f"it{_processes(device)}",
                remedy="wait for that process or end it, or choose other devices with CUDA_VISIBLE_DEVICES",
                prevents=True,
            )
    instances = [device for device in devices if device.is_instance]
    if instances and ranks > 1:
        yield Finding(
            what=f"{ranks} ranks would use MIG instances such as {_named(instances[0])}, but CUDA offers one "
            "instance to a process, and NCCL does not join several",
            remedy="set hardware.devices and search.parallel to 1, or undo the division with `sudo nvidia-smi -mig 0`",
            prevents=True,
        )


def _devices(hardware: Hardware, groups: int) -> tuple[Occupancy, ...]:
    return occupancies([one.uuid for group in range(groups) for one in accelerators_of(hardware, group)])


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"


def _named(device: Occupancy) -> str:
    return f"{device.name} ({device.uuid})"


def _processes(device: Occupancy) -> str:
    if not device.pids:
        return ""
    return f" (process{'es' * (len(device.pids) > 1)} {', '.join(map(str, device.pids))})"


def _version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
