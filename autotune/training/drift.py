"""The speed of a training over windows of steps, next to the promised one, and the part that makes it slower."""

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from trials.outcome import Measurement
from trials.plan import Layout
from trials.tasks.training.progress import SPEED_FILE, Progress, Window, append_line

_log = logging.getLogger(__name__)

_COMMON_SHARE = 0.5
"""Least growth of a rank's passes, as a share of the greatest one, with which all ranks have become slower."""
_OUTLIER = 2.0
"""Growth of a rank's passes, over the median of the others of its stage, above which it is not that of the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How much slower than promised a training must be, and for how long."""

    window_steps: int = 10
    windows: int = 5
    """Consecutive windows that must all be slow, so that one long pause is not taken for a drift."""
    slowdown: float = 0.1
    """Share of the promised speed that a slow window lacks, at least."""


PATIENCE = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Where the time of a step goes, in seconds per text token: steps with longer samples are not slower by it."""

    seconds: float
    loads: tuple[float, ...]
    """Of each rank, in order of rank."""
    passes: tuple[float, ...]
    """Forward and backward passes of each rank."""

    @classmethod
    def of_measurement(cls, measured: Measurement) -> Self:
        """Return that of the timed steps of a trial."""
        per_step = len(measured.step_seconds) / measured.text_tokens
        return cls(
            seconds=sum(measured.step_seconds) / measured.text_tokens,
            loads=tuple(rank.load_seconds * per_step for rank in measured.stages),
            passes=tuple((rank.forward_seconds + rank.backward_seconds) * per_step for rank in measured.stages),
        )

    @classmethod
    def of_steps(cls, steps: Sequence[Progress]) -> Self:
        """Return that of steps of a training."""
        tokens = sum(step.text_tokens for step in steps)
        loads, passes = (step.rank_load_seconds for step in steps), (step.rank_pass_seconds for step in steps)
        return cls(
            seconds=sum(step.seconds for step in steps) / tokens,
            loads=tuple(sum(of_rank) / tokens for of_rank in zip(*loads, strict=True)),
            passes=tuple(sum(of_rank) / tokens for of_rank in zip(*passes, strict=True)),
        )

    def times(self, tokens: float) -> Self:
        """Return the seconds of a step with this number of tokens."""
        return replace(
            self,
            seconds=self.seconds * tokens,
            loads=tuple(each * tokens for each in self.loads),
            passes=tuple(each * tokens for each in self.passes),
        )

    @property
    def other_seconds(self) -> float:
        """Time of the busiest rank besides loading and passes: communication and the update."""
        return self.seconds - max(map(sum, zip(self.loads, self.passes, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A part of a step that takes longer than it did."""

    part: str
    """In words: loading, a stage, a rank, all ranks, or communication."""
    usual_seconds: float
    """Of a step."""
    seconds: float
    """Of a step."""

    def __str__(self) -> str:
        return f"{self.part}: {self.seconds:.3g} s a step instead of {self.usual_seconds:.3g} s"


def greatest_growth(layout: Layout, usual: Pace, now: Pace) -> Growth:
    """Return the part that grew most, in seconds."""
    return max(_growths(layout, usual, now), key=lambda growth: growth.seconds - growth.usual_seconds)


