"""Speeds over windows of steps, and where the time of their steps goes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from trials.outcome import Measurement
from trials.tasks.training.progress import Progress, RankTimes

# A choice: windows grow with the launch, so that its table and chart stay readable.
MOST_WINDOWS = 256
"""Stored windows of the final length in a launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Where the time of a step goes, in seconds per text token: steps with longer samples are not slower by it."""

    seconds: float
    times: RankTimes

    @classmethod
    def of_measurement(cls, measured: Measurement) -> Self:
        """Return that of the timed steps of a trial."""
        times = RankTimes.of(
            [rank.stage for rank in measured.stages],
            [rank.load_seconds for rank in measured.stages],
            [rank.forward_seconds + rank.backward_seconds for rank in measured.stages],
        )
        return cls(
            seconds=sum(measured.step_seconds) / measured.text_tokens,
            times=times.times(len(measured.step_seconds) / measured.text_tokens),
        )

    def of_step(self, tokens: float) -> "StepTimes":
        """Return the seconds of a step with this number of tokens."""
        return StepTimes(seconds=self.seconds * tokens, times=self.times.times(tokens))

    @property
    def other_seconds(self) -> float:
        """Time of the busiest rank besides loading and passes: communication and the update."""
        return self.seconds - self.times.busy_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedWindow:
    """Consecutive steps of a launch. Some of their samples have text tokens."""

    first_step: int
    last_step: int
    step_seconds: tuple[float, ...]
    samples: int
    text_tokens: int
    times: RankTimes
    """Means over the steps."""

    @classmethod
    def of(cls, steps: Sequence[Progress], times: RankTimes) -> Self:
        return cls(
            first_step=steps[0].step,
            last_step=steps[-1].step,
            step_seconds=tuple(step.seconds for step in steps),
            samples=sum(step.samples for step in steps),
            text_tokens=sum(step.text_tokens for step in steps),
            times=times,
        )

    @classmethod
    def joined(cls, windows: Sequence["SpeedWindow"]) -> Self:
        """Return consecutive windows as one."""
        return cls(
            first_step=windows[0].first_step,
            last_step=windows[-1].last_step,
            step_seconds=tuple(seconds for window in windows for seconds in window.step_seconds),
            samples=sum(window.samples for window in windows),
            text_tokens=sum(window.text_tokens for window in windows),
            times=RankTimes.mean([each.times for each in windows], [len(each.step_seconds) for each in windows]),
        )

    @property
    def steps(self) -> int:
        return len(self.step_seconds)

    @property
    def seconds(self) -> float:
        return sum(self.step_seconds)

    @property
    def training_samples_per_second(self) -> float:
        return self.samples / self.seconds

    @property
    def tokens_per_second(self) -> float:
        return self.text_tokens / self.seconds

    @property
    def tokens_per_sample(self) -> float:
        return self.text_tokens / self.samples

    @property
    def step_times(self) -> StepTimes:
        tokens_of_step = self.text_tokens / self.steps
        return StepTimes(seconds=1 / self.tokens_per_second, times=self.times.times(1 / tokens_of_step))


class WindowJoiner:
    """Windows of one launch, joined to those that are stored: a few hundred for any length of training.

    Their lengths double, from that of the first window, until 256 of them are as long as the launch.
    """

    def __init__(self) -> None:
        self._waiting: list[SpeedWindow] = []
        self._steps = self._length = 0

    def add(self, window: SpeedWindow, launch_steps: int) -> SpeedWindow | None:
        """Return the window that ends with this one, if it is long enough. The launch has `launch_steps` in all."""
        self._length = self._length or window.steps
        self._waiting.append(window)
        self._steps += window.steps
        if self._steps < self._length:
            return None
        # A multiple of the windows that come in, so that none is split.
        longest = math.ceil(launch_steps / MOST_WINDOWS / window.steps) * window.steps
        self._length = min(2 * self._length, max(longest, window.steps))
        return self.rest()

    def rest(self) -> SpeedWindow | None:
        """Return what is left as one window; None where nothing is."""
        waiting, self._waiting, self._steps = self._waiting, [], 0
        return SpeedWindow.joined(waiting) if waiting else None
