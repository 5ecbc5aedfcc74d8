"""The speed of a training over windows of steps, next to the promised one, and the part that makes it slower."""

import logging
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.training.speed_window import SpeedWindow, StepTimes, WindowJoiner
from storage.launch_speed import Growth, LaunchWindow, StepParts
from trials.plan import Layout
from trials.tasks.request import WINDOW_STEPS
from trials.tasks.training.progress import Progress
from trials.units import speed_text

_log = logging.getLogger(__name__)

_COMMON_SHARE = 0.5
"""Least growth of a stage's median passes, as a share of the greatest of all, with which all ranks are slower."""
_OUTLIER = 2.0
"""Growth of the slowest rank of a stage, over the median one, above which it is not that of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much slower than promised a training must be, and for how long."""

    window_steps: int = WINDOW_STEPS
    windows: int = 5
    """Consecutive windows that must all be slow, so that one long pause is not taken for a drift."""
    slowdown: float = 0.1
    """Share of the promised speed that a slow window lacks, at least."""


PATIENCE = Patience()


def greatest_growth(layout: Layout, usual: StepTimes, now: StepTimes) -> Growth:
    """Return the part that grew most, in seconds."""
    return max(_growths(layout, usual, now), key=lambda growth: growth.seconds - growth.usual_seconds)


def _growths(layout: Layout, usual: StepTimes, now: StepTimes) -> Iterator[Growth]:
    yield Growth(part="loading", usual_seconds=usual.times.loads.greatest, seconds=now.times.loads.greatest)
    yield Growth(part="communication", usual_seconds=usual.other_seconds, seconds=now.other_seconds)
    stages = list(zip(usual.times.passes, now.times.passes, strict=True))
    least = min(after.median / before.median for before, after in stages) - 1
    most = max(after.greatest / before.greatest for before, after in stages) - 1
    # All ranks became slower about alike, as by other load or lower clocks: no stage or rank is the reason.
    if layout.world_size > 1 and least > _COMMON_SHARE * most > 0:
        before, after = (max(stage.greatest for stage in step_times.times.passes) for step_times in (usual, now))
        yield Growth(part="computing on all ranks", usual_seconds=before, seconds=after)
        return
    for number, (then, this) in enumerate(stages):
        of_stage = f" of stage {number}" if layout.pipeline > 1 else ""
        common, greatest = this.median - then.median, this.greatest - then.greatest
        if layout.world_size == layout.pipeline or greatest > _OUTLIER * common:
            part = f"computing on rank {this.rank}{of_stage}"
            yield Growth(part=part, usual_seconds=then.greatest, seconds=this.greatest)
        else:
            part = f"computing on the ranks{of_stage}"
            yield Growth(part=part, usual_seconds=then.median, seconds=this.median)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The speed that a plan is expected to have in a training, and what it is made of."""

    tokens_per_second: float
    step_times: StepTimes | None
    """Step times of a trial of the plan; None where no trial of it is stored."""


def growth_of(layout: Layout, promise: Promise, window: SpeedWindow) -> Growth | None:
    """Return the part of a step that grew most in the window.

    None where the parts of the promise are not known, and where none grew: the trial of the plan was slow by itself.
    """
    if promise.step_times is None:
        return None
    tokens = window.text_tokens / window.steps
    found = greatest_growth(layout, promise.step_times.of_step(tokens), window.step_times.of_step(tokens))
    return found if found.seconds > found.usual_seconds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A training that has been slower than promised for some time."""

    step: int
    """Total optimizer steps when it was found."""
    steps: int
    """Slow steps until then."""
    training_samples_per_second: float
    """Speed over these steps."""
    tokens_per_sample: float
    """Text tokens of a sample of these steps."""
    promised_samples_per_second: float
    """Promised speed for samples of as many tokens."""
    growth: Growth | None
    """None where the parts of the promised speed are not known."""

    def __str__(self) -> str:
        change = self.training_samples_per_second / self.promised_samples_per_second - 1
        text = (
            f"the training is slower: {speed_text(self.training_samples_per_second)} instead of "
            f"{speed_text(self.promised_samples_per_second)} samples/s ({change:+.0%}) over the {self.steps} steps to "
            f"{self.step}"
        )
        if self.growth is None:
            return text
        return f"{text}; what grew most is {self.growth}"