def _growths(layout: Layout, usual: Pace, now: Pace) -> Iterator[Growth]:
    yield Growth(part="loading", usual_seconds=max(usual.loads), seconds=max(now.loads))
    yield Growth(part="communication", usual_seconds=usual.other_seconds, seconds=now.other_seconds)
    ratios = [after / before for before, after in zip(usual.passes, now.passes, strict=True)]
    # All ranks became slower about alike, as by other load or lower clocks: no stage or rank is the reason.
    if len(ratios) > 1 and min(ratios) - 1 > _COMMON_SHARE * (max(ratios) - 1) > 0:
        yield Growth(part="computing on all ranks", usual_seconds=max(usual.passes), seconds=max(now.passes))
        return
    for stage in range(layout.pipeline):
        ranks = list(layout.grid.stage_ranks(stage))
        grown = {rank: now.passes[rank] - usual.passes[rank] for rank in ranks}
        slowest = max(ranks, key=grown.__getitem__)
        others = [grown[rank] for rank in ranks if rank != slowest]
        of_stage = f" of stage {stage}" if layout.pipeline > 1 else ""
        if not others or grown[slowest] > _OUTLIER * statistics.median(others):
            ranks, part = [slowest], f"computing on rank {slowest}{of_stage}"
        else:
            part = f"computing on the ranks{of_stage}"
        before, after = (statistics.fmean(pace.passes[rank] for rank in ranks) for pace in (usual, now))
        yield Growth(part=part, usual_seconds=before, seconds=after)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """The speed that a plan is expected to have in a training, and what it is made of."""

    tokens_per_second: float
    pace: Pace | None
    """Of a trial of the plan; None where no trial of it is stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A training that has been slower than promised for some time."""

    step: int
    """Total optimizer steps when it was found."""
    steps: int
    """Slow steps until then."""
    samples_per_second: float
    """Over these steps."""
    promised_samples_per_second: float
    """For samples of as many tokens."""
    growth: Growth | None
    """None where the parts of the promised speed are not known."""

    def __str__(self) -> str:
        change = self.samples_per_second / self.promised_samples_per_second - 1
        text = (
            f"the training is slower: {self.samples_per_second:.1f} instead of "
            f"{self.promised_samples_per_second:.1f} samples/s ({change:+.0%}) over the {self.steps} steps to "
            f"{self.step}"
        )
        if self.growth is None:
            return text
        return f"{text}; what grew most is {self.growth}"


class SpeedWatch:
    """Watch on the speed of one launch. It stores each window, and reports a drift once until the speed is back."""

    def __init__(
        self,
        layout: Layout,
        promise: Promise | None,
        on_drift: Callable[[Drift, Progress], None],
        patience: Patience,
    ) -> None:
        """Compare with the `promise`; without one, with the first windows of the launch.

        `on_drift` is called with the last step of the drift.
        """
        self._layout = layout
        self._promise, self._usual = promise, promise
        self._on_drift = on_drift
        self._patience = patience
        self._is_warm = False
        self._steps: list[Progress] = []
        """Of the windows that count, and of the present one."""
        self.is_slow = False
        """Whether the last windows are a drift, which is reported."""

    def step(self, step: Progress, launch: str, output: Path) -> None:
        """Note the next step of the launch. The first one warms up, and does not count."""
        if not self._is_warm:
            self._is_warm = True
            return
        if not step.text_tokens:  # nothing to compare
            return
        self._steps.append(step)
        size = self._patience.window_steps
        if len(self._steps) % size:
            return
        last = self._steps[-size:]
        promised = None if self._promise is None else self._promise.tokens_per_second / _tokens_per_sample(last)
        window = Window(
            launch=launch,
            step=step.step,
            steps=size,
            samples_per_second=_samples_per_second(last),
            promised_samples_per_second=promised,
        )
        append_line(output / SPEED_FILE, window)
        self._judge(step)

    def _judge(self, step: Progress) -> None:
        """Judge the window that ends with this step."""
        size, whole = self._patience.window_steps, self._patience.window_steps * self._patience.windows
        if self._usual is None:
            if len(self._steps) == whole:
                pace, self._steps = Pace.of_steps(self._steps), []
                self._usual = Promise(tokens_per_second=1 / pace.seconds, pace=pace)
            return
        usual = self._usual
        if 1 / Pace.of_steps(self._steps[-size:]).seconds >= (1 - self._patience.slowdown) * usual.tokens_per_second:
            if self.is_slow:
                _log.warning("the training is no longer slower, since step %d", step.step - size + 1)
            self._steps, self.is_slow = [], False
            return
        if len(self._steps) < whole:
            return
        # Moves on by one window, so that the next one decides with those before it.
        slow, self._steps = self._steps, self._steps[size:]
        if self.is_slow:
            return
        self.is_slow = True
        tokens = sum(each.text_tokens for each in slow) / len(slow)
        pace = Pace.of_steps(slow).times(tokens)
        found = Drift(
            step=step.step,
            steps=len(slow),
            samples_per_second=_samples_per_second(slow),
            promised_samples_per_second=usual.tokens_per_second / _tokens_per_sample(slow),
            growth=None if usual.pace is None else greatest_growth(self._layout, usual.pace.times(tokens), pace),
        )
        self._on_drift(found, step)


def _samples_per_second(steps: Sequence[Progress]) -> float:
    return sum(step.samples for step in steps) / sum(step.seconds for step in steps)


def _tokens_per_sample(steps: Sequence[Progress]) -> float:
    return sum(step.text_tokens for step in steps) / sum(step.samples for step in steps)
