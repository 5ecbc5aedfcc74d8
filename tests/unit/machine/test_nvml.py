from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pynvml
import pytest

from autotune.machine.nvml import accelerators, activity_of
from tests.machines.simulated_nvml import refuse, simulate

DRIVER = Path("/proc/driver/nvidia").exists()


@pytest.fixture
def two_devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    simulate(monkeypatch)
    return monkeypatch


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


def test_the_activity_of_several_devices_is_combined(two_devices: pytest.MonkeyPatch) -> None:
    def processes(handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7), SimpleNamespace(pid=10 + int(handle))]

    two_devices.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", processes)
    two_devices.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: 1500 + int(handle))
    with activity_of(["GPU-0", "GPU-1"]) as activity:
        both = activity()
    with activity_of(["GPU-1"]) as activity:
        second = activity()
    assert (sorted(both.pids), both.energy_joules) == ([7, 10, 11], 3.001)
    assert (sorted(second.pids), second.energy_joules) == ([7, 11], 1.501)


@pytest.mark.parametrize(
    ("reasons", "slowdowns"),
    [
        (pynvml.nvmlClocksEventReasonGpuIdle | pynvml.nvmlClocksEventReasonApplicationsClocksSetting, set()),
        (pynvml.nvmlClocksEventReasonSwPowerCap, set()),
        (
            pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
            {"hardware slowdown", "power brake"},
        ),
        (pynvml.nvmlClocksEventReasonSwThermalSlowdown, {"thermal slowdown by the driver"}),
        (pynvml.nvmlClocksEventReasonHwThermalSlowdown, {"thermal slowdown by the hardware"}),
    ],
    ids=["idle or set", "power cap", "power brake", "driver's thermal", "hardware's thermal"],
)
def test_only_a_clock_that_is_lower_than_it_should_be_is_a_slowdown(
    two_devices: pytest.MonkeyPatch, reasons: int, slowdowns: set[str]
) -> None:
    two_devices.setattr(
        pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: reasons if handle == "1" else 0
    )
    with activity_of(["GPU-0", "GPU-1"]) as activity:
        assert activity().slowdowns == slowdowns


def test_an_instance_is_as_slow_as_its_device(two_devices: pytest.MonkeyPatch) -> None:
    def reasons(handle: str) -> int:
        if "-" in handle:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return int(pynvml.nvmlClocksEventReasonHwThermalSlowdown)

    two_devices.setattr(pynvml, "nvmlDeviceGetHandleByUUID", lambda uuid: "1-0")
    two_devices.setattr(pynvml, "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", lambda handle: handle[0])
    two_devices.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", reasons)
    two_devices.setattr(
        pynvml,
        "nvmlDeviceGetComputeRunningProcesses",
        lambda handle: [SimpleNamespace(pid=7 if handle == "1-0" else 8)],
    )
    with activity_of(["MIG-3"]) as activity:
        found = activity()
    assert found.slowdowns == {"thermal slowdown by the hardware"}
    assert found.pids == {7}


def test_the_clients_of_the_multi_process_service_compute_and_its_server_does_not(
    two_devices: pytest.MonkeyPatch,
) -> None:
    def listed(*pids: int) -> Callable[[str], list[SimpleNamespace]]:
        return lambda _: [SimpleNamespace(pid=pid) for pid in pids]

    two_devices.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", listed(5))
    two_devices.setattr(pynvml, "nvmlDeviceGetMPSComputeRunningProcesses", listed(6, 7))
    two_devices.setattr(
        pynvml, "nvmlSystemGetProcessName", lambda pid: "nvidia-cuda-mps-server" if pid == 5 else f"program-{pid}"
    )
    with activity_of(["GPU-0"]) as activity:
        assert activity().pids == {6, 7}


def test_what_devices_cannot_tell_is_left_out(two_devices: pytest.MonkeyPatch) -> None:
    unsupported = refuse(pynvml.NVML_ERROR_NOT_SUPPORTED)
    two_devices.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", unsupported)
    two_devices.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", unsupported)
    with activity_of(["GPU-0", "GPU-1"]) as activity:
        found = activity()
    assert (found.pids, found.slowdowns, found.energy_joules) == (frozenset(), frozenset(), None)


def test_the_activity_of_no_devices_needs_no_driver() -> None:
    with activity_of([]) as activity:
        assert activity().energy_joules is None


@pytest.mark.parametrize(("enforced", "watts"), [(300_000, 300), (700_000, None), (750_000, None)])
def test_a_power_limit_is_named_where_it_is_below_the_default(
    two_devices: pytest.MonkeyPatch, enforced: int, watts: int | None
) -> None:
    two_devices.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: enforced)
    assert [one.power_limit_watts for one in accelerators()] == [watts, watts]


def test_devices_that_do_not_tell_their_power_limit_have_none(two_devices: pytest.MonkeyPatch) -> None:
    two_devices.setattr(pynvml, "nvmlDeviceGetEnforcedPowerLimit", lambda handle: 300_000)
    two_devices.setattr(pynvml, "nvmlDeviceGetPowerManagementDefaultLimit", refuse(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert [one.power_limit_watts for one in accelerators()] == [None, None]


@pytest.mark.skipif(DRIVER, reason="this machine has NVIDIA's driver")
def test_a_machine_without_the_driver_has_no_accelerators() -> None:
    assert accelerators() == ()


@pytest.mark.skipif(not DRIVER, reason="this machine has no NVIDIA driver")
def test_the_devices_of_this_machine_have_memory_and_a_name() -> None:
    for one in accelerators():
        assert one.memory_bytes > 1 << 30
        assert one.uuid.startswith(("GPU-", "MIG-"))
        assert one.name


def test_connections_of_devices_are_named_as_by_nvidia_smi(two_devices: pytest.MonkeyPatch) -> None:
    two_devices.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda one, other, capability: pynvml.NVML_P2P_STATUS_OK)
    two_devices.setattr(pynvml, "nvmlDeviceGetNvLinkState", lambda handle, number: int(number < 18))
    first, second = accelerators()
    assert (first.links, second.links) == ((("GPU-1", "NV18"),), (("GPU-0", "NV18"),))
    disabled = pynvml.NVML_P2P_STATUS_DISABLED_BY_REGKEY
    two_devices.setattr(pynvml, "nvmlDeviceGetP2PStatus", lambda one, other, capability: disabled)
    two_devices.setattr(
        pynvml, "nvmlDeviceGetTopologyCommonAncestor", lambda one, other: pynvml.NVML_TOPOLOGY_HOSTBRIDGE
    )
    assert [one.links for one in accelerators()] == [(("GPU-1", "PHB"),), (("GPU-0", "PHB"),)]


def test_devices_whose_connection_the_driver_does_not_tell_have_none(two_devices: pytest.MonkeyPatch) -> None:
    for name in ("nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor"):
        two_devices.setattr(pynvml, name, refuse(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert [one.links for one in accelerators()] == [(), ()]
