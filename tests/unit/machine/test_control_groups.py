"""Limits of control groups, from files as the kernel writes them, and from the kernel where root can make a group."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from trials.machine.control_groups import KillsForMemory, core_quotas, memory_limits, usable_cores

_TREE = Path("/sys/fs/cgroup/cpu")


def test_memory_is_limited_by_every_control_group_around(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "outer" / "memory.max").write_text("1024\n")
    assert list(memory_limits("0::/outer/inner\n", tmp_path)) == [1024]


def test_version_1_control_groups_have_a_tree_of_their_own(tmp_path: Path) -> None:
    group = tmp_path / "memory" / "job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("2048\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("4096\n")
    membership = "5:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job\n1:name=systemd:/\n"
    assert list(memory_limits(membership, tmp_path)) == [2048, 4096]


def test_a_container_sees_the_limit_at_the_mount_only(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("512\n")
    assert list(memory_limits("0::/docker/of/the/host\n", tmp_path)) == [512]


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert not list(memory_limits("", tmp_path))


def test_a_quota_of_cores_is_that_of_every_control_group_around(tmp_path: Path) -> None:
    inner = tmp_path / "outer" / "inner"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    (tmp_path / "outer" / "cpu.max").write_text("150000 100000\n")
    assert list(core_quotas("0::/outer/inner\n", tmp_path)) == [1.5]


def test_version_1_quotas_have_a_file_for_the_period(tmp_path: Path) -> None:
    group = tmp_path / "cpu" / "job"
    group.mkdir(parents=True)
    for folder, quota in ((group, 200_000), (tmp_path / "cpu", -1)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (folder / "cpu.cfs_period_us").write_text("50000\n")
    assert list(core_quotas("5:cpu,cpuacct:/job\n4:memory:/elsewhere\n", tmp_path)) == [4.0]


@pytest.mark.parametrize(
    ("membership", "group", "file"),
    [
        ("0::/slice/job\n", "slice/job", "memory.events"),
        ("0::/docker/of/the/host\n", "", "memory.events"),
        ("5:cpu:/elsewhere\n4:memory:/job\n0::/\n", "memory/job", "memory.oom_control"),
    ],
    ids=["version 2", "container", "version 1"],
)
def test_kills_for_memory_are_those_in_the_own_group(tmp_path: Path, membership: str, group: str, file: str) -> None:
    def count(folder: Path, number: int) -> None:
        (folder / file).write_text(f"oom_kill_disable 0\noom 5\noom_kill {number}\n")

    (tmp_path / group / "other").mkdir(parents=True)
    count(tmp_path / group, 3)
    count(tmp_path / group / "other", 0)
    kills = KillsForMemory(membership, tmp_path)
    count(tmp_path / group / "other", 1)
    assert not kills.any
    count(tmp_path / group, 4)
    assert kills.any


@pytest.fixture
def group() -> Iterator[Path]:
    """Return a group of the kernel's, without limits."""
    folder = _TREE / f"autotune-test-{uuid4().hex[:8]}"
    if os.geteuid() != 0 or not (_TREE / "cgroup.procs").exists():
        pytest.skip("making a group of version 1 needs root")
    folder.mkdir()
    try:
        yield folder
    finally:
        folder.rmdir()


def test_a_process_under_a_quota_counts_whole_cores_of_it(group: Path) -> None:
    join = "import sys; open(sys.argv[1], 'w').write('0')"
    program = f"{join}; from trials.machine.control_groups import usable_cores as cores; print(cores())"
    command = [sys.executable, "-c", program, str(group / "cgroup.procs")]
    for quota, expected in ((20_000, 1), (100_000, 1), (-1, usable_cores())):
        (group / "cpu.cfs_quota_us").write_text(str(quota))
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(found.stdout) == expected
