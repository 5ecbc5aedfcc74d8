"""The splitting problem of one packing and layout: what fits each stage, in what time, and the best plans."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autotune.prediction.costs import Array
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.solver.holdings import Holdings
from autotune.search.solver.limits import Limits
from autotune.search.solver.recompute import Bools, LayerSeconds, least_recomputes
from autotune.search.solver.splits import Choices, Split, Wanted, best_splits, min_max_split, rows_within
from trials.data.records.sample import Ints
from trials.errors import InvalidPlan
from trials.layer_costs import KINDS
from trials.plan import Layout, Packing, Plan, Stage

_FIRST_BOUND = 1.15
"""First bound on the slowest stage, as a multiple of its time with unlimited memory."""
_NEXT_BOUND = 1.6
"""Factor by which the bound grows. With everything recomputed stages take about 1.4 times as long."""
_ROUNDING = 1 + 1e-9
_ROWS_AT_ONCE = 1 << 14
"""Parts whose memory is predicted at once, few enough for their table to stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fitting:
    """Choices that fit one stage, all [choices]."""

    choices: Choices
    held: Holdings
    recompute_vision: Ints
    recompute_language: Ints

    def stage(self, row: int) -> Stage:
        return _stage(self.held, row, self.recompute_vision, self.recompute_language)


