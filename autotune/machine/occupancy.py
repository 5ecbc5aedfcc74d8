"""The driver, and what other programs do on the accelerators, as NVIDIA's management library tells it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pynvml

from autotune.machine.nvml import ask, is_mps_server

_MODES = {
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_THREAD: "exclusive",
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive",
    pynvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
}
# A choice: finer steps would make each small change of another program a workload of its own.
_STEP_BYTES = 1 << 30
_LITTLE_BYTES = 256 << 20
"""Held bytes up to this are within the reserve of each device; more are counted in whole steps, so that small
differences do not change the memory limit, on which stored plans depend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """NVIDIA's driver."""

    error: str | None = None
    """Why it does not answer."""
    is_installed: bool = True
    cuda: tuple[int, int] | None = None
    """The newest version of CUDA that it runs; None where it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Occupancy:
    """What others do on one accelerator."""

    uuid: str
    name: str
    memory_bytes: int
    held_bytes: int = 0
    """Rounded, see `_STEP_BYTES`."""
    pids: tuple[int, ...] = ()
    """Other processes that compute on it; in a container not all are seen."""
    mode: str = "default"
    """`default`, `exclusive` for one process at a time, or `prohibited`."""
    has_mps: bool = False
    """Whether a server of NVIDIA's Multi-Process Service runs on it."""

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance of a divided device."""
        return self.uuid.startswith("MIG-")


def driver() -> Driver:
    """Ask whether the driver answers."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Driver(error=str(error), is_installed=not isinstance(error, pynvml.NVMLError_LibraryNotFound))
    try:
        # 12040 stands for CUDA 12.4.
        version = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
        return Driver(cuda=None if version is None else (version // 1000, version % 1000 // 10))
    finally:
        pynvml.nvmlShutdown()


def occupancies(uuids: Sequence[str]) -> tuple[Occupancy, ...]:
    """Return the occupancy of the accelerators with these UUIDs, in this order, without any that does not answer."""
    if not uuids:
        return ()
    pynvml.nvmlInit()
    try:
        handles = {uuid: ask(pynvml.nvmlDeviceGetHandleByUUID, uuid) for uuid in uuids}
        found = (_occupancy(uuid, handle) for uuid, handle in handles.items() if handle is not None)
        return tuple(each for each in found if each is not None)
    finally:
        pynvml.nvmlShutdown()


def _occupancy(uuid: str, handle: object) -> Occupancy | None:
    memory = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    if memory is None:
        return None
    processes = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    of_mps = ask(pynvml.nvmlDeviceGetMPSComputeRunningProcesses, handle) or ()
    return Occupancy(
        uuid=uuid,
        name=pynvml.nvmlDeviceGetName(handle),
        memory_bytes=int(memory.total),
        # NVML's `used` leaves out what the driver keeps for itself.
        held_bytes=_rounded(int(memory.used)),
        pids=tuple(sorted({process.pid for process in (*processes, *of_mps)} - {os.getpid()})),
        mode=_MODES.get(ask(pynvml.nvmlDeviceGetComputeMode, handle), "default"),
        has_mps=bool(of_mps) or any(is_mps_server(process.pid) for process in processes),
    )


def _rounded(held: int) -> int:
    return 0 if held <= _LITTLE_BYTES else -(-held // _STEP_BYTES) * _STEP_BYTES
