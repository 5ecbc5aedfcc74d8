"""Problems of devices, on simulated ones: each has a message with the value and the remedy."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.errors import HardwareError
from autotune.machine import device_problems, hardware
from autotune.machine.device_problems import (
    TorchBuild,
    check_devices,
    findings,
    held_bytes,
    runs_on,
    situation,
    torch_build,
)
from autotune.machine.hardware import Machine, choose, default_memory_limit, probe_hardware, software
from storage.store import open_store
from tests.machines.simulated_nvml import refuse, simulate

GIB = 1 << 30
BUILD = TorchBuild(version="2.13.0", cuda=(13, 0), architectures=("sm_80", "sm_90", "compute_120"))
Change = Callable[[str, Any], None]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Two devices without problems, and a function that changes an answer of the library about them."""
    simulate(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA H200")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "software", lambda: replace(software(), torch=BUILD.version))
    monkeypatch.setattr(device_problems, "torch_build", lambda **_: BUILD)
    monkeypatch.setattr(device_problems, "shared_memory_bytes", lambda: 16 * GIB)
    return lambda name, answer: monkeypatch.setattr(pynvml, name, answer)


def of_second(answer: Any, otherwise: Any) -> Callable[..., Any]:
    """Answer for the second device only."""
    return lambda handle, *_: answer if handle == "1" else otherwise


def found(devices: int = 2) -> list[str]:
    return [f"{each.what}; {each.remedy}" for each in findings(situation(probe_hardware(devices)))]


def memory(used: int) -> SimpleNamespace:
    return SimpleNamespace(total=16 * GIB, used=used)


def processes(*pids: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(pid=pid) for pid in pids]


def test_idle_devices_have_no_problems(devices: Change) -> None:
    assert found() == []
    check_devices(probe_hardware(2))


def refused(*parts: str, devices: int = 2) -> None:
    """The only problem keeps ranks from running, and its message has these parts."""
    (message,) = found(devices)
    with pytest.raises(HardwareError) as caught:
        check_devices(probe_hardware(devices))
    assert str(caught.value) == message
    for part in parts:
        assert part in message


def warned(*parts: str, caplog: pytest.LogCaptureFixture) -> None:
    """The only problem is a warning with these parts."""
    (message,) = found()
    check_devices(probe_hardware(2))
    assert caplog.messages[-1] == message
    for part in parts:
        assert part in message


def test_a_driver_that_is_too_old_is_refused(devices: Change) -> None:
    devices("nvmlSystemGetCudaDriverVersion_v2", lambda: 12_040)
    refused("the driver 580.1 runs CUDA 12.4 at most", "built for CUDA 13.0", "update the driver to one for CUDA 13")


def test_a_newer_minor_version_of_cuda_runs(devices: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_problems, "torch_build", lambda **_: replace(BUILD, cuda=(13, 2)))
    assert found() == []


def test_a_build_without_kernels_for_the_device_is_refused(devices: Change) -> None:
    devices("nvmlDeviceGetCudaComputeCapability", lambda handle: (7, 0))
    refused("no kernels for NVIDIA H200 of compute capability 7.0", "sm_80, sm_90, compute_120", "older one")


@pytest.mark.parametrize(
    ("capability", "architectures", "runs"),
    [
        ("9.0", "sm_80 sm_90", True),
        ("8.6", "sm_80", True),
        ("8.0", "sm_86", False),
        ("9.0", "sm_80", False),
        ("9.0", "sm_80 compute_80", True),
        ("8.0", "compute_90", False),
        ("9.0", "sm_90a", True),
        ("10.0", "sm_90a", False),
        ("10.3", "sm_100", True),
        ("12.0", "sm_100", False),
        ("12.1", "sm_120", True),
    ],
)
def test_kernels_run_within_a_major_version_and_code_on_newer_devices(
    capability: str, architectures: str, runs: bool
) -> None:
    assert runs_on(capability, tuple(architectures.split())) is runs


def test_a_prohibited_device_is_refused(devices: Change) -> None:
    devices("nvmlDeviceGetComputeMode", of_second(pynvml.NVML_COMPUTEMODE_PROHIBITED, 0))
    refused("NVIDIA H200 (GPU-1) is in compute mode prohibited", "nvidia-smi -i GPU-1 -c DEFAULT")


def test_an_exclusive_device_that_another_process_has_is_refused(devices: Change) -> None:
    devices("nvmlDeviceGetComputeMode", lambda handle: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    assert found() == []
    devices("nvmlDeviceGetComputeRunningProcesses", of_second(processes(4711), []))
    refused("NVIDIA H200 (GPU-1) is in exclusive mode", "(process 4711)", "CUDA_VISIBLE_DEVICES")


def test_memory_that_others_hold_is_told_and_taken_off_the_limit(
    devices: Change, caplog: pytest.LogCaptureFixture
) -> None:
    here = probe_hardware(2)
    assert (held_bytes(here), default_memory_limit(here)) == (0, 15 * GIB)
    devices("nvmlDeviceGetMemoryInfo", of_second(memory(5 * GIB - 7), memory(0)))
    devices("nvmlDeviceGetComputeRunningProcesses", of_second(processes(12, 34), []))
    warned("hold 5.0 GiB of the 16.0 GiB of NVIDIA H200 (GPU-1) (processes 12, 34)", "end them", caplog=caplog)
    assert default_memory_limit(here, held_bytes=held_bytes(here)) == 10 * GIB
    # A job on the first device alone does not have less.
    assert held_bytes(probe_hardware(1)) == 0


def test_a_limit_above_the_memory_of_a_device_is_refused(devices: Change) -> None:
    here = probe_hardware(2)
    check_devices(here, 1, 16 * GIB)
    with pytest.raises(
        HardwareError, match=r"hardware.memory_limit is 80GiB, but NVIDIA H200 has 16.0 GiB, .* lower it, or remove it"
    ):
        check_devices(here, 1, 80 * GIB)


def test_a_limit_that_the_ranks_of_one_cpu_cannot_all_have_is_told(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(cpu_name="Xeon", cpu_cores=8, ram_bytes=16 * GIB)
    here = choose(2, machine=machine, found=())
    check_devices(here, 2, 4 * GIB)
    assert "memory_limit" not in caplog.text
    check_devices(here, 2, 5 * GIB)
    assert "hardware.memory_limit allows 4 ranks 20.0 GiB in all, but this machine has 16.0 GiB" in caplog.text
    with pytest.raises(HardwareError, match=r"hardware.memory_limit is 17GiB, but Xeon has 16.0 GiB"):
        check_devices(here, 2, 17 * GIB)


def test_doctor_shows_the_limit_of_a_rank_beside_the_memory_of_its_device(devices: Change) -> None:
    answer = CliRunner().invoke(main, ["doctor"])
    assert "Memory    a rank may use 15.0 GiB (default) of the 16.0 GiB of its device\n" in answer.stdout


@pytest.mark.parametrize("quiet", [[], ["-q"]])
def test_doctor_counts_a_warning_as_a_problem(
    quiet: list[str], devices: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "software", lambda: replace(software(), torch="2.13.0+cpu"))
    answer = CliRunner().invoke(main, ["doctor", "--json", *quiet])
    assert "torch 2.13.0+cpu cannot use" in json.loads(answer.stdout)["warnings"][0]
    assert "No problems found.\n" not in CliRunner().invoke(main, ["doctor", *quiet]).stdout


def test_no_memory_left_is_refused(devices: Change) -> None:
    devices("nvmlDeviceGetMemoryInfo", lambda *_: memory(15 * GIB))
    here = probe_hardware(2)
    with pytest.raises(HardwareError, match="hold 15 GiB of NVIDIA H200, which leaves none for a rank"):
        default_memory_limit(here, held_bytes=held_bytes(here))


@pytest.mark.parametrize(("small", "held"), [(16 * GIB, 0), (24 * GIB, 0), (10 * GIB, 6 * GIB)])
def test_what_a_larger_device_lacks_counts_where_it_is_less_than_the_smaller_one_has(
    devices: Change, small: int, held: int
) -> None:
    total = {"0": 16 * GIB, "1": 24 * GIB}
    devices(
        "nvmlDeviceGetMemoryInfo",
        lambda handle, *_: SimpleNamespace(total=total[handle], used=24 * GIB - small if handle == "1" else 0),
    )
    assert held_bytes(probe_hardware(2)) == held


def test_mps_is_recognised(devices: Change, caplog: pytest.LogCaptureFixture) -> None:
    devices("nvmlDeviceGetComputeMode", lambda handle: pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS)
    devices("nvmlDeviceGetComputeRunningProcesses", of_second(processes(9), []))
    devices("nvmlSystemGetProcessName", lambda pid: "nvidia-cuda-mps-server")
    warned("MPS) runs on NVIDIA H200 (GPU-1)", "quit | nvidia-cuda-mps-control", caplog=caplog)


def test_several_ranks_on_instances_of_a_divided_device_are_refused(devices: Change) -> None:
    devices("nvmlDeviceGetMigMode", lambda handle: [1, 1])
    devices("nvmlDeviceGetMaxMigDeviceCount", lambda handle: 1)
    devices("nvmlDeviceGetMigDeviceHandleByIndex", lambda handle, index: f"{handle}-{index}")
    devices("nvmlDeviceGetUUID", lambda handle: f"MIG-{handle}")
    devices("nvmlDeviceGetHandleByUUID", lambda uuid: uuid.removeprefix("MIG-"))
    devices("nvmlDeviceGetName", lambda handle: "NVIDIA A100 MIG 3g.20gb")
    assert found(1) == []
    refused("2 ranks would use MIG instances such as NVIDIA A100 MIG 3g.20gb (MIG-0-0)", "hardware.devices and search")
    with pytest.raises(HardwareError, match="2 ranks would use MIG instances"):
        check_devices(probe_hardware(1, 2), 2)


def test_different_devices_are_told(devices: Change, caplog: pytest.LogCaptureFixture) -> None:
    devices("nvmlDeviceGetName", of_second("NVIDIA L4", "NVIDIA H200"))
    warned("the devices differ: NVIDIA H200, NVIDIA L4", "choose equal ones", caplog=caplog)


def test_too_little_shared_memory_is_told(
    devices: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_problems, "shared_memory_bytes", lambda: 64 << 20)
    warned("(/dev/shm) has 0.1 GiB", "--shm-size=16g", caplog=caplog)


def test_a_folder_for_temporary_files_that_is_too_long_for_sockets_is_told(
    devices: Change, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/" + 74 * "x")
    assert found() == []
    monkeypatch.setattr(tempfile, "tempdir", "/" + 75 * "x")
    warned("has a path of 76 characters, too long", "set TMPDIR to a folder with a path of at most 75", caplog=caplog)


def test_a_torch_without_cuda_is_refused_whatever_its_version_is_called(
    devices: Change, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_problems, "torch_build", lambda **_: TorchBuild(version="2.9.0", cuda=None))
    refused("torch 2.9.0 is built without CUDA and cannot use NVIDIA H200", "install torch's CUDA build")


@pytest.mark.parametrize(
    ("choice", "fault"),
    [
        ("1,GPU-stale,0", "GPU-stale, which is not one of the 2 devices here: its list ends there"),
        ("0,2", "2, which is not one of the 2 devices here"),
        ("0,-1,1", None),
        ("0,", None),
    ],
)
def test_an_entry_that_ends_the_list_of_devices_by_mistake_is_named(
    devices: Change, choice: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    problems = found(1)
    assert len(problems) == (fault is not None)
    assert all(f"CUDA_VISIBLE_DEVICES names {fault}" in message for message in problems)


@pytest.mark.parametrize("choice", ["2", "GPU-stale,0", "MIG-GPU-0/1/0", "0,0"])
def test_a_list_of_devices_that_leaves_none_by_mistake_is_refused(
    devices: Change, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    refused(
        f"CUDA_VISIBLE_DEVICES names {choice.split(',', maxsplit=1)[0]}, ",
        "no device is left",
        "set it to -1 for ranks on",
    )


@pytest.mark.parametrize("choice", ["", "-1", "none", "NoDevFiles"])
def test_a_list_of_devices_that_is_meant_to_leave_none_is_no_problem(
    devices: Change, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", choice)
    assert found() == []


# --- no device ---


def without_driver(monkeypatch: pytest.MonkeyPatch, code: int, build: TorchBuild = BUILD) -> list[str]:
    monkeypatch.setattr(device_problems, "torch_build", lambda **_: build)
    monkeypatch.setattr(pynvml, "nvmlInit", refuse(code))
    return found(1)


def test_a_driver_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = without_driver(monkeypatch, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    assert "driver does not answer (RM has detected an NVML/RM version mismatch.), so ranks run on the CPU" in message
    assert "restart the machine" in message


def test_a_missing_driver_is_told_where_torch_is_built_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (message,) = without_driver(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert "torch 2.13.0 is built for CUDA, but there is no driver of NVIDIA" in message
    assert "--gpus all" in message
    assert without_driver(monkeypatch, pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, TorchBuild(version="2.13.0+cpu")) == []


def test_the_installed_build_is_described_without_importing_torch() -> None:
    build = torch_build()
    assert build.version == software().torch
    assert (build.cuda is None) == build.version.endswith("+cpu")


# --- the command ---


def test_doctor_reports_all_problems(devices: Change, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("AUTOTUNE_DB_URL", f"sqlite:///{tmp_path}/autotune.db")
    open_store(f"sqlite:///{tmp_path}/autotune.db").close()
    devices("nvmlDeviceGetComputeMode", of_second(pynvml.NVML_COMPUTEMODE_PROHIBITED, 0))
    devices("nvmlDeviceGetName", of_second("NVIDIA L4", "NVIDIA H200"))
    answer = CliRunner().invoke(main, ["doctor", "--json"])
    assert answer.exit_code == 0, answer.output
    told = [finding["what"] for finding in json.loads(answer.stdout)["findings"]]
    assert [text.split(":")[0] for text in told] == [
        "NVIDIA L4 (GPU-1) is in compute mode prohibited, in which no process can use it",
        "the devices differ",
    ]
