"""The splitting problem of one packing and layout: what fits each stage, in what time, and the best plans."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from autotune.prediction.costs import Array
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.holdings import Cuts, Holdings, cuts
from autotune.search.solver.limits import Limits
from autotune.search.solver.recompute import (
    Excess,
    LayerSeconds,
    Level,
    least_of_alternatives,
    mean_seconds,
)
from autotune.search.solver.splits import (
    Choices,
    Split,
    Wanted,
    best_splits,
    least_slowest,
    min_max_split,
    rows_within,
)
from trials.data.records.sample import Ints
from trials.errors import InvalidPlan
from trials.layer_costs import KINDS
from trials.plan import Layout, Packing, Plan, Recomputed, Stage

_FIRST_BOUND = 1.15
"""First bound on the slowest stage, as a multiple of its time with unlimited memory."""
_NEXT_BOUND = 1.6
"""Factor by which the bound grows. With everything recomputed stages take about 1.4 times as long."""
_OUTER_PACKS = 0.6
"""Size of the first and the last pack of a step over that of the mean pack: on 15 simulated workloads at least 0.67."""
_ROUNDING = 1 + 1e-9
SHARES = (1.0, 0.95, 0.9, 0.75, 0.5, 0.25, 0.125)
"""Shares of the memory of a pack in flight that packs of several levels may keep, so that they fit together."""
_ROWS_AT_ONCE = 1 << 14
"""Parts whose memory is predicted at once, few enough for their table to stay in the cache."""
_EACH_LAYER = Parts(
    layers=np.eye(2 * len(KINDS), len(KINDS)), recomputed=np.eye(2 * len(KINDS), len(KINDS), k=-len(KINDS))
)
"""A layer of each kind alone, and then only what recomputing one adds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fitting:
    """Choices that fit one stage, all [choices]."""

    choices: Choices
    held: Holdings
    recomputed: tuple[tuple[Ints, Ints], ...]
    """(vision, language) layers that are recomputed at each level."""
    stages: dict[int, Stage] = field(default_factory=dict)
    """Stages of plans by row, which many plans share."""

    def stage(self, row: int) -> Stage:
        if row not in self.stages:
            self.stages[row] = _stage(self.held, row, self.recomputed)
        return self.stages[row]


