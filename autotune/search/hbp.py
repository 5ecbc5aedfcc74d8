"""HBP's recipe as a baseline: its levels, its degrees, its recomputation, and whole steps of one level.

Source: HBP (Hierarchical Balance Packing), automatic selection of groups and heuristic balance. Its method is for text;
the capacities in vision units follow OmniBal's rule.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autotune.dimensions.usual import layouts
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.capacities import OMNIBAL_SLACK, capacity_of
from trials.plan import OMNIBAL_PACKER, Layout, Levelled, Packed, Packing, Plan
from trials.workload import DataProfile, Workload

# 128K halved four times is 8K, the range of HBP.
_HALVINGS = 4
"""Lengths to compare: the longest sample, halved so often. HBP has 8K to 128K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TimedLevel:
    """Packs of one length."""

    level: Packed
    seconds_per_token: float
    """Seconds per token of all ranks together."""


def hbp_plan(workload: Workload, predictor: Predictor, solver: Solver) -> Plan | None:
    """Return the plan of HBP's recipe; None where no data-parallel layout fits, or it ends with usual packs.

    It has the fewest pipeline stages in which the longest sample fits when as many ranks as possible share it, since
    HBP divides the states by ZeRO 3. Of the lengths, those count whose levels keep the global batch, if any do.
    """
    found = [solver.overlapped(layout) for layout in layouts(workload.model, workload.hardware.devices)]
    # The highest ZeRO stage leaves most memory for activations.
    for layout in sorted(found, key=lambda layout: (layout.pipeline, -layout.zero)):
        recipe = _Recipe(workload, predictor, solver, layout)
        if (plan := recipe.plan()) is not None:
            return plan if plan.packing.degrees != (1,) else None
    return None


class _Recipe:
    """The recipe in one layout."""

    def __init__(self, workload: Workload, predictor: Predictor, solver: Solver, layout: Layout) -> None:
        self._data, self._predictor, self._solver, self._layout = workload.data, predictor, solver, layout
        self._degrees = [1, *(degree for degree in solver.sequence_degrees if layout.data % degree == 0)]

    def plan(self) -> Plan | None:
        """Return the plan; None where the longest sample does not fit."""
        *shorter, longest = self._timed()
        if longest is None:
            return None
        timed = sorted((each for each in (*shorter, longest) if each), key=lambda each: each.seconds_per_token)
        packings = [self._packing(best.level, longest.level) for best in timed]
        keeping = (packing for packing in packings if self._solver.keeps_batch(packing, self._layout))
        return self._fitted(next(keeping, packings[0]))

    def _timed(self) -> Iterator[_TimedLevel | None]:
        """Yield for each length, ascending, the fastest degree; None where none fits."""
        top = _level(self._data, self._data.longest_text_tokens, self._degrees[-1])
        for halvings in range(_HALVINGS, -1, -1):
            length = self._data.longest_text_tokens >> halvings
            levels = [_level(self._data, length, degree) for degree in self._degrees]
            timed = [self._time(level, top if halvings else None) for level in levels if length]
            yield min((each for each in timed if each), key=lambda each: each.seconds_per_token, default=None)

    def _time(self, level: Packed, top: Packed | None) -> _TimedLevel | None:
        """Return the time of full packs with the fewest recomputed layers that fit; longer samples are at the top."""
        packing = level if top is None or top.qt == level.qt else Levelled(levels=(level, top))
        if not self._solver.fills_levels(packing, self._layout) or (plan := self._fitted(packing)) is None:
            return None
        sizes, parts = self._predictor.sizes(packing, self._layout).of_levels[0], Parts.of_levels(plan)[0]
        passes = self._predictor.times.pass_seconds(parts, self._layout, sizes.mean)
        exchanges = self._predictor.times.exchange_seconds(parts, self._layout, sizes.mean, np.array([level.sequence]))
        slowest = sum(side[0] for side in (*passes, *exchanges)).max()
        return _TimedLevel(level=level, seconds_per_token=float(slowest / sizes.mean[0, 1]))

    def _packing(self, best: Packed, longest: Packed) -> Packing:
        """Return levels {l_best / s_best, l_best, l_max / s_max, l_max}, as far as each has samples."""
        alone = [_level(self._data, each.qt // each.sequence, 1) for each in (best, longest)]
        chosen = [alone[0], best, *(alone[1:] if alone[1].qt > best.qt else []), longest]
        levels: list[Packed] = []
        for level in chosen:
            if not levels or level.qt > levels[-1].qt:
                levels.append(level)
        packing = _joined(levels)
        # A level whose samples all fill up packs of longer levels has no packs of its own.
        present = np.unique(self._predictor.sizes(packing, self._layout).levels)
        return packing if len(present) == len(levels) else _joined([levels[level] for level in present])

    def _fitted(self, packing: Packing) -> Plan | None:
        """Return the plan with the fewest recomputed layers on stages of like forward times."""
        boundaries = self._solver.forward_boundaries(packing, self._layout)
        return self._solver.fit_fewest(packing, self._layout, boundaries)


def _joined(levels: Sequence[Packed]) -> Packing:
    return levels[0] if len(levels) == 1 else Levelled(levels=tuple(levels), whole_steps=True)


def _level(data: DataProfile, length: int, sequence: int) -> Packed:
    qv, qt = capacity_of(data, length)
    return replace(
        Packed(qv=qv, qt=qt, qv_min=qv, qt_min=max(0, qt - OMNIBAL_SLACK), packer=OMNIBAL_PACKER),
        sequence=sequence,
    )
