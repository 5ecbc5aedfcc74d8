"""The time of every rank over windows of steps, on each rank."""

import torch

from trials.plan import Layout
from trials.tasks.training.progress import RankTimes

_DIGITS = 6
"""Decimal places of the seconds."""


class RankClock:
    """Sums over the present window of a launch. The first step of the launch warms up, and does not count."""

    def __init__(self, layout: Layout, window_steps: int) -> None:
        self._stages = [layout.grid.coordinates(rank).stage for rank in range(layout.world_size)]
        self._window_steps = window_steps
        self._sums: torch.Tensor | None = None
        self._steps = 0

    def add(self, times: torch.Tensor, *, is_last: bool) -> RankTimes | None:
        """Add a step, [ranks, 2]: seconds of loading and of passes. Return the means of a window that ends with it.

        The last step of a launch, as before a stop, ends its window, which may be shorter than others.
        """
        if self._sums is None:
            self._sums = torch.zeros_like(times, dtype=torch.float64)
            return None
        self._sums += times
        self._steps += 1
        if self._steps < self._window_steps and not is_last:
            return None
        loads, passes = (self._sums / self._steps).round(decimals=_DIGITS).T.tolist()
        self._sums, self._steps = torch.zeros_like(self._sums), 0
        return RankTimes.of(self._stages, loads, passes)
