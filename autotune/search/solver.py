"""The split and the recompute counts with the least predicted time that fit the memory, for a packing and a layout."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autotune.predict.predictor import Predictor
from autotune.predict.sizes import EpochSizes
from trials.model.cut import Cut
from trials.plan import Layout, Packing, Plan, Stage

_HEADROOM = 0.97
"""Share of the limit that a solved plan may be predicted to use: predictions err by a few per cent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What every plan of the search has to keep to."""

    vision_layers: int
    language_layers: int
    memory_bytes: int
    """Per rank."""

    @property
    def layers(self) -> int:
        return self.vision_layers + self.language_layers


def min_max_ends(layers: int, stages: int, seconds: Callable[[int, int, int], float]) -> tuple[int, ...] | None:
    """Where each stage ends when the slowest is fastest; of equally slow splits, the one with the least total.

    `seconds(stage, start, end)` is the time of the chain's layers start to end on that stage, infinite where they do
    not fit. None when every split has such a stage. Dynamic programming over (stages so far, layers so far).
    """
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for number in range(stages):
        last = number == stages - 1
        row = {}
        for end in range(layers if last else number + 1, layers - (stages - number) + 2):
            options = [
                (max(slowest, time), total + time, (*before, end))
                for start, (slowest, total, before) in best.items()
                if start < end and (time := seconds(number, start, end)) < math.inf
            ]
            if options:
                row[end] = min(options)
        best = row
    return best[layers][2] if layers in best else None


class Solver:
    """Exact for the slowest stage on the mean pack; the memory is that of the heaviest packs."""

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self._predictor = predictor
        self._limits = limits

    def solve(self, packing: Packing, layout: Layout) -> Plan | None:
        """The plan whose slowest stage is fastest, each stage recomputing just what the memory asks.

        None when no split fits.
        """
        sizes = self._predictor.sizes(packing, layout)

        def seconds(number: int, start: int, end: int) -> float:
            fitted = self._fit(layout, number, start, end, sizes)
            return math.inf if fitted is None else self._mean_seconds(fitted, sizes)

        ends = min_max_ends(self._limits.layers, layout.pipeline, seconds)
        return None if ends is None else self.fit(packing, layout, ends)

    def _mean_seconds(self, part: Cut, sizes: EpochSizes) -> float:
        """Forward and backward of the mean pack."""
        forward, backward = self._predictor.pass_seconds(part, sizes.mean)
        return float(forward[0] + backward[0])

    def fit(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        """The plan whose stages end after so many layers of the chain, with the fewest recomputed layers that fit."""
        sizes = self._predictor.sizes(packing, layout)
        fitted = [
            self._fit(layout, number, start, end, sizes) for number, (start, end) in enumerate(pairwise((0, *ends)))
        ]
        stages = tuple(_stage(part) for part in fitted if part is not None)
        return Plan(packing=packing, layout=layout, stages=stages) if len(stages) == len(fitted) else None

    def least_bytes(self, packing: Packing, layout: Layout) -> float:
        """What the fullest stage needs under the leanest split, with everything recomputed."""
        sizes = self._predictor.sizes(packing, layout)

        def needed(number: int, start: int, end: int) -> float:
            leanest = _more_and_more_recomputed(self.part(layout, number, start, end))[-1:]
            return float(self._predictor.stage_bytes(leanest, layout, number, sizes)[0])

        ends = min_max_ends(self._limits.layers, layout.pipeline, needed)
        assert ends is not None  # nothing needs infinitely much
        return max(needed(number, start, end) for number, (start, end) in enumerate(pairwise((0, *ends))))

    def _fit(self, layout: Layout, number: int, start: int, end: int, sizes: EpochSizes) -> Cut | None:
        """The stage with the fewest recomputed layers that fits the memory; None when none does."""
        parts = _more_and_more_recomputed(self.part(layout, number, start, end))
        needed = self._predictor.stage_bytes(parts, layout, number, sizes)
        fits = np.flatnonzero(needed <= self._limits.memory_bytes * _HEADROOM)
        return parts[int(fits[0])] if len(fits) else None

    def part(self, layout: Layout, number: int, start: int, end: int) -> Cut:
        """Chain layers start to end, vision layers first, as stage `number`, with nothing recomputed."""
        vision = self._limits.vision_layers
        return Cut(
            vision=range(min(start, vision), min(end, vision)),
            language=range(max(start - vision, 0), max(end - vision, 0)),
            recompute_vision=0,
            recompute_language=0,
            embeds=number == 0,
            projects=start < vision <= end,
            heads=number == layout.pipeline - 1,
        )


def _more_and_more_recomputed(part: Cut) -> list[Cut]:
    """From nothing recomputed to everything, vision layers first: they keep more for their time."""
    vision, language = len(part.vision), len(part.language)
    return [
        replace(part, recompute_vision=min(count, vision), recompute_language=max(0, count - vision))
        for count in range(vision + language + 1)
    ]


def _stage(part: Cut) -> Stage:
    return Stage(
        vision=len(part.vision),
        language=len(part.language),
        recompute_vision=part.recompute_vision,
        recompute_language=part.recompute_language,
    )
