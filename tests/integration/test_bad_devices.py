"""Commands that start ranks look at the devices first."""

from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from autotune.machine import device_problems, hardware
from autotune.machine.device_problems import TorchBuild
from autotune.machine.hardware import software
from tests.machines.simulated_nvml import simulate
from tests.programs.users import JobFile, databases, refusal


@pytest.mark.parametrize("command", ["tune", "launch"])
def test_a_device_that_no_process_can_use_is_refused_before_anything_is_written(
    command: str, home: Path, job: JobFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(hardware, "software", lambda: replace(software(), torch="2.13.0"))
    monkeypatch.setattr(device_problems, "torch_build", lambda **_: TorchBuild(version="2.13.0", cuda=(13, 0)))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeMode", lambda handle: pynvml.NVML_COMPUTEMODE_PROHIBITED)
    code, message = refusal(command, job.spoil(hardware__devices=1, model__dtype="bfloat16"))
    assert (code, databases(home)) == (2, [])
    assert "NVIDIA 0 (GPU-0) is in compute mode prohibited" in message
    assert "nvidia-smi -i GPU-0 -c DEFAULT" in message
