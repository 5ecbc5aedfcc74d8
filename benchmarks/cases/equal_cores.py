"""Ranks that have an equal share of a core each, which a rank that waits does not leave to another.

More ranks than cores share them: what a rank takes depends on whether others wait. Devices have no such thing.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from trials.launchers.local import LocalLauncher, LocalRanks

_CONTROLLER = Path("/sys/fs/cgroup/cpu")
"""Where control groups of version 1 limit the time on a core."""
_QUOTA_MICROSECONDS = 1000
"""In each period: the least that Linux takes, so that a layer meets the mean speed."""
_LEFT = 0.1
"""Share of the cores that is left to other processes."""


class EqualCores:
    """Launcher of ranks on this machine that have as much of a core each, and never more."""

    def __init__(self, launcher: LocalLauncher, groups: tuple[Path, ...]) -> None:
        self._launcher = launcher
        self._groups = groups

    @property
    def world_size(self) -> int:
        return self._launcher.world_size

    def start(self) -> LocalRanks:
        ranks = self._launcher.start()
        while not ranks.pids:
            time.sleep(0.01)
        for pid, group in zip(ranks.pids, self._groups, strict=True):
            (group / "cgroup.procs").write_text(str(pid))
        return ranks


@contextmanager
def equal_cores(launcher: LocalLauncher) -> Iterator[EqualCores]:
    """Make a control group for each rank. Their processes must have ended when the context does."""
    cores = psutil.cpu_count() or 1
    share = min((1 - _LEFT) * cores / launcher.world_size, 1.0)
    groups = tuple(_CONTROLLER / f"autotune-rank-{rank}" for rank in range(launcher.world_size))
    try:
        for group in groups:
            group.mkdir(exist_ok=True)  # a benchmark that was killed leaves it
            (group / "cpu.cfs_period_us").write_text(str(round(_QUOTA_MICROSECONDS / share)))
            (group / "cpu.cfs_quota_us").write_text(str(_QUOTA_MICROSECONDS))
        yield EqualCores(launcher, groups)
    finally:
        for group in groups:
            group.rmdir()
