"""NVIDIA's library is simulated where the machine has none: what is simulated is pynvml, never our own code."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from autotune.nvml import accelerators

DRIVER = Path("/proc/driver/nvidia").exists()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two devices without MIG, as the library describes them."""
    functions = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: f"{index}",
        "nvmlDeviceGetMigMode": refuse(pynvml.NVML_ERROR_NOT_SUPPORTED),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: f"NVIDIA {handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=16 << 30),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
    }
    for name, function in functions.items():
        monkeypatch.setattr(pynvml, name, function)
    return monkeypatch


def refuse(code: int) -> Callable[..., None]:
    def function(*arguments: object) -> None:
        raise pynvml.NVMLError(code)

    return function


def test_devices_are_described_in_their_order(two_devices: pytest.MonkeyPatch) -> None:
    first, second = accelerators()
    assert (first.uuid, first.name, second.uuid) == ("GPU-0", "NVIDIA 0", "GPU-1")
    assert (first.memory_bytes, first.compute_capability, first.driver) == (16 << 30, "9.0", "580.1")


def test_a_divided_device_counts_as_its_instances(two_devices: pytest.MonkeyPatch) -> None:
    def instance(handle: str, index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return f"{handle}-{index}"

    two_devices.setattr(pynvml, "nvmlDeviceGetMigMode", lambda handle: [int(handle), int(handle)])
    two_devices.setattr(pynvml, "nvmlDeviceGetMaxMigDeviceCount", lambda handle: 3)
    two_devices.setattr(pynvml, "nvmlDeviceGetMigDeviceHandleByIndex", instance)
    assert [one.uuid for one in accelerators()] == ["GPU-0", "GPU-1-0", "GPU-1-2"]


def test_devices_that_cannot_be_read_are_not_used(
    two_devices: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    two_devices.setattr(pynvml, "nvmlDeviceGetMemoryInfo", refuse(pynvml.NVML_ERROR_GPU_IS_LOST))
    assert accelerators() == ()
    assert "GPU is lost" in caplog.text


@pytest.mark.skipif(DRIVER, reason="this machine has NVIDIA's driver")
def test_a_machine_without_the_driver_has_no_accelerators() -> None:
    assert accelerators() == ()


@pytest.mark.skipif(not DRIVER, reason="this machine has no NVIDIA driver")
def test_the_devices_of_this_machine_have_memory_and_a_name() -> None:
    for one in accelerators():
        assert one.memory_bytes > 1 << 30
        assert one.uuid.startswith(("GPU-", "MIG-"))
        assert one.name
