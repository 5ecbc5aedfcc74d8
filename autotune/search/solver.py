"""The split and the recompute counts with the least predicted time that fit the memory, for a packing and a layout."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autotune.predict.costs import Array
from autotune.predict.parts import LANGUAGE, VISION, Parts
from autotune.predict.predictor import Predictor
from autotune.predict.sizes import EpochSizes
from trials.data.sample import Ints
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Cuts:
    """Contiguous parts of the chain, vision layers first: layers starts[i] to ends[i]."""

    starts: Ints
    ends: Ints

    @classmethod
    def possible(cls, layers: int, number: int, stages: int) -> "_Cuts":
        """All that stage `number` can hold when every stage holds a layer."""
        starts, ends = np.triu_indices(layers + 1, 1)
        after = stages - 1 - number
        possible = (starts >= number) & (ends <= layers - after)
        possible &= (starts == 0) | (number > 0)
        possible &= (ends == layers) | (after > 0)
        return cls(starts=starts[possible], ends=ends[possible])

    @property
    def lengths(self) -> Ints:
        return self.ends - self.starts

    def __getitem__(self, rows: Ints) -> "_Cuts":
        return _Cuts(starts=self.starts[rows], ends=self.ends[rows])


def min_max_ends(seconds: Array) -> tuple[int, ...] | None:
    """Where each stage ends when the slowest is fastest; of equally slow splits, the one with the least total.

    `seconds` is [stages, layers + 1, layers + 1]: the time of the chain's layers start to end on a stage, infinite
    where they do not fit. None when every split has such a stage. Dynamic programming over (stages so far, layers so
    far), first for the slowest stage and then for the total.
    """
    slowest, total = np.full((2, seconds.shape[2]), np.inf)
    slowest[0] = total[0] = 0.0
    for of_stage in seconds:
        slowest = np.maximum(slowest[:, None], of_stage).min(axis=0)
    if slowest[-1] == np.inf:
        return None
    starts = []
    for of_stage in np.where(seconds <= slowest[-1], seconds, np.inf):
        sums = total[:, None] + of_stage
        starts.append(sums.argmin(axis=0))
        total = sums.min(axis=0)
    ends = [len(total) - 1]
    for starts_of_stage in reversed(starts[1:]):
        ends.append(int(starts_of_stage[ends[-1]]))
    return tuple(reversed(ends))


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

        def seconds(number: int, cuts: _Cuts) -> Array:
            fewest = self._fewest_recomputed(layout, number, cuts, sizes)
            forward, backward = self._predictor.pass_seconds(self._parts(layout, number, cuts, fewest), sizes.mean)
            return np.where(fewest >= 0, forward[0] + backward[0], np.inf)

        ends = min_max_ends(self._over_all_cuts(layout, seconds))
        return None if ends is None else self.fit(packing, layout, ends)

    def fit(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        """The plan whose stages end after so many layers of the chain, with the fewest recomputed layers that fit."""
        sizes = self._predictor.sizes(packing, layout)
        stages = []
        for number, (start, end) in enumerate(pairwise((0, *ends))):
            cuts = _Cuts(starts=np.array([start]), ends=np.array([end]))
            fewest = self._fewest_recomputed(layout, number, cuts, sizes)
            if fewest[0] < 0:
                return None
            stages.append(_stage(self._parts(layout, number, cuts, fewest)))
        return Plan(packing=packing, layout=layout, stages=tuple(stages))

    def forward_ends(self, packing: Packing, layout: Layout) -> tuple[int, ...]:
        """Where the stages end when the slowest stage's forward time on the mean pack is least, memory aside."""
        mean = self._predictor.sizes(packing, layout).mean

        def seconds(number: int, cuts: _Cuts) -> Array:
            nothing = np.zeros_like(cuts.starts)
            forward, _ = self._predictor.pass_seconds(self._parts(layout, number, cuts, nothing), mean)
            of_mean: Array = forward[0]
            return of_mean

        ends = min_max_ends(self._over_all_cuts(layout, seconds))
        assert ends is not None  # no stage takes for ever
        return ends

    def least_bytes(self, packing: Packing, layout: Layout) -> float:
        """What the fullest stage needs under the leanest split, with everything recomputed."""
        sizes = self._predictor.sizes(packing, layout)

        def needed(number: int, cuts: _Cuts) -> Array:
            leanest = self._parts(layout, number, cuts, cuts.lengths)
            return self._predictor.stage_bytes(leanest, layout, number, sizes)

        of_cuts = self._over_all_cuts(layout, needed)
        ends = min_max_ends(of_cuts)
        assert ends is not None  # nothing needs infinitely much
        return max(float(of_cuts[number, start, end]) for number, (start, end) in enumerate(pairwise((0, *ends))))

    def _over_all_cuts(self, layout: Layout, function: Callable[[int, _Cuts], Array]) -> Array:
        """The function of every stage and each of its cuts, [stages, layers + 1, layers + 1]; infinite elsewhere."""
        layers = self._limits.layers
        table = np.full((layout.pipeline, layers + 1, layers + 1), np.inf)
        for number in range(layout.pipeline):
            cuts = _Cuts.possible(layers, number, layout.pipeline)
            table[number, cuts.starts, cuts.ends] = function(number, cuts)
        return table

    def _fewest_recomputed(self, layout: Layout, number: int, cuts: _Cuts, sizes: EpochSizes) -> Ints:
        """With how few recomputed layers each cut fits the memory, [cuts]; -1 where it never does."""
        fewest = np.full(len(cuts.starts), -1, dtype=np.int64)
        left = np.arange(len(fewest))
        for count in range(int(cuts.lengths.max()) + 1):
            left = left[cuts.lengths[left] >= count]
            tried = self._parts(layout, number, cuts[left], np.full(len(left), count))
            fits = self._predictor.stage_bytes(tried, layout, number, sizes) <= self._limits.memory_bytes * _HEADROOM
            fewest[left[fits]] = count
            left = left[~fits]
            if not len(left):
                break
        return fewest

    def _parts(self, layout: Layout, number: int, cuts: _Cuts, recomputed: Ints) -> Parts:
        """The cuts as stage `number`, so many layers recomputed, vision layers first: they keep more for their time."""
        vision_layers = self._limits.vision_layers
        vision = np.minimum(cuts.ends, vision_layers) - np.minimum(cuts.starts, vision_layers)
        language = cuts.lengths - vision
        projects = (cuts.starts < vision_layers) & (vision_layers <= cuts.ends)
        nothing = np.zeros_like(vision)
        embeds, heads = nothing + (number == 0), nothing + (number == layout.pipeline - 1)
        recomputed_vision = np.minimum(recomputed, vision)
        return Parts(
            layers=np.stack((embeds, vision, projects, language, heads), axis=1).astype(np.float64),
            recomputed=np.stack(
                (nothing, recomputed_vision, nothing, recomputed - recomputed_vision, nothing), axis=1
            ).astype(np.float64),
        )


def _stage(parts: Parts) -> Stage:
    """The only one of the parts."""
    layers, recomputed = parts.layers[0].astype(int).tolist(), parts.recomputed[0].astype(int).tolist()
    return Stage(
        vision=layers[VISION],
        language=layers[LANGUAGE],
        recompute_vision=recomputed[VISION],
        recompute_language=recomputed[LANGUAGE],
    )
