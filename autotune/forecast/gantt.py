"""Text chart of a step: one row for each stage, time from left to right."""

import math

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.timeline import Timeline

WIDTH = 100
_FORWARD, _BACKWARD, _WEIGHTS = "0123456789", "ABCDEFGHIJ", "abcdefghij"
_IDLE, _UPDATE = ".", "#"
_TICKS = 6
"""Most ticks of the axis."""
_LEGEND = """\
0 to 9: forward pass of micro-batch 0, 1, ...; A to J: backward pass; both restart at 10
.: waiting, sending or receiving; #: reduction and optimizer"""


def gantt(timeline: Timeline, width: int = WIDTH) -> str:
    """Return rows of at most `width` columns.

    A column shows what a stage does in the middle of its time, so a pass shorter than a column may not appear.
    """
    label = len(f"stage {timeline.stages - 1} ")
    columns = width - label - 2
    # The middle of each column decides what it shows.
    middles = (np.arange(columns) + 0.5) * timeline.seconds / columns
    rows = [f"{f'stage {stage}':<{label}}|{_row(timeline, stage, middles)}|" for stage in range(timeline.stages)]
    return "\n".join((*rows, *(f"{'':<{label + 1}}{line}" for line in _axis(timeline.seconds, columns))))


def legend(timeline: Timeline) -> str:
    """Return what the characters of the chart mean."""
    return _LEGEND if timeline.weights is None else f"{_LEGEND}; a to j: deferred weight gradients"


def _row(timeline: Timeline, stage: int, middles: NDArray[np.float64]) -> str:
    row = np.full(len(middles), _IDLE)
    of_kinds = ((timeline.forward, _FORWARD), (timeline.backward, _BACKWARD), (timeline.weights, _WEIGHTS))
    for passes, letters in of_kinds:
        if passes is None:
            continue
        for number, (begins, ends) in enumerate(passes[:, stage]):
            row[(middles >= begins) & (middles < ends)] = letters[number % len(letters)]
    begins, ends = timeline.update[stage]
    row[(middles >= begins) & (middles < ends)] = _UPDATE
    return "".join(row)


def _axis(seconds: float, columns: int) -> tuple[str, str]:
    """Return (marks, numbers) at round times."""
    least = seconds / _TICKS
    power = 10.0 ** math.floor(math.log10(least))
    # The next 1, 2 or 5 times a power of ten; the margin keeps a rounding error from skipping one.
    step = next(digit * power for digit in (1, 2, 5, 10) if least <= digit * power * (1 + 1e-9))
    unit, scale = ("s", 1.0) if step >= 0.1 else ("ms", 1e3)
    marks, numbers = [" "] * columns, [" "] * (columns + 1)
    for tick in range(int(seconds / step) + 1):
        place = min(int(tick * step / seconds * columns), columns - 1)
        text = f"{tick * step * scale:g}" + (f" {unit}" if tick == 0 else "")
        if place + len(text) <= len(numbers):
            marks[place] = "'"
            numbers[place : place + len(text)] = text
    return "".join(marks).rstrip(), "".join(numbers).rstrip()
