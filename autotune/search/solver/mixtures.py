"""Recompute counts of stages whose packs in flight are of several levels, each with counts of its own."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from autotune.prediction.layer_bytes import PLACES, LayerBytes
from autotune.prediction.parts import LANGUAGE, VISION, Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.candidates import CandidateStages
from autotune.search.solver.layer_seconds import LayerSeconds
from autotune.search.solver.rungs import Counts, Rungs
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.plan import Layout

# A choice: small ratios find most counts that are never worth it; the search passes over the others itself.
_EXCHANGES = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2))
"""Numbers of layers of one kind that may be recomputed for less in place of others of the other kind."""
# A choice: thin ranges hold few mixtures, and each range has a fixed cost in numpy.
_SLICES = 64
"""Number of ranges of cost that are searched one after the other, until one has a mixture that fits."""
# Mixtures that are checked at a time; their bytes for some dozens of windows then take tens of MB.
_AT_ONCE = 1 << 16
# Sums of costs in another order differ by some 1e-15 of them; bounds are widened so that none is lost.
_ROUNDING = 1 + 1e-12
_NO_BYTES = 1.0
"""More bytes than rounding may add."""
_LEAST = 1e-300
"""Divisor where recomputing takes no time, or frees nothing."""


class Mixtures:
    """The packs of a problem with several levels, and the counts with which its stages fit them."""

    def __init__(
        self,
        predictor: Predictor,
        usable_bytes: float,
        layout: Layout,
        sizes: EpochSizes,
        seconds: Sequence[LayerSeconds],
    ) -> None:
        """`seconds` are those of the mean pack of each level."""
        self._predictor, self._usable, self._layout = predictor, usable_bytes, layout
        self._sizes, self._seconds = sizes.in_chunks(predictor.costs["head"]), seconds
        self._shares = [of_level.row_share for of_level in sizes.of_levels]
        self._layers = [predictor.memory.of_layers(degree, layout) for degree in sizes.epoch.packing.degrees]
        self._windows: dict[int, Windows] = {}
        self._found: dict[tuple[int, ...], tuple[Counts, float] | None] = {}

    def least(self, held: CandidateStages) -> tuple[Counts, float] | None:
        """Return the counts with which one part takes the mean row least time, and its seconds; None if none fits."""
        key = tuple(int(column[0]) for column in (held.numbers, held.vision, held.language, held.projects))
        if key not in self._found:
            self._found[key] = self._least(held)
        return self._found[key]

    def _least(self, held: CandidateStages) -> tuple[Counts, float] | None:
        counts = int(held.vision_rungs[0]) + 1, int(held.language_rungs[0]) + 1
        vision, language = (each.ravel() for each in np.indices(counts))
        parts = held[np.zeros_like(vision)].parts(vision, language)
        choices = [
            Choice(parts=parts, costs=share * seconds.of(parts), vision_counts=counts[0])
            for share, seconds in zip(self._shares, self._seconds, strict=True)
        ]
        rows = self._in_flight(int(held.numbers[0])).cheapest(choices, self._free(parts[:1])[0])
        if rows is None:
            return None
        found = tuple((int(vision[row]), int(language[row])) for row in rows)
        return found, sum(float(choice.costs[row]) for choice, row in zip(choices, rows, strict=True))

    def fewest(self, held: CandidateStages) -> Counts | None:
        """Return the counts with which one part recomputes the fewest layers in the mean row, vision layers first."""
        counts = np.arange(int(held.vision[0] + held.language[0]) + 1)
        vision = np.minimum(counts, held.vision[0])
        parts = held[np.zeros_like(counts)].parts(vision, counts - vision)
        choices = [Choice(parts=parts, costs=share * counts.astype(np.float64)) for share in self._shares]
        rows = self._in_flight(int(held.numbers[0])).cheapest(choices, self._free(parts[:1])[0])
        return None if rows is None else tuple((int(vision[row]), int(counts[row] - vision[row])) for row in rows)

    def least_seconds(self, held: CandidateStages) -> Floats:
        """Return at most the seconds of `least`, [parts]: those in which any fraction of a layer may be recomputed.

        They are infinite for parts that surely do not fit.
        """
        nothing = np.zeros_like(held.vision)
        whole = held.parts(nothing, nothing)
        seconds: Floats = np.sum(
            [share * each.of(whole) for share, each in zip(self._shares, self._seconds, strict=True)], axis=0
        )
        free = self._free(whole)
        costs = [share * each.of_rungs(held.rungs) for share, each in zip(self._shares, self._seconds, strict=True)]
        for number in np.unique(held.numbers).tolist():
            rows = np.flatnonzero(held.numbers == number)
            windows = self._in_flight(number)
            fits = windows.leanest(held[rows]) <= free[rows]
            further = windows.fractions(whole[rows], free[rows], held.rungs, costs)
            seconds[rows] += np.where(fits, further, np.inf)
        return seconds

    def _free(self, parts: Parts) -> Floats:
        """Return the bytes that packs may take on these stages, [stages]."""
        free: Floats = self._usable - self._predictor.memory.static(parts, self._layout)
        return free

    def _in_flight(self, number: int) -> "Windows":
        count = min(self._layout.pipeline - number, self._sizes.epoch.micro_batches)
        if count not in self._windows:
            self._windows[count] = Windows(self._sizes, count, self._layers)
        return self._windows[count]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """Counts of (vision, language) layers that packs of a level may recompute, on one stage."""

    parts: Parts
    """The stage with each pair of counts: all languages counts for no vision layer, then for one, and so on."""
    costs: Floats
    """What the mean row pays for each, [counts]."""
    vision_counts: int = 1
    """Number of counts of vision layers, each with as many of language layers; 1 for counts in no such order."""


class Windows:
    """Packs in flight in the steps of an epoch: each pack as its backward pass runs, with those behind it."""

    def __init__(self, sizes: EpochSizes, in_flight: int, layers: Sequence[LayerBytes]) -> None:
        """`layers` are those of packs of each level."""
        of_levels = np.zeros((len(layers), *sizes.table.shape))
        of_levels[sizes.levels, np.arange(len(sizes.levels))] = sizes.table
        running, behind = [], []
        for block in sizes.blocks:
            # Backward passes keep the order of the packs, so those behind a pack are the ones that follow it.
            packs = of_levels[:, block]
            before = np.cumsum(np.pad(packs, ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0))), axis=2)
            first = np.arange(block.shape[1])
            after = before[:, :, np.minimum(first + in_flight, block.shape[1])] - before[:, :, first + 1]
            behind.append(after.reshape(len(layers), -1, after.shape[-1]))
            running.append(block.ravel())
        packs = np.concatenate(running)
        self._layers = layers
        self._running, self._level = sizes.table[packs], sizes.levels[packs]
        self._behind = np.concatenate(behind, axis=1)
        # Windows that keep most of one kind of layer, for each level of the pack that runs.
        kept = np.sum(
            [
                (after + (self._level == level)[:, None] * self._running) @ each.kept.T
                for level, (after, each) in enumerate(zip(self._behind, layers, strict=True))
            ],
            axis=0,
        )
        of_runs = [np.flatnonzero(self._level == level) for level in np.unique(self._level)]
        self.deciding: Ints = np.unique(np.concatenate([rows[np.argmax(kept[rows], axis=0)] for rows in of_runs]))
        """Windows that decided before; most stages are decided by the same."""

    def leanest(self, held: CandidateStages) -> Floats:
        """Return the least that any counts need in the fullest of the deciding windows, [parts]."""
        # With all layers recomputed, or all but one of a kind: keeping the last one may need less.
        vision = np.maximum(held.vision_rungs - np.array([[0], [0], [1], [1]]), 0)
        language = np.maximum(held.language_rungs - np.array([[0], [1], [0], [1]]), 0)
        parts = held[np.tile(np.arange(len(held)), 4)].parts(vision.ravel(), language.ravel())
        needed = sum(
            _Held.of(layers, parts).bytes_in(self, level, self.deciding).reshape(-1, 4, len(held)).min(axis=1)
            for level, layers in enumerate(self._layers)
        )
        most: Floats = np.max(needed, axis=0)
        return most

    def fractions(self, whole: Parts, free: Floats, rungs: Rungs, costs: Sequence[Floats]) -> Floats:
        """Return the least costs of fractions of rungs with which each deciding window would fit, [parts].

        For each window alone, rungs of most bytes for their cost come first (Dantzig 1957). `costs` are those of
        `LayerSeconds.of_rungs` at each level.
        """
        needed = np.zeros((len(self.deciding), len(whole)))
        freed, shared = [], np.zeros_like(needed)
        for level, layers in enumerate(self._layers):
            runs = (self._level[self.deciding] == level)[:, None] * self._running[self.deciding]
            waiting, kept = self._behind[level, self.deciding], layers.of_packs(whole, len(KINDS))
            needed += (waiting + runs) @ kept.T + runs @ layers.beginning(whole).T
            freed.append((waiting + runs) @ layers.freed(rungs).T)
            shared += (waiting + runs) @ layers.shared[[VISION, LANGUAGE]].sum(axis=0)[:, None]
        of_rungs, cost = np.concatenate(freed, axis=1), np.concatenate(costs)
        # Kinds with one rung have no later one.
        counts = np.tile(whole.layers[:, [VISION, LANGUAGE]], 2) * [1, 1, *(rung > 1 for rung in rungs)]
        counts = np.tile(counts, len(self._layers)).T
        most = np.zeros(len(whole))
        for frees, above in zip(of_rungs, needed - shared - free - _NO_BYTES, strict=True):
            spent, left = np.zeros(len(whole)), above
            order = np.argsort(-frees / np.maximum(cost, _LEAST))
            for item in order[frees[order] > 0]:
                some = np.clip(left / frees[item], 0, counts[item])
                spent, left = spent + some * cost[item], left - some * frees[item]
            most = np.maximum(most, spent)
        return most

    def cheapest(self, choices: Sequence[Choice], usable: float) -> tuple[int, ...] | None:
        """Return the choice of each level with which every window fits and that together cost least; None if none do.

        Windows that a mixture exceeds are added to those that decide, until the cheapest mixture exceeds none: as any
        of them is a condition that has to be met, it is then the cheapest of all.
        """
        of_levels = [_Held.of(layers, choice.parts) for layers, choice in zip(self._layers, choices, strict=True)]
        least = -np.inf
        while True:
            needed = [held.bytes_in(self, level, self.deciding) for level, held in enumerate(of_levels)]
            found = _cheapest(needed, choices, usable, least)
            if found is None:
                return None
            chosen, least = found
            whole = np.sum(
                [
                    held[row].bytes_in(self, level)[:, 0]
                    for level, (held, row) in enumerate(zip(of_levels, chosen, strict=True))
                ],
                axis=0,
            )
            fullest = int(np.argmax(whole))
            # A window that decided is exceeded by rounding alone.
            if whole[fullest] <= usable or fullest in self.deciding:
                return chosen
            self.deciding = np.union1d(self.deciding, fullest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Held:
    """Bytes that packs of a level keep, as coefficients, for each of several counts."""

    waiting: Floats
    running: tuple[tuple[Ints, Floats], ...]
    """(counts, their coefficients) as the backward pass begins, then in that of each kind where it may need most."""

    @classmethod
    def of(cls, layers: LayerBytes, parts: Parts) -> "_Held":
        waiting = layers.of_packs(parts, len(KINDS))
        of_places = ((layers.needs_most_at(parts, place), place) for place in PLACES)
        later = ((rows, np.sum(layers.running(parts[rows], place), axis=0)) for rows, place in of_places if len(rows))
        return cls(waiting=waiting, running=((np.arange(len(parts)), waiting + layers.beginning(parts)), *later))

    def bytes_in(self, windows: Windows, level: int, which: Ints | slice = slice(None)) -> Floats:
        """Return the bytes in these windows, [windows, counts]."""
        needed: Floats = windows._behind[level, which] @ self.waiting.T
        runs = np.flatnonzero(windows._level[which] == level)
        of_running = np.zeros((len(runs), len(self.waiting)))
        for rows, coefficients in self.running:
            of_running[:, rows] = np.maximum(of_running[:, rows], windows._running[which][runs] @ coefficients.T)
        needed[runs] += of_running
        return needed

    def __getitem__(self, count: int) -> "_Held":
        cases = ((np.flatnonzero(rows == count), coefficients) for rows, coefficients in self.running)
        return _Held(
            waiting=self.waiting[[count]],
            running=tuple(
                (np.zeros(len(found), dtype=np.int64), coefficients[found])
                for found, coefficients in cases
                if len(found)
            ),
        )


def _cheapest(
    needed: Sequence[Floats], choices: Sequence[Choice], usable: float, least: float
) -> tuple[tuple[int, ...], float] | None:
    """Return the cheapest choice of each level that fits these windows, and its cost, of those that cost `least`.

    `needed` are the bytes of each level, [windows, counts].
    """
    leanest = [each.min(axis=1, initial=np.inf) for each in needed]
    every = np.sum(leanest, axis=0)
    some = []
    for each, lean, choice in zip(needed, leanest, choices, strict=True):
        possible = (each <= usable - (every - lean)[:, None]).all(axis=0) & ~_outdone(each, choice)
        rows = np.flatnonzero(possible)
        some.append(rows[np.argsort(choice.costs[rows], kind="stable")])
        if not len(rows):
            return None
    costs = [choice.costs[rows] for choice, rows in zip(choices, some, strict=True)]
    bytes_of = [each[:, rows] for each, rows in zip(needed, some, strict=True)]
    first, last = (sum(float(each[end]) for each in costs) for end in (0, -1))
    step, most = (last - first) / _SLICES, max(first, least)
    low = most / _ROUNDING
    while True:
        found = _within(bytes_of, costs, leanest, usable, (low, most * _ROUNDING))
        if found is not None:
            places, cost = found
            return tuple(int(rows[place]) for rows, place in zip(some, places, strict=True)), cost
        if most >= last:
            return None
        low, most, step = most, min(most + step, last), 2 * step


def _outdone(needed: Floats, choice: Choice) -> NDArray[np.bool_]:
    """Return which counts cost no less than others with which no window needs more, [counts]; not all are found."""
    grid, costs = (each.reshape(*each.shape[:-1], choice.vision_counts, -1) for each in (needed, choice.costs))
    outdone = np.zeros(costs.shape, dtype=np.bool_)
    for more, fewer in _EXCHANGES:
        if min(costs.shape[0] - more, costs.shape[1] - fewer) < 1:
            continue
        with_vision, with_language = np.s_[..., more:, :-fewer], np.s_[..., :-more, fewer:]
        cheaper, leaner = (costs[with_vision] - costs[with_language]), (grid[with_vision] - grid[with_language])
        outdone[with_language] |= (cheaper <= 0) & (leaner <= 0).all(axis=0)
        outdone[with_vision] |= (cheaper > 0) & (leaner >= 0).all(axis=0)
    return outdone.ravel()


def _within(
    needed: Sequence[Floats],
    costs: Sequence[Floats],
    leanest: Sequence[Floats],
    usable: float,
    bounds: tuple[float, float],
) -> tuple[list[int], float] | None:
    """Return the cheapest choice that fits, among choices between these costs; costs of a level ascend."""
    least, most = bounds
    after = [sum((float(each[0]) for each in costs[level + 1 :]), 0.0) for level in range(len(costs))]
    room = [usable - reduce(np.add, leanest[level + 1 :], np.zeros(len(leanest[0]))) for level in range(len(costs))]
    rows = np.flatnonzero(costs[0] <= most - after[0])
    places, sums, bytes_of = [rows], costs[0][rows], needed[0][:, rows]
    for level in range(1, len(costs)):
        ends = np.searchsorted(costs[level], most - after[level] - sums, "right")
        begins = np.searchsorted(costs[level], least - sums, "left") if level == len(costs) - 1 else np.zeros_like(ends)
        counts = np.maximum(ends - begins, 0)
        if not counts.any():
            return None
        found: list[tuple[Ints, Ints]] = []
        slices = np.searchsorted(np.cumsum(counts), np.arange(0, counts.sum(), _AT_ONCE), "left")
        for first, end in zip(slices, [*slices[1:], len(counts)], strict=True):
            of_slice = counts[first:end]
            before = np.repeat(np.arange(first, end), of_slice)
            place = begins[before] + np.arange(len(before)) - np.repeat(np.cumsum(of_slice) - of_slice, of_slice)
            fits = (bytes_of[:, before] + needed[level][:, place] <= room[level][:, None]).all(axis=0)
            found.append((before[fits], place[fits]))
        if not any(len(before) for before, _ in found):
            return None
        before, place = (np.concatenate(column) for column in zip(*found, strict=True))
        places = [*(each[before] for each in places), place]
        sums, bytes_of = sums[before] + costs[level][place], bytes_of[:, before] + needed[level][:, place]
    best = int(np.argmin(sums))
    return [int(each[best]) for each in places], float(sums[best])