class SpeedWatch:
    """Watch on the speed of one launch. It passes windows on, and reports a drift once until the speed is back."""

    def __init__(
        self,
        layout: Layout,
        promise: Promise | None,
        patience: Patience,
        *,
        on_drift: Callable[[Drift, Progress], None],
        on_window: Callable[[LaunchWindow], None],
        last_step: int | None = None,
        curriculum_steps: int = 0,
    ) -> None:
        """Compare with the `promise`, or without a promise with the first windows of the launch.

        Windows with any of the first `curriculum_steps` are not compared: a token of short samples may take longer.
        `on_drift` is called with the last step of the drift, and `on_window` with each window to be stored. The launch
        stops after `last_step`, if that is before the end of the training.
        """
        self._layout = layout
        self._promise, self._usual = promise, promise
        self._patience = patience
        self._on_drift, self._on_window = on_drift, on_window
        self._last_step = last_step
        self._curriculum_steps = curriculum_steps
        self._launch = ""
        self._first_step = 0
        self._steps: list[Progress] = []
        """Steps of the present window."""
        self._windows: list[SpeedWindow] = []
        """Windows that are compared with the promise, oldest first."""
        self._joiner = WindowJoiner()
        self.is_slow = False
        """Whether the last windows are a drift, which is reported."""

    def step(self, step: Progress, launch: str) -> None:
        """Note the next step of the launch. The first one warms up, and does not count."""
        if not self._first_step:
            self._launch, self._first_step = launch, step.step
            return
        self._steps.append(step)
        if step.window is None:
            return
        window, self._steps = SpeedWindow.of(self._steps, step.window), []
        if not window.text_tokens:  # nothing to compare
            return
        # A shorter one is the last.
        if window.steps == self._patience.window_steps and self._is_comparable(window):
            self._judge(window, step)
        launch_steps = min(step.of, self._last_step or step.of) - self._first_step
        self._store(self._joiner.add(window, launch_steps))

    def end(self) -> None:
        """Pass on what is left at the end of the launch."""
        self._store(self._joiner.rest())

    def _store(self, window: SpeedWindow | None) -> None:
        if window is None:
            return
        seconds = window.step_times.of_step(window.text_tokens / window.steps)
        usual, promise = (self._usual, self._promise) if self._is_comparable(window) else (None, None)
        parts = StepParts(
            loads=seconds.times.loads,
            passes=seconds.times.passes,
            other_seconds=seconds.other_seconds,
            growth=growth_of(self._layout, usual, window) if usual and self._is_slow(window, usual) else None,
        )
        stored = LaunchWindow(
            launch_id=self._launch,
            first_step=window.first_step,
            last_step=window.last_step,
            step_seconds=statistics.median(window.step_seconds),
            training_samples_per_second=window.training_samples_per_second,
            tokens_per_second=window.tokens_per_second,
            promised_samples_per_second=None
            if promise is None
            else promise.tokens_per_second / window.tokens_per_sample,
            parts=parts,
        )
        self._on_window(stored)

    def _is_comparable(self, window: SpeedWindow) -> bool:
        return window.first_step > self._curriculum_steps

    def _is_slow(self, window: SpeedWindow, usual: Promise) -> bool:
        # By tokens, since steps with longer samples take longer on a machine that is as fast as before.
        return window.tokens_per_second < (1 - self._patience.slowdown) * usual.tokens_per_second

    def _judge(self, window: SpeedWindow, step: Progress) -> None:
        """Judge a window, which ends with this step."""
        self._windows.append(window)
        if self._usual is None:
            if len(self._windows) == self._patience.windows:
                step_times, self._windows = SpeedWindow.joined(self._windows).step_times, []
                self._usual = Promise(tokens_per_second=1 / step_times.seconds, step_times=step_times)
            return
        usual = self._usual
        if not self._is_slow(window, usual):
            if self.is_slow:
                _log.warning("the training is no longer slower, since step %d", window.first_step)
            self._windows, self.is_slow = [], False
            return
        # One slow window may be an accident; several in a row are a drift.
        if len(self._windows) < self._patience.windows:
            return
        # Moves on by one window, so that the next one decides with those before it.
        slow, self._windows = SpeedWindow.joined(self._windows), self._windows[1:]
        if self.is_slow:
            return
        self.is_slow = True
        found = Drift(
            step=step.step,
            steps=slow.steps,
            training_samples_per_second=slow.training_samples_per_second,
            tokens_per_sample=slow.tokens_per_sample,
            promised_samples_per_second=usual.tokens_per_second / slow.tokens_per_sample,
            growth=growth_of(self._layout, usual, slow),
        )
        self._on_drift(found, step)