class Problem:
    """The pipeline of one layout over the model's chain, for the packs of one packing."""

    def __init__(self, predictor: Predictor, limits: Limits, packing: Packing, layout: Layout) -> None:
        """Raise InvalidPlan when there is no plan, whatever the memory."""
        self.sizes = predictor.sizes(packing, layout)
        _check(limits, layout, self.sizes.epoch.micro_batches)
        self._predictor, self._limits, self._packing, self._layout = predictor, limits, packing, layout

    @cached_property
    def _of_levels(self) -> tuple[LayerSeconds, ...]:
        return tuple(_layer_seconds(self._predictor, self._layout, sizes) for sizes in self.sizes.of_levels)

    @cached_property
    def _seconds(self) -> LayerSeconds:
        """Those of the mean row, when the same layers are recomputed at every level."""
        return mean_seconds(self._of_levels, [sizes.row_share for sizes in self.sizes.of_levels])

    @property
    def _alternatives(self) -> list[list[Level]]:
        """The levels with conditions that are enough to fit together; those of any alternative are."""
        # Not kept: the conditions hold the problem, which would hold its sizes until the next collection of garbage.
        return [
            [
                Level(excess=excess, freed=of_bytes, seconds=seconds, row_share=sizes.row_share)
                for excess, of_bytes, seconds, sizes in zip(
                    of_levels, self._freed_by_level, self._of_levels, self.sizes.of_levels, strict=True
                )
            ]
            for of_levels in self._conditions
        ]

    @cached_property
    def _freed_by_level(self) -> list[Array]:
        return [self._freed(sizes) for sizes in self.sizes.of_levels]

    @property
    def freeing_seconds(self) -> Array:
        """Seconds that recomputing or offloading a layer adds for the mean row, [kinds]."""
        return self._seconds.recomputed

    # --- the parts of the chain ---

    @property
    def cuts(self) -> Cuts:
        """The parts that stages can hold when each holds a layer."""
        return cuts(self._limits.layers, self._limits.vision_layers, self._layout.pipeline)

    def stage_bytes(self, held: Holdings, recompute_vision: Ints, recompute_language: Ints) -> Array:
        """Return the expected bytes of the stages with these layers recomputed at every level, [holdings].

        With several levels it is a bound: the heaviest packs of all are in flight together.
        """
        parts = held.parts(recompute_vision, recompute_language)
        # One slice even where there are no parts: numpy cannot concatenate nothing.
        slices = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, max(len(parts), 1), _ROWS_AT_ONCE)]
        return np.concatenate([self._bytes(parts[rows], held.numbers[rows]) for rows in slices])

    def forward_seconds(self, held: Holdings) -> Array:
        """Return the seconds of the forward passes of the mean row, [holdings]."""
        nothing = np.zeros_like(held.vision)
        parts = held.parts(nothing, nothing)
        seconds: Array = np.sum(
            [
                each.row_share * self._predictor.pass_seconds(parts, self._layout, each.mean)[0][0]
                for each in self.sizes.of_levels
            ],
            axis=0,
        )
        return seconds

    def _bytes(self, parts: Parts, numbers: Ints) -> Array:
        if len(self.sizes.of_levels) == 1:
            return self._predictor.stage_bytes(parts, self._layout, numbers, self.sizes)
        heaviest = [self._predictor.heaviest_bytes(parts, self._layout, sizes) for sizes in self.sizes.of_levels]
        kept, running = np.max(heaviest, axis=0)
        needed: Array = self._predictor.static_bytes(parts, self._layout) + running + self._behind(numbers) * kept
        return needed

    def _behind(self, numbers: Ints) -> Ints:
        """Return how many packs are in flight behind the one whose backward pass runs, [holdings]."""
        behind: Ints = np.minimum(self._layout.pipeline - numbers, self.sizes.epoch.micro_batches) - 1
        return behind

    def _held(self, numbers: Ints, starts: Ints, ends: Ints) -> Holdings:
        return Holdings.of(numbers, starts, ends, self._limits.vision_layers, self._layout.pipeline)

    # --- the best plans ---

    def least_seconds(self) -> float:
        """Return the epoch seconds of the best split by the closed form of `splits`, with unlimited memory.

        Each step ends with the update of a mean stage. The packs that pass other stages alone are the first and the
        last of a step, which are smaller than the mean pack. No packs are arranged for it.
        """
        layout, epoch, every = self._layout, self.sizes.epoch, self._everything
        nothing = np.zeros_like(every.vision)
        parts = every.parts(nothing, nothing)
        slowest = least_slowest(self._kept(), self._limits.layers)
        alone = _OUTER_PACKS * (self._seconds.of(parts)[0] - slowest)
        update = self._predictor.update_parts(layout, parts, self.sizes).seconds[0] / layout.pipeline
        return float(epoch.height * slowest + self.sizes.epoch_steps * (alone + update))

    def best(self, wanted: Wanted) -> list[Plan]:
        """Return the plans of least time by the closed form of `splits`, the best first, each with another split.

        Only stages up to a bound on their time are considered. A plan with a slower stage takes at least total +
        (m - 1) bound, where total is the time of all layers without recomputation. The bound is raised until this is
        no less than the times that were found.
        """
        others, every = self.sizes.epoch.micro_batches - 1, self._everything
        most = self._seconds.of(every.parts(every.vision, every.language))[0]
        kept = self._kept()
        fastest = min_max_split(kept, self._limits.layers)
        assert fastest is not None  # no stage time is infinite
        bound, over = _FIRST_BOUND * fastest.slowest, np.inf
        # Several levels have several conditions, which would all be searched in vain where no split meets any of them.
        known_to_fit, is_raised = len(self.sizes.of_levels) > 1, False
        if known_to_fit and not self._any_fits():
            return []
        while True:
            fitting = self._fitting(kept, bound, over)
            found = best_splits([stage.choices for stage in fitting], self._limits.layers, others + 1, wanted)
            # The bound may be too low for stages that recompute, which is seen sooner than whether any fit.
            known_to_fit = known_to_fit or bool(found)
            if not known_to_fit and is_raised and not (known_to_fit := self._any_fits()):
                return []
            is_raised = True
            over = wanted.most_seconds(found, others + 1) - fastest.total
            if over <= others * bound or bound == np.inf:
                return [self._joined(fitting, split) for split in found]
            # In a step of one micro-batch the slowest stage counts no second time, so no bound excludes anything.
            raised = min(_NEXT_BOUND * bound, over / others * _ROUNDING if others else np.inf)
            bound = raised if raised < most else np.inf  # no stage takes longer than all layers recomputed

    @property
    def _everything(self) -> Holdings:
        """The whole chain as one stage."""
        nothing = np.array([0])
        return Holdings.of(nothing, nothing, np.array([self._limits.layers]), self._limits.vision_layers, 1)

    def _joined(self, fitting: list[_Fitting], split: Split) -> Plan:
        return self._plan(tuple(stage.stage(row) for stage, row in zip(fitting, split.rows, strict=True)))

    def _kept(self) -> list[Choices]:
        """Return all parts of the chain by stage, with nothing recomputed, whether they fit or not."""
        return self.cuts.choices(self._seconds.of(self.cuts.kept))

    def _fitting(self, kept: list[Choices], bound: float, over: float) -> list[_Fitting]:
        """Return what fits each stage within the bound, in steps that take at most `over` more than the least total."""
        rows = rows_within(kept, self._limits.layers, bound)
        within = [choices[of_stage] for choices, of_stage in zip(kept, rows, strict=True)]
        starts, ends, seconds = (
            np.concatenate([getattr(choices, column) for choices in within]) for column in ("starts", "ends", "seconds")
        )
        # A stage of x seconds adds x - `seconds` to the least total, and (m - 1) x for the other micro-batches: both
        # together are at most `over`.
        bounds = np.minimum(bound, (over + seconds) / self.sizes.epoch.micro_batches * _ROUNDING)
        numbers = np.repeat(np.arange(len(rows)), [len(of_stage) for of_stage in rows])
        return self._fitting_parts(self._held(numbers, starts, ends), starts, ends, bounds)

    def _fitting_parts(self, held: Holdings, starts: Ints, ends: Ints, bounds: Array) -> list[_Fitting]:
        """Return what fits of the parts, whose stages ascend, by stage."""
        alike, first, which = held.distinct()
        found, seconds = least_of_alternatives(alike, self._alternatives, bounds[first])
        fits = seconds[which] < np.inf
        stages = []
        for places in np.split(np.flatnonzero(fits), np.searchsorted(held.numbers[fits], np.arange(1, held.stages))):
            rows = which[places]
            stages.append(
                _Fitting(
                    choices=Choices(starts=starts[places], ends=ends[places], seconds=seconds[rows]),
                    held=alike[rows],
                    recomputed=tuple((each.vision[rows], each.language[rows]) for each in found),
                )
            )
        return stages

    @property
    def _conditions(self) -> list[list[Excess]]:
        """Conditions for the packs of each level, of which those of any row are enough."""
        if len(self.sizes.of_levels) == 1:
            return [[self._excess]]
        return [[partial(self._excess_beside, sizes, share) for sizes in self.sizes.of_levels] for share in SHARES]

    def _excess(self, held: Holdings, recompute_vision: Ints, recompute_language: Ints) -> Array:
        excess: Array = self.stage_bytes(held, recompute_vision, recompute_language) - self._limits.usable_bytes
        return excess

    def _excess_beside(
        self, sizes: EpochSizes, share: float, held: Holdings, recompute_vision: Ints, recompute_language: Ints
    ) -> Array:
        """Return the excess of the packs of one level, with packs of other levels in flight that meet the same limits.

        Each keeps at most a share of what there is for a pack in flight, so that the one that runs has the rest.
        """
        parts = held.parts(recompute_vision, recompute_language)
        kept, running = self._predictor.heaviest_bytes(parts, self._layout, sizes)
        usable, behind = (
            self._limits.usable_bytes - self._predictor.static_bytes(parts, self._layout),
            self._behind(held.numbers),
        )
        most_kept = share * usable / (behind + 1)
        # Where only one pack is in flight, none waits while another runs, so its share is no limit.
        excess: Array = np.maximum(
            running + behind * most_kept - usable, np.where(behind == 0, -np.inf, kept - most_kept)
        )
        return excess

    def _freed(self, sizes: EpochSizes) -> Array:
        """Return `Level.freed` of the packs of a level."""
        numbers = np.arange(self._layout.pipeline)
        # Of several levels, the conditions are those of a single pack.
        in_flight = self._behind(numbers) + 1 if len(self.sizes.of_levels) == 1 else np.ones_like(numbers)
        return self._predictor.freed_bytes(in_flight, self._layout, sizes)

    def _any_fits(self) -> bool:
        """Return whether any split fits."""
        # A stage that begins later needs less, so for each end the latest start that can be reached decides.
        reached = np.array([0])
        for number in range(self._layout.pipeline):
            ends = np.arange(reached[0] + 1, self._limits.layers + 1)
            starts = reached[np.searchsorted(reached, ends) - 1]
            # With all layers recomputed, or all but one of a kind: keeping the last one may need less.
            fewer_vision, fewer_language = np.repeat([[0, 0, 1, 1], [0, 1, 0, 1]], len(starts), axis=1)
            held = self._held(np.full(4 * len(starts), number), np.tile(starts, 4), np.tile(ends, 4))
            vision, language = held.vision - fewer_vision, held.language - fewer_language
            fewer = np.maximum(vision, 0), np.maximum(language, 0)
            fits = [
                [level.fits(held, *fewer).reshape(4, -1).any(axis=0) for level in levels]
                for levels in self._alternatives
            ]
            reached = ends[np.all(fits, axis=1).any(axis=0)]
            if not len(reached):
                return False
        return bool(reached[-1] == self._limits.layers)

    # --- given splits ---

    def fit(self, several: Sequence[tuple[int, ...]]) -> list[Plan | None]:
        """Return the plan of least time with each of these stage boundaries; None if none fits."""
        boundaries = np.array(several)
        starts = np.pad(boundaries[:, :-1], ((0, 0), (1, 0)))
        numbers = np.tile(np.arange(boundaries.shape[1]), len(boundaries))
        held = self._held(numbers, starts.ravel(), boundaries.ravel())
        alike, _, which = held.distinct()
        found, seconds = least_of_alternatives(alike, self._alternatives, np.full(len(alike), np.inf))
        recomputed = tuple((each.vision, each.language) for each in found)
        stages = [_stage(alike, row, recomputed) for row in range(len(alike))]
        fits = np.isfinite(seconds)
        return [
            self._plan(tuple(stages[row] for row in rows.tolist())) if fits[rows].all() else None
            for rows in which.reshape(boundaries.shape)
        ]

    def fit_fewest(self, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these boundaries and the fewest recomputed layers, vision first; None if none fits."""
        stages = []
        for number, (start, end) in enumerate(pairwise((0, *boundaries))):
            counts = np.arange(end - start + 1)
            held = self._held(*(np.full_like(counts, each) for each in (number, start, end)))
            vision = np.minimum(counts, held.vision)
            language = counts - vision
            several = ([level.fits(held, vision, language) for level in levels] for levels in self._alternatives)
            fits = next((levels for levels in several if np.any(levels, axis=1).all()), None)
            if fits is None:
                return None
            fewest = [int(np.argmax(of_level)) for of_level in fits]
            stages.append(_stage(held, 0, [(vision[[count]], language[[count]]) for count in fewest]))
        return self._plan(tuple(stages))

    def _plan(self, stages: tuple[Stage, ...]) -> Plan:
        return Plan(packing=self._packing, layout=self._layout, stages=stages)


def _stage(held: Holdings, row: int, recomputed: Sequence[tuple[Ints, Ints]]) -> Stage:
    first, *further = [
        Recomputed(vision=int(vision[row]), language=int(language[row])) for vision, language in recomputed
    ]
    return Stage(
        vision=int(held.vision[row]),
        language=int(held.language[row]),
        recompute_vision=first.vision,
        recompute_language=first.language,
        further_levels=tuple(further),
    )


def _check(limits: Limits, layout: Layout, micro_batches: int) -> None:
    if layout.pipeline > limits.layers:
        raise InvalidPlan(
            f"{layout.pipeline} stages need a layer each but the model has {limits.layers}; "
            f"use a pipeline of at most {limits.layers}"
        )
    if micro_batches < 1:
        raise InvalidPlan(f"a step needs at least 1 micro-batch, not {micro_batches}; give data to every step")


def _layer_seconds(predictor: Predictor, layout: Layout, sizes: EpochSizes) -> LayerSeconds:
    """Return the time of one layer of each kind alone for the mean pack; that of a stage is their sum."""
    mean, whole = sizes.mean, sizes.whole.mean(axis=0, keepdims=True)
    forward, backward = predictor.pass_seconds(_EACH_LAYER, layout, mean)
    exchange, exchange_back = predictor.exchange_seconds(_EACH_LAYER, layout, mean, np.array([sizes.degree]))
    seconds = predictor.load_seconds(_EACH_LAYER, whole) + forward + backward + exchange + exchange_back
    kept, recomputed = seconds.reshape(2, len(KINDS))
    return LayerSeconds(kept=kept, recomputed=recomputed)
