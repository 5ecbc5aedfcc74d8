"""A simulation of pynvml for machines without NVIDIA's library."""

from collections.abc import Callable
from types import SimpleNamespace

import pynvml
import pytest


def simulate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two idle devices without MIG that count no energy, as the library describes them; their handles are 0 and 1."""
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"{index}",
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid.removeprefix("GPU-"),
        "nvmlDeviceGetMigMode": refuse(pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": refuse(pynvml.NVML_ERROR_INVALID_ARGUMENT),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: f"NVIDIA {handle}",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 13_000,
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(total=16 << 30, used=3 << 20),
        "nvmlDeviceGetComputeMode": lambda handle: pynvml.NVML_COMPUTEMODE_DEFAULT,
        "nvmlDeviceGetMPSComputeRunningProcesses": refuse(pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlSystemGetProcessName": lambda pid: f"program-{pid}",
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: [],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: pynvml.nvmlClocksEventReasonGpuIdle,
        "nvmlDeviceGetEnforcedPowerLimit": lambda handle: 700_000,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda handle: 700_000,
        "nvmlDeviceGetTotalEnergyConsumption": refuse(pynvml.NVML_ERROR_NOT_SUPPORTED),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)


def refuse(code: int) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return function
