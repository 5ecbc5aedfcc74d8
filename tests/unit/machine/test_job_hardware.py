"""The devices of a job on this machine, which has no accelerator in these tests."""

import os
from pathlib import Path

import pytest

from autotune.machine.hardware import probe_hardware
from autotune.machine.job_hardware import hardware_of
from tests.values.training import job_of

CORES = len(os.sched_getaffinity(0))


@pytest.fixture(autouse=True)
def without_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize(
    ("devices", "groups", "remedy"),
    [
        (CORES + 1, 1, f"set hardware.devices to {CORES} or less"),
        (CORES, 2, f"set hardware.devices to {max(1, CORES // 2)} or less, or lower search.parallel"),
    ],
)
def test_a_job_with_more_ranks_than_cores_is_warned_of(
    devices: int, groups: int, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    job = job_of(Path(), Path(), hardware={"devices": devices}, search={"parallel": groups})
    assert hardware_of(job).devices == devices
    *_, warning = caplog.messages
    assert warning == f"{devices * groups} ranks share {CORES} CPU cores, so measured times are unreliable; {remedy}"


def test_a_job_with_as_many_ranks_as_cores_is_fine(caplog: pytest.LogCaptureFixture) -> None:
    hardware_of(job_of(Path(), Path(), hardware={"devices": CORES}))
    assert not caplog.records


def test_a_machine_without_a_job_is_described_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert probe_hardware(CORES + 1).devices == CORES + 1
    assert not caplog.records
