"""The splitting problem of one packing and layout: what fits each stage, in what time, and the best plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise

import numpy as np

from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.solver.candidates import CandidateStages, Cuts, cuts
from autotune.search.solver.layer_seconds import LayerSeconds, layer_seconds, least_seconds, mean_seconds
from autotune.search.solver.limits import Limits
from autotune.search.solver.mixtures import Mixtures
from autotune.search.solver.recompute import Level, Recomputes, least_recomputes
from autotune.search.solver.rungs import Counts, Rungs
from autotune.search.solver.splits import (
    Choices,
    Split,
    WantedSplits,
    best_splits,
    least_slowest,
    min_max_split,
    rows_within,
)
from trials.arrays import Floats, Ints
from trials.errors import InvalidPlan
from trials.plan import Layout, Packing, Plan
from trials.stage import TOWERS, Stage

# Choices: a bound that is too low repeats the pruned problem, one that is too high keeps stages of no best split.
_FIRST_BOUND = 1.15
"""First bound on the slowest stage, as a multiple of its time with unlimited memory."""
_NEXT_BOUND = 1.6
"""Factor by which the bound grows. With everything recomputed stages take about 1.4 times as long."""
_OUTER_PACKS = 0.6
"""Size of the first and the last pack of a step over that of the mean pack: on 15 simulated workloads at least 0.67."""
# Bounds come from sums and quotients of many times: widened by far more than float64 rounds, so that none is lost.
_ROUNDING = 1 + 1e-9
# A choice: 128 KiB for each column of float64.
_ROWS_AT_ONCE = 1 << 14
"""Parts whose memory is predicted at once, few enough for their table to stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fitting:
    """Choices that fit one stage, all [choices]."""

    choices: Choices
    held: CandidateStages
    counts: Callable[[int], Counts]
    """Rungs of the layers at each level, by row."""
    stages: dict[int, Stage] = field(default_factory=dict)
    """Stages of plans by row, which many plans share."""

    def stage(self, row: int) -> Stage:
        if row not in self.stages:
            self.stages[row] = self.held.stage(row, self.counts(row))
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
        return tuple(
            layer_seconds(self._predictor, self._layout, sizes, self._everything) for sizes in self.sizes.of_levels
        )

    @cached_property
    def _seconds(self) -> LayerSeconds:
        """Seconds of the mean row, where every level recomputes the same layers."""
        return mean_seconds(self._of_levels, [sizes.row_share for sizes in self.sizes.of_levels])

    @property
    def _level(self) -> Level:
        # Not kept: the condition holds the problem, which would hold its sizes until the next collection of garbage.
        return Level(excess=self._excess, freed=self._freed, seconds=self._seconds)

    @cached_property
    def _freed(self) -> Floats:
        in_flight = self._behind(np.arange(self._layout.pipeline)) + 1
        return self._predictor.memory.freed(in_flight, self._layout, self.sizes, self.rungs)

    @cached_property
    def rungs(self) -> Rungs:
        """Two for a kind of layers whose selective recomputation frees more bytes in a second than the rest of it."""
        costs = [self._predictor.costs[tower] for tower in TOWERS]
        if self._layout.shards_weights or not any(cost.can_select for cost in costs):
            return 1, 1
        two = self._seconds.of_rungs((2, 2)).reshape(2, 2)
        freed = sum(
            sizes.row_share * self._predictor.memory.of_layers(sizes.degree, self._layout).freed((2, 2)) @ sizes.mean[0]
            for sizes in self.sizes.of_levels
        ).reshape(2, 2)
        ways = [
            cost.can_select
            and not self._layout.offloads(tower)
            and first_bytes > 0
            and first * later_bytes <= later * first_bytes
            for tower, cost, first, later, first_bytes, later_bytes in zip(TOWERS, costs, *two, *freed, strict=True)
        ]
        return 1 + ways[0], 1 + ways[1]

    @cached_property
    def _mixtures(self) -> Mixtures | None:
        """Packs of several levels; None where there is one."""
        if len(self.sizes.of_levels) == 1:
            return None
        return Mixtures(self._predictor, self._limits.usable_bytes, self._layout, self.sizes, self._of_levels)

    @property
    def recompute_seconds(self) -> Floats:
        """Seconds that recomputing or offloading a layer adds for the mean row, [kinds]."""
        return self._seconds.recomputed

    # --- the parts of the chain ---

    @property
    def cuts(self) -> Cuts:
        """The parts that stages can hold when each holds a layer."""
        return cuts(self._limits.layers, self._limits.vision_layers, self._layout.pipeline, self.rungs)

    def stage_bytes(self, held: CandidateStages, vision_rungs: Ints, language_rungs: Ints) -> Floats:
        """Return the expected bytes of the stages with these rungs at every level, [candidates].

        With several levels it is a bound: the heaviest packs of all are in flight together.
        """
        parts = held.parts(vision_rungs, language_rungs)
        # One slice even where there are no parts: numpy cannot concatenate nothing.
        slices = [slice(first, first + _ROWS_AT_ONCE) for first in range(0, max(len(parts), 1), _ROWS_AT_ONCE)]
        return np.concatenate([self._bytes(parts[rows], held.numbers[rows]) for rows in slices])

    def forward_seconds(self, held: CandidateStages) -> Floats:
        """Return the seconds of the forward passes of the mean row, [candidates]."""
        nothing = np.zeros_like(held.vision)
        parts = held.parts(nothing, nothing)
        seconds: Floats = np.sum(
            [
                each.row_share * self._predictor.times.pass_seconds(parts, self._layout, each.mean)[0][0]
                for each in self.sizes.of_levels
            ],
            axis=0,
        )
        return seconds

    def _bytes(self, parts: Parts, numbers: Ints) -> Floats:
        if len(self.sizes.of_levels) == 1:
            return self._predictor.memory.expected(parts, self._layout, numbers, self.sizes)
        heaviest = [self._predictor.memory.of_heaviest(parts, self._layout, sizes) for sizes in self.sizes.of_levels]
        kept, running = np.max(heaviest, axis=0)
        needed: Floats = self._predictor.memory.static(parts, self._layout) + running + self._behind(numbers) * kept
        return needed

    def _behind(self, numbers: Ints) -> Ints:
        """Return how many packs are in flight behind the one whose backward pass runs, [candidates]."""
        behind: Ints = np.minimum(self._layout.pipeline - numbers, self.sizes.epoch.micro_batches) - 1
        return behind

    def _held(self, numbers: Ints, starts: Ints, ends: Ints) -> CandidateStages:
        held = CandidateStages.of(numbers, starts, ends, self._limits.vision_layers, self._layout.pipeline)
        return held.with_rungs(self.rungs)

    # --- the best plans ---

    def least_seconds(self) -> float:
        """Return the epoch seconds of the best split by the closed form of `splits`, with unlimited memory.

        Each step ends with the update of a mean stage, which adds up no tied weight with another one. Packs that pass
        other stages alone are smaller than the mean. Deferred weight gradients shorten that by twice their share (Qi et
        al. 2023). With ZeRO 3 all weights stay gathered for the backward pass. No packs are arranged for it.
        """
        layout, epoch, parts = self._layout, self.sizes.epoch, self._everything
        slowest = least_slowest(self._kept(), self._limits.layers)
        shorter = 1 - 2 * self._predictor.times.deferred_share(parts, layout, self.sizes)
        alone = shorter * _OUTER_PACKS * (self._seconds.of(parts)[0] - slowest)
        update = self._predictor.times.update_parts(layout, parts, self.sizes).seconds[0] / layout.pipeline
        if layout.shards_weights:
            slowest = sum(
                each.row_share * least_seconds(self._predictor, layout, each, parts) for each in self.sizes.of_levels
            )
        return float(epoch.height * slowest + self.sizes.epoch_steps * (alone + update))

    def best(self, wanted: WantedSplits) -> list[Plan]:
        """Return the plans of least time by the closed form of `splits`, the best first, each with another split.

        Only stages up to a bound on their time are considered. A plan with a slower stage takes at least total +
        (m - 1) bound, where total is the time of all layers without recomputation. The bound is raised until this is
        no less than the times that were found.
        """
        others, every = self.sizes.epoch.micro_batches - 1, self._everything
        most = self._seconds.of(replace(every, recomputed=every.layers))[0]
        kept = self._kept()
        fastest = min_max_split(kept, self._limits.layers)
        assert fastest is not None  # no stage time is infinite
        bound, over = _FIRST_BOUND * fastest.slowest, np.inf
        known_to_fit, is_raised = False, False
        while True:
            fitting = self._fitting(kept, bound, over)
            found = self._best_splits(fitting, wanted)
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
    def _everything(self) -> Parts:
        """The whole chain as one stage, with nothing recomputed."""
        nothing = np.array([0])
        ends = np.array([self._limits.layers])
        return CandidateStages.of(nothing, nothing, ends, self._limits.vision_layers, 1).parts(nothing, nothing)

    def _joined(self, fitting: list[_Fitting], split: Split) -> Plan:
        return self._plan(tuple(stage.stage(row) for stage, row in zip(fitting, split.rows, strict=True)))

    def _best_splits(self, fitting: list[_Fitting], wanted: WantedSplits) -> tuple[Split, ...]:
        """Return the best splits of what fits. With several levels, the seconds of stages in none of them may be less.

        No other split is better then: the seconds that are not those of the best counts are at most those.
        """
        while True:
            choices = [stage.choices for stage in fitting]
            found = best_splits(choices, self._limits.layers, self.sizes.epoch.micro_batches, wanted)
            if self._mixtures is None:
                return found
            of_stages = [sorted({split.rows[number] for split in found}) for number in range(len(fitting))]
            raised = [_raised(stage, rows, self._mixtures) for stage, rows in zip(fitting, of_stages, strict=True)]
            if not any(raised):
                return found

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

    def _fitting_parts(self, held: CandidateStages, starts: Ints, ends: Ints, bounds: Floats) -> list[_Fitting]:
        """Return what fits of the parts, whose stages ascend, by stage."""
        alike, first, which = held.distinct()
        found = self._least(alike, bounds[first])
        fits = found.seconds[which] < np.inf
        stages = []
        for places in np.split(np.flatnonzero(fits), np.searchsorted(held.numbers[fits], np.arange(1, held.stages))):
            rows = which[places]
            stages.append(
                _Fitting(
                    choices=Choices(starts=starts[places], ends=ends[places], seconds=found.seconds[rows]),
                    held=alike[rows],
                    counts=partial(self._counts, alike[rows], found.vision[rows], found.language[rows]),
                )
            )
        return stages

    def _counts(self, held: CandidateStages, vision: Ints, language: Ints, row: int) -> Counts:
        if self._mixtures is None:
            return ((int(vision[row]), int(language[row])),)
        solved = self._mixtures.least(held[np.array([row])])
        assert solved is not None  # it is in a split
        return solved[0]

    def _least(self, held: CandidateStages, bounds: Floats) -> Recomputes:
        """Return what least makes the parts fit; of several levels, not the counts and at most the seconds."""
        if self._mixtures is None:
            return least_recomputes(held, self._level, bounds)
        seconds, nothing = self._mixtures.least_seconds(held), np.zeros_like(held.vision)
        within = np.where(seconds <= bounds * _ROUNDING, seconds, np.inf)
        return Recomputes(vision=nothing, language=nothing, seconds=within)

    def _excess(self, held: CandidateStages, vision_rungs: Ints, language_rungs: Ints) -> Floats:
        excess: Floats = self.stage_bytes(held, vision_rungs, language_rungs) - self._limits.usable_bytes
        return excess

    def _any_fits(self) -> bool:
        """Return whether any split fits."""
        if self._mixtures:
            everything = self.cuts.choices(self._mixtures.least_seconds(self.cuts.different))
            return least_slowest(everything, self._limits.layers) < np.inf
        # A stage that begins later needs less, so for each end the latest start that can be reached decides.
        reached = np.array([0])
        for number in range(self._layout.pipeline):
            ends = np.arange(reached[0] + 1, self._limits.layers + 1)
            starts = reached[np.searchsorted(reached, ends) - 1]
            # With all layers recomputed, or all but one of a kind: keeping the last one may need less.
            fewer_vision, fewer_language = np.repeat([[0, 0, 1, 1], [0, 1, 0, 1]], len(starts), axis=1)
            held = self._held(np.full(4 * len(starts), number), np.tile(starts, 4), np.tile(ends, 4))
            vision, language = held.vision_rungs - fewer_vision, held.language_rungs - fewer_language
            fewer = np.maximum(vision, 0), np.maximum(language, 0)
            reached = ends[self._level.fits(held, *fewer).reshape(4, -1).any(axis=0)]
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
        stages = [None if counts is None else alike.stage(row, counts) for row, counts in enumerate(self._each(alike))]
        plans: list[Plan | None] = []
        for rows in which.reshape(boundaries.shape):
            fitting = tuple(stage for row in rows.tolist() if (stage := stages[row]) is not None)
            plans.append(self._plan(fitting) if len(fitting) == len(rows) else None)
        return plans

    def _each(self, held: CandidateStages) -> list[Counts | None]:
        """Return the counts with which each part takes least time; None where none fit."""
        if self._mixtures:
            solved = [self._mixtures.least(held[np.array([row])]) for row in range(len(held))]
            return [each and each[0] for each in solved]
        found = least_recomputes(held, self._level, np.full(len(held), np.inf))
        pairs = zip(found.vision.tolist(), found.language.tolist(), np.isfinite(found.seconds), strict=True)
        return [((vision, language),) if fits else None for vision, language, fits in pairs]

    def fit_fewest(self, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these boundaries and the fewest recomputed layers, vision first; None if none fits."""
        stages = []
        for number, (start, end) in enumerate(pairwise((0, *boundaries))):
            held = self._held(*(np.array([each]) for each in (number, start, end))).with_rungs((1, 1))
            counts = self._mixtures.fewest(held) if self._mixtures else self._fewest(held)
            if counts is None:
                return None
            stages.append(held.stage(0, counts))
        return self._plan(tuple(stages))

    def _fewest(self, held: CandidateStages) -> Counts | None:
        """Return the fewest layers, vision layers first, with which a part fits packs of one level."""
        counts = np.arange(int(held.vision[0] + held.language[0]) + 1)
        vision = np.minimum(counts, held.vision)
        fits = self._level.fits(held[np.zeros_like(counts)], vision, counts - vision)
        fewest = int(np.argmax(fits))
        return ((int(vision[fewest]), int(counts[fewest] - vision[fewest])),) if fits.any() else None

    def _plan(self, stages: tuple[Stage, ...]) -> Plan:
        return Plan(packing=self._packing, layout=self._layout, stages=stages)


def _raised(stage: _Fitting, rows: Sequence[int], mixtures: Mixtures) -> bool:
    """Set the seconds of these rows to those of their best counts, and return whether any were less."""
    seconds, held, before = stage.choices.seconds, stage.held, stage.choices.seconds[rows]
    for row in rows:
        solved = mixtures.least(held[np.array([row])])
        alike = (held.vision == held.vision[row]) & (held.language == held.language[row])
        seconds[alike & (held.projects == held.projects[row])] = np.inf if solved is None else solved[1]
    raised = bool((seconds[rows] > _ROUNDING * before).any())
    if raised:
        # The windows that decided these parts may raise the lower bounds of the other parts as well.
        np.maximum(seconds, mixtures.least_seconds(held), out=seconds)
    return raised


def _check(limits: Limits, layout: Layout, micro_batches: int) -> None:
    if layout.pipeline > limits.layers:
        raise InvalidPlan(
            f"{layout.pipeline} stages need a layer each but the model has {limits.layers}; "
            f"use a pipeline of at most {limits.layers}"
        )
    if micro_batches < 1:
        raise InvalidPlan(f"a step needs at least 1 micro-batch, not {micro_batches}; give data to every step")
