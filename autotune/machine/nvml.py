"""The accelerators that NVIDIA's management library sees; no CUDA context is made, and torch is not imported."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pynvml

_log = logging.getLogger(__name__)

_SLOWDOWNS = {
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "thermal slowdown by the driver",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "thermal slowdown by the hardware",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
"""Reasons for a lower clock that are no property of the device. Idleness, clocks set by an
administrator and the power cap, which large devices always reach, are left out."""


_ANCESTORS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PSB",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
"""The nearest part of the machine that a pair without NVLink shares, from near to far, in nvidia-smi's terms."""
FROM_FAST_TO_SLOW = ("NV", *_ANCESTORS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU, or one MIG instance of it."""

    uuid: str
    """As `CUDA_VISIBLE_DEVICES` spells it: `GPU-...` or `MIG-...`."""
    name: str
    memory_bytes: int
    compute_capability: str
    """`9.0`"""
    driver: str
    power_limit_watts: int | None = None
    """The limit that is enforced, where it is below the default; clocks that `nvidia-smi -lgc` locks cannot be read."""
    links: tuple[tuple[str, str], ...] = ()
    """(UUID, connection) of the other accelerators for which it is known, in nvidia-smi's terms."""


def accelerators() -> tuple[Accelerator, ...]:
    """Return every accelerator of the machine, in the order of the PCI bus; none without NVIDIA's driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        _log.debug("no accelerators: %s", error)
        return ()
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(_describe(part, one, handles, driver) for one in handles for part in _parts(one))
    except pynvml.NVMLError as error:
        _log.warning("the accelerators cannot be read and are not used: %s", error)
        return ()
    finally:
        pynvml.nvmlShutdown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The state of some accelerators together at one moment, as far as they report it."""

    pids: frozenset[int]
    """The processes that compute on them, themselves or through the Multi-Process Service (MPS)."""
    slowdowns: frozenset[str]
    """Reasons for which they run slower than they should."""
    energy_joules: float | None
    """Since the driver was loaded; None when one of them does not count it, as no MIG instance does."""


@contextmanager
def activity_of(uuids: Sequence[str]) -> Iterator[Callable[[], Activity]]:
    """Provide a function that reads the state of the accelerators with these UUIDs while the context lasts."""
    if not uuids:
        yield lambda: _activity((), ())
        return
    pynvml.nvmlInit()  # NVML counts these calls, so nested ones are safe
    try:
        handles = [handle for uuid in uuids if (handle := ask(pynvml.nvmlDeviceGetHandleByUUID, uuid)) is not None]
        # A MIG instance has no clock of its own.
        devices = [ask(pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle for handle in handles]
        yield lambda: _activity(handles, devices)
    finally:
        pynvml.nvmlShutdown()


def _activity(handles: Sequence[Any], devices: Sequence[Any]) -> Activity:
    """Return the activity on instances or devices with these handles; `devices` are the whole ones."""
    ways = (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetMPSComputeRunningProcesses)
    computing = [ask(way, handle) or () for handle in handles for way in ways]
    pids = frozenset(process.pid for processes in computing for process in processes)
    reasons = [ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, device) or 0 for device in devices]
    energies = [ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle) for handle in handles]
    return Activity(
        # The server computes for its clients, which may be ours alone.
        pids=frozenset(pid for pid in pids if not is_mps_server(pid)),
        slowdowns=frozenset(name for bits in reasons for bit, name in _SLOWDOWNS.items() if bits & bit),
        # NVML counts millijoules.
        energy_joules=sum(energies) / 1000 if energies and None not in energies else None,
    )


def is_mps_server(pid: int) -> bool:
    """Return whether a process is a server of NVIDIA's Multi-Process Service."""
    return "nvidia-cuda-mps-server" in (ask(pynvml.nvmlSystemGetProcessName, pid) or "")


def ask(question: Callable[..., Any], *subjects: Any) -> Any:
    """Return the answer, or None where the driver or the device has none."""
    try:
        return question(*subjects)
    except pynvml.NVMLError as error:
        _log.debug("%s: %s", question.__name__, error)
        return None


def _parts(handle: Any) -> Iterator[Any]:
    """Yield the device itself, or its MIG instances where it is divided."""
    divided = False
    with suppress(pynvml.NVMLError):  # most devices cannot be divided
        divided = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    if not divided:
        yield handle
        return
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # places for instances that do not exist
            yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)


def _describe(part: Any, device: Any, devices: Sequence[Any], driver: str) -> Accelerator:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(device)
    links = []
    # There are no links between MIG instances.
    for other in (one for one in devices if one is not device and part is device):
        by_nvlink = ask(pynvml.nvmlDeviceGetP2PStatus, device, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        if by_nvlink == pynvml.NVML_P2P_STATUS_OK:
            numbers = range(pynvml.NVML_NVLINK_MAX_LINKS)
            active = sum(ask(pynvml.nvmlDeviceGetNvLinkState, device, number) == 1 for number in numbers)
            links.append((pynvml.nvmlDeviceGetUUID(other), f"NV{active}"))
        elif name := _ANCESTORS.get(ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, device, other)):
            links.append((pynvml.nvmlDeviceGetUUID(other), name))
    return Accelerator(
        uuid=pynvml.nvmlDeviceGetUUID(part),
        name=pynvml.nvmlDeviceGetName(part),
        memory_bytes=int(pynvml.nvmlDeviceGetMemoryInfo(part).total),
        compute_capability=f"{major}.{minor}",
        driver=driver,
        power_limit_watts=_power_limit(device),
        links=tuple(links),
    )


def _power_limit(device: Any) -> int | None:
    """Return the watts of a limit below the default one, which NVML counts in milliwatts."""
    enforced = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, device)
    default = ask(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, device)
    return None if enforced is None or default is None or enforced >= default else round(enforced / 1000)
