"""Ranks with an equal share of the cores each, on which a benchmark compares plans."""

import os
from pathlib import Path

import psutil
import pytest

from benchmarks.cases.equal_cores import equal_cores
from trials.launchers.local import LocalLauncher

CONTROLLER = Path("/sys/fs/cgroup/cpu")

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not os.access(CONTROLLER, os.W_OK), reason="there are no control groups of version 1 to write"),
]


def group_of(pid: int) -> Path:
    """Return the control group that limits a process's time on the cores."""
    lines = (line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    return CONTROLLER / Path(next(group for _, controllers, group in lines if "cpu" in controllers.split(","))).name


def limit(group: Path) -> float:
    """Return the cores' time that the group allows."""
    quota, period = (int((group / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    return quota / period


def test_each_rank_has_a_group_with_its_share_of_the_cores_until_the_end(tmp_path: Path) -> None:
    with equal_cores(LocalLauncher(tmp_path / "ranks", 2, "cpu")) as launcher:
        ranks = launcher.start()
        try:
            groups = [group_of(pid) for pid in ranks.pids]
            limits = [limit(group) for group in groups]
        finally:
            ranks.end()
    assert len(set(groups)) == launcher.world_size == 2
    assert limits == pytest.approx([min(0.45 * (psutil.cpu_count() or 1), 1.0)] * 2, rel=1e-3)
    assert not any(group.exists() for group in groups)
