"""Numbers of layers that stages recompute to fit the memory, for many stages at once."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TypeAlias

import numpy as np

from autotune.search.solver.candidates import CandidateStages
from autotune.search.solver.layer_seconds import LayerSeconds
from trials.arrays import Bools, Floats, Ints

Excess: TypeAlias = Callable[[CandidateStages, Ints, Ints], Floats]
"""Bytes above those there are, with these numbers of vision and of language layers recomputed."""

_NEVER = 1 << 30
"""More layers than any stage has."""
_NO_BYTES = 1.0
"""More bytes than rounding may add."""
# Divisor where recomputing takes no time, or frees nothing: the quotients become huge, and are clipped.
_LEAST = 1e-300
# Of a layer, and of a time: whole counts and equal times must not be lost to the rounding of a quotient or sum.
_ROUNDING = 1e-6
_ROUNDED = 1 + 1e-9
_ROUNDS = 2
"""Rounds in which the likeliest number of vision layers of each candidate is tried alone; then the rest is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The packs of an epoch with one level."""

    excess: Excess
    freed: Floats
    """Most bytes of the excess that the first rung of a vision layer and of a language layer frees on each stage, the
    later rung of each, and all rungs of either kind in addition, [6, stages]."""
    seconds: LayerSeconds

    def fits(self, candidates: CandidateStages, vision: Ints, language: Ints) -> Bools:
        """Return which candidates fit with these numbers of layers recomputed."""
        fits: Bools = self.excess(candidates, vision, language) <= 0
        return fits

    def fewest(self, candidates: CandidateStages, excess: Floats, vision: Ints) -> Ints:
        """Return a lower bound of the language rungs with which candidates fit that have these vision rungs.

        `excess` is that with nothing recomputed. The bound is above the language rungs where no number is enough.
        """
        vision_first, first, vision_later, later, all_vision, all_language = self.freed[:, candidates.numbers]
        of_vision = _sum(vision, candidates.vision, vision_first, vision_later)
        left = excess - of_vision - (vision == candidates.vision_rungs) * all_vision - _NO_BYTES
        fewest = np.ceil(_rungs(np.maximum(left, 0), candidates.language, first, later)).astype(np.int64)
        every = candidates.language_rungs
        enough = left <= _sum(every, candidates.language, first, later) + all_language
        # The last layer of a kind frees more than the others, so all may be enough where the division asks for more.
        return np.where((fewest >= every) & enough, every, fewest)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recomputes:
    """Rungs with which candidates fit, all [candidates]."""

    vision: Ints
    language: Ints
    seconds: Floats
    """Seconds of the stage; infinite where it does not fit within its bound."""


def least_recomputes(candidates: CandidateStages, level: Level, bounds: Floats) -> Recomputes:
    """Return the pair of counts of least time with which each candidate fits; of equal ones, the fewest vision layers.

    For each number of vision layers, only the fewest language layers that fit are considered, among those that the
    candidate's bound in seconds allows. Numbers are tried in the order of a lower bound of their time.
    """
    nothing = _nothing(candidates)
    # A copy, since `_Waiting.tried` writes into both arrays.
    found = Recomputes(vision=nothing, language=nothing.copy(), seconds=np.full(len(candidates), np.inf))
    kept = level.seconds.of(candidates.parts(nothing, nothing))
    within = np.flatnonzero(kept <= bounds)
    excess = level.excess(candidates[within], nothing[within], nothing[within])
    # What fits with nothing recomputed takes least so.
    fitting = within[excess <= 0]
    found.seconds[fitting] = kept[fitting]
    waiting = _Waiting.of(candidates, within[excess > 0], excess[excess > 0], level, bounds)
    rounds = chain(repeat(True, _ROUNDS), repeat(False))
    while len(waiting.candidate):
        rows = waiting.first if next(rounds) else np.arange(len(waiting.candidate))
        waiting = waiting.tried(rows, found, level, bounds)
    return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Waiting:
    """Numbers of vision layers that may be best for a candidate, by candidate, then by the least time they may take."""

    held: CandidateStages
    """The candidate of each number, all [numbers]."""
    candidate: Ints
    vision: Ints
    language: Ints
    """Fewest language layers that may be enough."""
    seconds: Floats
    """Seconds of the stage with these counts recomputed."""

    @classmethod
    def of(cls, candidates: CandidateStages, which: Ints, excess: Floats, level: Level, bounds: Floats) -> "_Waiting":
        """Return all numbers within the bounds, for candidates that do not fit with nothing recomputed."""
        counts = candidates.vision_rungs[which] + 1
        candidate = np.repeat(which, counts)
        # 0, 1, ... up to the vision layers of each candidate.
        vision = np.arange(len(candidate)) - np.repeat(np.cumsum(counts) - counts, counts)
        held = candidates[candidate]
        language = level.fewest(held, np.repeat(excess, counts), vision)
        rows = np.flatnonzero(language <= held.language_rungs)
        seconds = level.seconds.of(held[rows].parts(vision[rows], language[rows]))
        near = seconds <= _ROUNDED * bounds[candidate[rows]]
        rows, seconds = rows[near], seconds[near]
        order = np.lexsort((vision[rows], seconds, candidate[rows]))
        rows = rows[order]
        return cls(
            held=held[rows],
            candidate=candidate[rows],
            vision=vision[rows],
            language=language[rows],
            seconds=seconds[order],
        )

    @property
    def first(self) -> Ints:
        """The first number of each candidate."""
        return np.flatnonzero(np.diff(self.candidate, prepend=-1))

    def tried(self, rows: Ints, found: Recomputes, level: Level, bounds: Floats) -> "_Waiting":
        """Find the fewest language layers for these numbers, keep the best, and return what may still be better."""
        held, candidate, vision = self.held[rows], self.candidate[rows], self.vision[rows]
        kept = level.seconds.of(held.parts(vision, _nothing(held)))
        _, first, _, later = level.seconds.of_rungs(held.rungs)
        # Rounded up if in doubt: what is too slow is dropped below.
        affordable = _rungs(np.maximum(bounds[candidate] - kept, 0), held.language, first, later) + _ROUNDING
        language = _fewest(
            lambda some, count: level.fits(held[some], vision[some], count),
            held.language_rungs,
            np.minimum(held.language_rungs, affordable.astype(np.int64)),
            self.language[rows],
        )
        fitting = np.flatnonzero(language < _NEVER)
        candidate, vision, language = candidate[fitting], vision[fitting], language[fitting]
        needed = level.seconds.of(held[fitting].parts(vision, language))
        best = np.lexsort((vision, needed, candidate))
        best = best[np.flatnonzero(np.diff(candidate[best], prepend=-1))]
        best = best[needed[best] <= bounds[candidate[best]]]
        before, its = found.seconds[candidate[best]], needed[best]
        best = best[(its < before) | ((its == before) & (vision[best] < found.vision[candidate[best]]))]
        for all_of_them, counted in ((found.vision, vision), (found.language, language), (found.seconds, needed)):
            all_of_them[candidate[best]] = counted[best]
        left = self.seconds <= _ROUNDED * found.seconds[self.candidate]
        left[rows] = False
        return self[np.flatnonzero(left)]

    def __getitem__(self, rows: Ints) -> "_Waiting":
        return _Waiting(
            held=self.held[rows],
            candidate=self.candidate[rows],
            vision=self.vision[rows],
            language=self.language[rows],
            seconds=self.seconds[rows],
        )


def _sum(rungs: Ints, layers: Ints, first: Floats, later: Floats) -> Floats:
    """Return the sum over as many rungs: as many as there are layers are `first` each, those beyond them `later`."""
    total: Floats = np.minimum(rungs, layers) * first + np.maximum(rungs - layers, 0) * later
    return total


def _rungs(total: Floats, layers: Ints, first: Floats | float, later: Floats | float) -> Floats:
    """Return how many rungs, a fraction, have this total; at most `_NEVER`."""
    all_first = layers * first
    first, later = np.maximum(first, _LEAST), np.maximum(later, _LEAST)
    rungs: Floats = np.where(total <= all_first, total / first, layers + (total - all_first) / later)
    return rungs.clip(max=_NEVER)


def _nothing(candidates: CandidateStages) -> Ints:
    return np.zeros(len(candidates), dtype=np.int64)


def _fewest(fits: Callable[[Ints, Ints], Bools], all_of_them: Ints, most: Ints, least: Ints) -> Ints:
    """Return the least count of least[i] to most[i] <= all_of_them[i] with which row i fits, or _NEVER.

    Bisection is valid from 1 to all but one, where more recomputed layers never take more memory. None and all are
    tried separately: with none, no layer is being recomputed; with all, no kept layer covers what recomputing needs.
    """
    fewest = np.full(len(most), _NEVER)

    def keep_fitting(*counts_possible: tuple[Ints, Bools]) -> None:
        """Keep these counts where they fit; later ones replace earlier ones."""
        rows = [np.flatnonzero(possible) for _, possible in counts_possible]
        counts = np.concatenate([count[some] for (count, _), some in zip(counts_possible, rows, strict=True)])
        if len(counts):
            every = np.concatenate(rows)
            fitting = fits(every, counts)
            fewest[every[fitting]] = counts[fitting]

    low, inside = np.maximum(least, 1), np.minimum(most, all_of_them - 1)
    # The lower bound is usually enough.
    keep_fitting((low, low <= inside), (np.zeros_like(most), least == 0))
    found = fewest < _NEVER
    keep_fitting((most, ~found & (most == all_of_them) & (most > 0)), (inside, ~found & (inside > low)))
    rows = np.flatnonzero(~found & (fewest < _NEVER) & (fewest > low))
    low, high = np.minimum(low, inside)[rows], fewest[rows]
    while (apart := high - low > 1).any():
        middle = (low + high)[apart] // 2
        fitting = fits(rows[apart], middle)
        high[apart] = np.where(fitting, middle, high[apart])
        low[apart] = np.where(fitting, low[apart], middle)
    fewest[rows] = high
    return fewest