class Problem:
    """The pipeline of one layout over the model's chain, for the packs of one packing."""

    def __init__(self, predictor: Predictor, limits: Limits, packing: Packing, layout: Layout) -> None:
        """Raise InvalidPlan when there is no plan, whatever the memory."""
        self.sizes = predictor.sizes(packing, layout)
        _check(limits, layout, self.sizes.epoch.micro_batches)
        self._predictor, self._limits, self._packing, self._layout = predictor, limits, packing, layout
        self._seconds = _layer_seconds(predictor, self.sizes.mean)

    # --- the parts of the chain ---

    def cuts(self, number: int) -> tuple[Ints, Ints]:
        """Return (starts, ends) of the parts that stage `number` can hold when every stage holds a layer."""
        layers, after = self._limits.layers, self._layout.pipeline - 1 - number
        starts, ends = np.triu_indices(layers + 1, 1)
        possible = (starts >= number) & (ends <= layers - after)
        possible &= (starts == 0) | (number > 0)
        possible &= (ends == layers) | (after > 0)
        return starts[possible], ends[possible]

    def holdings(self, number: int, starts: Ints, ends: Ints) -> Holdings:
        last = number == self._layout.pipeline - 1
        return Holdings.of(starts, ends, self._limits.vision_layers, embeds=number == 0, heads=last)

    def stage_bytes(self, number: int, parts: Parts) -> Array:
        """Return the expected bytes of the parts as stage `number`, [parts]."""
        slices = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, max(len(parts), 1), _ROWS_AT_ONCE)]
        return np.concatenate(
            [self._predictor.stage_bytes(parts[rows], self._layout, number, self.sizes) for rows in slices]
        )

    # --- the best plans ---

    def best(self, wanted: Wanted) -> list[Plan]:
        """Return the plans of least time by the closed form of `splits`, the best first, each with another split.

        Only stages up to a bound on their time are considered. A plan with a slower stage takes at least total +
        (m - 1) bound, where total is the time of all layers without recomputation. The bound is raised until this is
        no less than the times that were found.
        """
        others = self.sizes.epoch.micro_batches - 1
        everything = Holdings.of(
            np.array([0]), np.array([self._limits.layers]), self._limits.vision_layers, embeds=True, heads=True
        )
        most = self._seconds.of(everything.parts(everything.vision, everything.language))[0]
        kept = [self._kept(number) for number in range(self._layout.pipeline)]
        fastest = min_max_split(kept, self._limits.layers)
        assert fastest is not None  # no stage time is infinite
        bound, over = _FIRST_BOUND * fastest.slowest, np.inf
        known_to_fit = False
        while True:
            fitting = self._fitting(kept, bound, over)
            found = best_splits([stage.choices for stage in fitting], self._limits.layers, others + 1, wanted)
            known_to_fit = known_to_fit or bool(found) or self._any_fits()
            if not known_to_fit:
                return []
            over = wanted.most_seconds(found, others + 1) - fastest.total
            if over <= others * bound or bound == np.inf:
                return [self._plan(fitting, split) for split in found]
            raised = min(_NEXT_BOUND * bound, over / others * _ROUNDING if others else np.inf)
            bound = raised if raised < most else np.inf  # no stage takes longer than all layers recomputed

    def _kept(self, number: int) -> Choices:
        """Return all parts of the chain with nothing recomputed, whether they fit or not."""
        starts, ends = self.cuts(number)
        nothing = np.zeros_like(starts)
        seconds = self._seconds.of(self.holdings(number, starts, ends).parts(nothing, nothing))
        return Choices(starts=starts, ends=ends, seconds=seconds)

    def _fitting(self, kept: list[Choices], bound: float, over: float) -> list[_Fitting]:
        """Return what fits each stage within the bound, in steps that take at most `over` more than the least total."""
        rows = rows_within(kept, self._limits.layers, bound)
        micro_batches = self.sizes.epoch.micro_batches
        fitting = []
        for number, (choices, of_stage) in enumerate(zip(kept, rows, strict=True)):
            within = choices[of_stage]
            bounds = np.minimum(bound, (over + within.seconds) / micro_batches * _ROUNDING)
            fitting.append(self._fitting_stage(number, within.starts, within.ends, bounds))
        return fitting

    def _fitting_stage(self, number: int, starts: Ints, ends: Ints, bounds: Array) -> _Fitting:
        held, first, which = self.holdings(number, starts, ends).distinct()
        found = least_recomputes(held, lambda parts: self._fits(number, parts), self._seconds, bounds[first])
        places = np.flatnonzero(found.seconds[which] < np.inf)
        rows = which[places]
        return _Fitting(
            choices=Choices(starts=starts[places], ends=ends[places], seconds=found.seconds[rows]),
            held=held[rows],
            recompute_vision=found.vision[rows],
            recompute_language=found.language[rows],
        )

    def _fits(self, number: int, parts: Parts) -> Bools:
        fits: Bools = self.stage_bytes(number, parts) <= self._limits.usable_bytes
        return fits

    def _any_fits(self) -> bool:
        """Return whether any split fits."""
        # A stage that begins later needs less, so for each end the latest start that can be reached decides.
        reached = np.array([0])
        for number in range(self._layout.pipeline):
            ends = np.arange(reached[0] + 1, self._limits.layers + 1)
            starts = reached[np.searchsorted(reached, ends) - 1]
            # With all layers recomputed, or all but one of a kind: keeping the last one may need less.
            fewer_vision, fewer_language = np.repeat([[0, 0, 1, 1], [0, 1, 0, 1]], len(starts), axis=1)
            held = self.holdings(number, np.tile(starts, 4), np.tile(ends, 4))
            vision, language = held.vision - fewer_vision, held.language - fewer_language
            leanest = held.parts(np.maximum(vision, 0), np.maximum(language, 0))
            reached = ends[np.logical_or.reduce(self._fits(number, leanest).reshape(4, -1), axis=0)]
            if not len(reached):
                return False
        return bool(reached[-1] == self._limits.layers)

    # --- given splits ---

    def fit(self, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these stage boundaries and the least time for recomputation; None if none fits."""

        def fitting(number: int, start: int, end: int) -> Stage | None:
            found = self._fitting_stage(number, np.array([start]), np.array([end]), np.array([np.inf]))
            return found.stage(0) if len(found.choices.seconds) else None

        return self._joined(boundaries, fitting)

    def fit_fewest(self, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these boundaries and the fewest recomputed layers, vision first; None if none fits."""

        def fewest(number: int, start: int, end: int) -> Stage | None:
            counts = np.arange(end - start + 1)
            held = self.holdings(number, np.full_like(counts, start), np.full_like(counts, end))
            vision = np.minimum(counts, held.vision)
            fits = np.flatnonzero(self._fits(number, held.parts(vision, counts - vision)))
            return _stage(held, int(fits[0]), vision, counts - vision) if len(fits) else None

        return self._joined(boundaries, fewest)

    # --- plans ---

    def _plan(self, fitting: list[_Fitting], split: Split) -> Plan:
        stages = tuple(stage.stage(row) for stage, row in zip(fitting, split.rows, strict=True))
        return Plan(packing=self._packing, layout=self._layout, stages=stages)

    def _joined(self, boundaries: tuple[int, ...], stage_of: Callable[[int, int, int], Stage | None]) -> Plan | None:
        """Return the plan of the stages that `stage_of` finds for (number, start, end); None when one is None."""
        stages = [stage_of(number, *part) for number, part in enumerate(pairwise((0, *boundaries)))]
        found = tuple(stage for stage in stages if stage is not None)
        return Plan(packing=self._packing, layout=self._layout, stages=found) if len(found) == len(stages) else None


def _stage(held: Holdings, row: int, recompute_vision: Ints, recompute_language: Ints) -> Stage:
    return Stage(
        vision=int(held.vision[row]),
        language=int(held.language[row]),
        recompute_vision=int(recompute_vision[row]),
        recompute_language=int(recompute_language[row]),
    )


def _check(limits: Limits, layout: Layout, micro_batches: int) -> None:
    if layout.pipeline > limits.layers:
        raise InvalidPlan(
            f"{layout.pipeline} stages need a layer each but the model has {limits.layers}; "
            f"use a pipeline of at most {limits.layers}"
        )
    if micro_batches < 1:
        raise InvalidPlan(f"a step needs at least 1 micro-batch, not {micro_batches}; give data to every step")


def _layer_seconds(predictor: Predictor, mean: Array) -> LayerSeconds:
    """Return the time of one layer of each kind alone; that of a stage is their sum."""
    each, nothing = np.eye(len(KINDS)), np.zeros((len(KINDS), len(KINDS)))

    def of(parts: Parts) -> Array:
        forward, backward = predictor.pass_seconds(parts, mean)
        seconds: Array = (predictor.load_seconds(parts, mean) + forward + backward)[0]
        return seconds

    return LayerSeconds(
        kept=of(Parts(layers=each, recomputed=nothing)), recomputed=of(Parts(layers=nothing, recomputed=each))
    )
