"""Contiguous splits of a chain of layers over pipeline stages with the exact least time of a step.

A step of m micro-batches takes the time of one pack through all stages, and that of the slowest stage for the others:

    T = sum over s of t_s + (m - 1) max over s of t_s

This is 1F1B on equal packs (PipeDream-2BW, section 3.3; Alpa, section 5.2).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trials.arrays import Floats, Ints

_ROUNDING = 1 + 1e-12
"""Equal sums may differ by this factor."""
_NEVER = 1e300
"""More seconds than any split takes, and less than infinity, from which infinity can be taken away."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choices:
    """What one stage may hold: layers starts[i] to ends[i] of the chain, in seconds[i]; rows may repeat a part."""

    starts: Ints
    ends: Ints
    seconds: Floats
    """At least 0."""

    def __getitem__(self, rows: Ints) -> "Choices":
        return Choices(starts=self.starts[rows], ends=self.ends[rows], seconds=self.seconds[rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """One choice for every stage, each of which starts where the one before ends."""

    rows: tuple[int, ...]
    """Row of each stage's choice."""
    total: float
    slowest: float

    def seconds(self, micro_batches: int) -> float:
        """Return the time of a step by the closed form."""
        return self.total + (micro_batches - 1) * self.slowest


def min_max_split(stages: Sequence[Choices], layers: int) -> Split | None:
    """Return the split with the least slowest stage; of equal ones, the one with the least total.

    None when no choices make up the chain.
    """
    bound = least_slowest(stages, layers)
    if bound == np.inf:
        return None
    return _least_totals(stages, layers, bound, 1, [np.full(layers + 1, _NEVER)] * len(stages))[1][0]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSplits:
    """Conditions on the splits to find."""

    count: int
    """Most splits."""
    within: float
    """Largest ratio of their time to that of the best one."""

    def most_seconds(self, found: Sequence[Split], micro_batches: int) -> float:
        """Return the most that a step of a further split may take, given the best splits so far, best first."""
        if not found:
            return np.inf
        behind_best = self.within * found[0].seconds(micro_batches)
        return min(behind_best, found[-1].seconds(micro_batches)) if len(found) == self.count else behind_best


def best_splits(stages: Sequence[Choices], layers: int, micro_batches: int, wanted: WantedSplits) -> tuple[Split, ...]:
    """Return the splits with the least time of a step, best first.

    For a bound B on the slowest stage, dynamic programming over (stage, layers so far) finds the least totals with all
    t_s <= B. The B are the distinct times of stages. Those between two B1 < B2 that were tried cannot take less than
    total(B2) + (m - 1) B1; they are tried while that is less than the worst that is wanted.
    """
    least = least_slowest(stages, layers)
    if least == np.inf:
        return ()
    return _Bounds(stages, layers, micro_batches, wanted, least).run()


def rows_within(stages: Sequence[Choices], layers: int, bound: float) -> list[Ints]:
    """Return the rows of each stage's choices that are in a split whose stages are all within the bound."""
    rows = [np.flatnonzero(choices.seconds <= bound) for choices in stages]
    within = [choices[kept] for choices, kept in zip(stages, rows, strict=True)]
    around = zip(rows, within, *_totals_around(within, layers), strict=True)
    return [kept[before[choices.starts] + behind[choices.ends] < np.inf] for kept, choices, before, behind in around]


class _Bounds:
    """Search over bounds on the slowest stage, which keeps the best splits."""

    def __init__(
        self, stages: Sequence[Choices], layers: int, micro_batches: int, wanted: WantedSplits, least: float
    ) -> None:
        """`least` is the least bound that any split keeps."""
        self._layers, self._micro_batches, self._wanted = layers, micro_batches, wanted
        self._stages, self._rows = list(stages), [np.arange(len(choices.starts)) for choices in stages]
        self._best: list[Split] = []
        self._least = least
        self._behind = [np.zeros(layers + 1)] * len(stages)
        """Least total of the stages behind each, from each layer, for each stage [layers + 1]."""
        # The time of the best split bounds the times of the further splits that are wanted.
        for count in (1, wanted.count):
            self._try(least, count)
            self._drop_hopeless()
        self._least_total = self._try(np.inf, wanted.count)

    def run(self) -> tuple[Split, ...]:
        """Return the best splits, once no remaining bound can improve on them."""
        self._drop_hopeless()
        times = np.concatenate([choices.seconds for choices in self._stages])
        # Only these bounds change which choices are allowed.
        bounds = np.unique(np.append(times[times > self._least], (self._least, np.inf)))
        waiting = [(0, len(bounds) - 1, self._least_total)]
        while waiting:
            low, high, total = waiting.pop()
            if high - low > 1 and total + (self._micro_batches - 1) * bounds[low + 1] < self._worst:
                middle = (low + high) // 2
                waiting += [(middle, high, total), (low, middle, self._try(bounds[middle], self._wanted.count))]
        return tuple(split for split in self._best if split.seconds(self._micro_batches) <= self._worst)

    def _try(self, bound: float, count: int) -> float:
        """Consider the `count` splits of least total under the bound; return the least total."""
        found = {split.rows: split for split in self._best}
        # A split with a larger total is too slow even with the least possible slowest stage.
        hopeful = min((self._worst - (self._micro_batches - 1) * self._least) * _ROUNDING, _NEVER)
        most = [hopeful - behind for behind in self._behind]
        least_total, splits = _least_totals(self._stages, self._layers, bound, count, most)
        for split in splits:
            rows = tuple(int(rows[row]) for rows, row in zip(self._rows, split.rows, strict=True))
            found[rows] = Split(rows=rows, total=split.total, slowest=split.slowest)
        by_time = sorted(found.values(), key=lambda split: (split.seconds(self._micro_batches), split.rows))
        self._best = by_time[: self._wanted.count]
        return least_total

    @property
    def _worst(self) -> float:
        """Most seconds of a step of a wanted split."""
        return self._wanted.most_seconds(self._best, self._micro_batches)

    def _drop_hopeless(self) -> None:
        """Drop choices that are in no split better than the best."""
        before, self._behind = _totals_around(self._stages, self._layers)
        worst = self._worst * _ROUNDING
        for number, (choices, behind) in enumerate(zip(self._stages, self._behind, strict=True)):
            total = before[number][choices.starts] + choices.seconds + behind[choices.ends]
            least = total + (self._micro_batches - 1) * np.maximum(choices.seconds, self._least)
            kept = np.flatnonzero(least <= worst)
            self._stages[number], self._rows[number] = choices[kept], self._rows[number][kept]


def least_slowest(stages: Sequence[Choices], layers: int) -> float:
    """Return the least time of the slowest stage; infinite when no choices make up the chain."""
    slowest = _nothing_yet(layers)
    for choices in stages:
        following = np.full(layers + 1, np.inf)
        # `.at`, since several choices end at the same layer: plain indexing would keep only one of them.
        np.minimum.at(following, choices.ends, np.maximum(slowest[choices.starts], choices.seconds))
        slowest = following
    return float(slowest[layers])


def _totals_around(stages: Sequence[Choices], layers: int) -> tuple[list[Floats], list[Floats]]:
    """Return the least totals of the stages before each, up to each layer, and behind each, from each layer."""
    before, behind = [_nothing_yet(layers)], [_nothing_yet(layers)[::-1]]
    for choices in stages[:-1]:
        before.append(np.full(layers + 1, np.inf))
        np.minimum.at(before[-1], choices.ends, before[-2][choices.starts] + choices.seconds)
    for choices in stages[:0:-1]:
        behind.append(np.full(layers + 1, np.inf))
        np.minimum.at(behind[-1], choices.starts, behind[-2][choices.ends] + choices.seconds)
    return before, behind[::-1]


def _nothing_yet(layers: int) -> Floats:
    start: Floats = np.full(layers + 1, np.inf)
    start[0] = 0.0
    return start


def _least_totals(
    stages: Sequence[Choices], layers: int, bound: float, count: int, most: Sequence[Floats]
) -> tuple[float, list[Split]]:
    """Return (least total, up to `count` splits, least total first) of the splits within the bound.

    `most` are for each stage the largest totals up to each layer that count, below infinity, [layers + 1]. The least
    total is infinite where there is no split.
    """
    totals = np.full((layers + 1, count), np.inf)
    totals[0, 0] = 0.0
    ways = []
    for choices, of_stage in zip(stages, most, strict=True):
        totals, way = _add_stage(totals, choices, bound, of_stage)
        ways.append(way)
    found = int((totals[layers] < np.inf).sum())
    return float(totals[layers, 0]), [_trace(stages, ways, layers, rank) for rank in range(found)]


def _add_stage(totals: Floats, choices: Choices, bound: float, most: Floats) -> tuple[Floats, Ints]:
    """Return the least totals with one more stage, [layers + 1, count], and how: row of the choice x count + rank.

    `totals` are those before the stage.
    """
    count = totals.shape[1]
    rows = np.flatnonzero(choices.seconds <= bound)
    sums = totals[choices.starts[rows]] + choices.seconds[rows, None]
    possible = np.flatnonzero(sums <= most[choices.ends[rows], None])
    ends, sums = choices.ends[rows[possible // count]], sums.ravel()[possible]
    # By boundary and then by total: the first `count` of each boundary are kept.
    order = np.lexsort((sums, ends))
    ends = ends[order]
    # `ends` ascend, so the search returns where each boundary begins.
    ranks = np.arange(len(ends)) - np.searchsorted(ends, ends)
    kept = ranks < count
    ends, ranks, order = ends[kept], ranks[kept], order[kept]
    following, way = np.full_like(totals, np.inf), np.zeros(totals.shape, dtype=np.int64)
    following[ends, ranks] = sums[order]
    source = possible[order]
    way[ends, ranks] = rows[source // count] * count + source % count
    return following, way


def _trace(stages: Sequence[Choices], ways: Sequence[Ints], layers: int, rank: int) -> Split:
    rows: list[int] = []
    end = layers
    for choices, way in zip(reversed(stages), reversed(ways), strict=True):
        row, rank = divmod(int(way[end, rank]), way.shape[1])
        rows.append(row)
        end = int(choices.starts[row])
    rows.reverse()
    times = [float(choices.seconds[row]) for choices, row in zip(stages, rows, strict=True)]
    return Split(rows=tuple(rows), total=sum(times), slowest=max(times))


def layer_counts(boundaries: Sequence[int], vision_layers: int) -> tuple[tuple[int, int], ...]:
    """Return the (vision, language) layers of stages with these boundaries; vision layers come first in the chain."""
    return tuple(
        (
            min(end, vision_layers) - min(start, vision_layers),
            max(end, vision_layers) - max(start, vision_layers),
        )
        for start, end in pairwise((0, *boundaries))
    )
