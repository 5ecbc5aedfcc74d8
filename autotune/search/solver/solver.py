"""Splits and recompute counts of least predicted time that fit the memory, for a packing and a layout."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import chain

import numpy as np

from autotune.dimensions.averages import average_seconds, extrapolates
from autotune.dimensions.folds import unprofiled
from autotune.dimensions.overlap import overlapped
from autotune.dimensions.tensor import tensor_degrees
from autotune.epoch_balance import step_sums
from autotune.prediction.comparison import cautious_seconds
from autotune.prediction.predictor import Predictor
from autotune.search.solver.candidates import CandidateStages
from autotune.search.solver.limits import Limits
from autotune.search.solver.problem import Problem
from autotune.search.solver.rungs import Rungs
from autotune.search.solver.spare_memory import SpareMemory
from autotune.search.solver.splits import WantedSplits, layer_counts, min_max_split
from trials.arrays import Floats
from trials.costs.coefficients import KINDS
from trials.plan import Layout, Packing, Plan
from trials.stage import TOWERS, Recomputed, Stage, Tower

RANKED = WantedSplits(count=16, within=1.08)
"""Solutions of the closed form that are compared on real packs: beyond these, hardly any is the fastest."""
# More than any machine has, and within a 64-bit integer.
_AMPLE_BYTES = 1 << 62
_DEFERRING = WantedSplits(count=64, within=1.5)
"""The same of zero-bubble schedules, whose deferred weight gradients the closed form leaves out."""
_OTHER = WantedSplits(count=256, within=4.0)
"""Solutions that are compared where the best one lacks memory for all that stages may use it for."""
_SIMULATED = 200_000
"""Passes of packs that may be simulated to compare splits beyond `RANKED`; a choice."""
_DIGITS = 9
"""Digits of times that are compared; further ones are rounding."""


class Solver:
    """Exact solver of the closed form of `splits` on the mean pack, with the memory of the heaviest packs.

    Every method raises InvalidPlan when the layout has more stages than the model has layers, or its steps no packs.
    """

    def __init__(self, predictor: Predictor, limits: Limits) -> None:
        self._predictor = predictor
        self._limits = limits
        self._spare = SpareMemory(predictor, limits.usable_bytes)
        # Kept, since several parts of a search ask for the same.
        self.solve: Callable[[Packing, Layout], Plan | None] = cache(self._solved)
        """Return the fastest plan on real packs of the best ones by the closed form; None when no split fits."""
        self.least_seconds: Callable[[Packing, Layout], float] = cache(self._least_seconds)
        """Return about the least epoch seconds of any plan, hardly more; infinite where none keeps the batch.

        They are those of the closed form with unlimited memory, and take much less time than `solve`.
        """

        self.rungs: Callable[[Packing, Layout], Rungs] = cache(
            lambda packing, layout: self._problem(packing, layout).rungs
        )
        """Return the rungs of a (vision, language) layer, by which plans free memory."""

    def within(self, predictor: Predictor, limits: Limits) -> "Solver":
        """Return a solver by this predictor within these limits: this one, which keeps what it solved, if it is."""
        return self if predictor is self._predictor and limits == self._limits else Solver(predictor, limits)

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self._limits.layers

    @cached_property
    def ample(self) -> "Solver":
        """The same solver with unlimited memory, so that nothing is recomputed."""
        return Solver(self._predictor, replace(self._limits, memory_limit_bytes=_AMPLE_BYTES))

    def keeps_batch(self, packing: Packing, layout: Layout) -> bool:
        """Return whether the mean global batch is as near to the job's as every plan's has to be."""
        return self._predictor.sizes(packing, layout).epoch.keeps_batch

    @property
    def sequence_degrees(self) -> tuple[int, ...]:
        """Numbers of ranks, above 1, whose exchanges were timed, so that packs that they share can be compared."""
        return self._predictor.costs.timed_degrees("sequence")

    @property
    def tensor_degrees(self) -> tuple[int, ...]:
        """Tensor degrees above 1 that were timed, so that plans with them can be compared."""
        return tensor_degrees(self._predictor.costs)

    def overlapped(self, layout: Layout) -> Layout:
        """Return the layout with averages of gradients during the last backward pass, where that is known to help."""
        return overlapped(self._predictor.costs, layout)

    def unprofiled(self, layout: Layout) -> str | None:
        """Return what the profile has not timed for plans with this layout; None where they can be compared."""
        return unprofiled(self._predictor.costs, layout, exactly=True)

    def extrapolates(self, layout: Layout) -> bool:
        """Return whether the profile timed no averages of gradients that pass between nodes as in this layout."""
        return extrapolates(self._predictor.costs, layout)

    def reduction_seconds(self, layout: Layout) -> float:
        """Return the seconds of averaging a byte of gradients over the data ranks."""
        return average_seconds(self._predictor.costs, layout)

    def recompute_seconds(self, packing: Packing, layout: Layout) -> dict[Tower, float]:
        """Return the seconds that freeing the memory of a layer adds for the mean pack, by kind of layer."""
        seconds = self._problem(packing, layout).recompute_seconds
        return {tower: float(seconds[KINDS.index(tower)]) for tower in TOWERS}

    def epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the predicted epoch seconds of each plan."""
        return self._predictor.plans_epoch_seconds(plans)

    def fills_levels(self, packing: Packing, layout: Layout) -> bool:
        """Return whether each level has packs."""
        levels = self._predictor.sizes(packing, layout).levels
        return bool(np.isin(range(len(packing.degrees)), levels).all())

    def waiting_share(self, packing: Packing, layout: Layout) -> float:
        """Return the share of the time of all layers in which the mean rank waits at the ends of steps."""
        sizes = self._predictor.sizes(packing, layout)
        nothing = np.array([0])
        everything = CandidateStages.of(nothing, nothing, np.array([self.layers]), self._limits.vision_layers, 1)
        forward, backward = self._predictor.times.pass_seconds(everything.parts(nothing, nothing), layout, sizes.table)
        seconds = step_sums(sizes.epoch, (forward + backward)[:, 0][sizes.epoch.assignment])
        return float(1 - seconds.mean(axis=1).sum() / seconds.max(axis=1).sum())

    def admits(self, plan: Plan) -> bool:
        """Return whether a plan of the model's layers can be trained: it keeps the batch, and may fit the memory.

        It must also offload layers of each kind that its layout says; without, it is that of another layout.
        """
        return self.admits_each((plan,))[0]

    def admits_each(self, plans: Sequence[Plan]) -> list[bool]:
        """Return what `admits` does for each plan, in less time."""
        return [
            self.keeps_batch(plan.packing, plan.layout)
            and _offloads_each(plan)
            and self._limits.first_above(memory) is None
            for plan, memory in zip(plans, self._predictor.plans_memory(plans), strict=True)
        ]

    def _solved(self, packing: Packing, layout: Layout) -> Plan | None:
        return next(iter(self.solutions(packing, layout)), None)

    def solutions(self, packing: Packing, layout: Layout, wanted: WantedSplits | None = None) -> tuple[Plan, ...]:
        """Return the plans of least time by the closed form, one per split, in the order of their epoch's time.

        By default these are `RANKED`, and for zero-bubble schedules as many of `_DEFERRING` as are affordable.

        Each recomputes what takes least time. Where only some steps of the epoch are simulated, a plan comes before the
        best one by the closed form if it is surely faster. Equally fast ones stay in the order of the closed form.

        Zero-bubble schedules have the best ones of 1F1B, each stage of which defers as many packs as fit. With ZeRO 3,
        as many layers keep their weights gathered as fit. Where the first lacks memory for all, they are those of
        further splits, and those with as much memory less.
        """
        problem = self._problem(packing, layout)
        if wanted is None:
            wanted = self._affordable(_DEFERRING, packing, layout) if layout.zero_bubble else RANKED
        plans = problem.best(wanted)
        if self._spare.has_use(layout) and plans:
            if lacking := self._spare.lacking(plans[0]):
                lowered = (self._lowered(each)._problem(packing, layout) for each in lacking)
                more = self._affordable(_OTHER, packing, layout)
                others = problem.best(more) if layout.pipeline > 1 else plans
                plans = [*chain.from_iterable(each.best(wanted) for each in lowered), *others]
            plans = [plan for plan in self._spare.used(dict.fromkeys(plans)) if plan is not None]
        if not plans:
            return ()
        # The closed form takes all packs for the mean one; real packs are uneven.
        seconds = cautious_seconds(self._predictor, plans)
        return tuple(plans[number] for number in np.argsort(np.round(seconds / seconds[0], _DIGITS), kind="stable"))

    def _affordable(self, wanted: WantedSplits, packing: Packing, layout: Layout) -> WantedSplits:
        """Return as many of the wanted splits as `_SIMULATED` allows."""
        passes = layout.pipeline * len(self._predictor.sizes(packing, layout).epoch.packs.counts)
        return replace(wanted, count=max(RANKED.count, min(wanted.count, _SIMULATED // passes)))

    def _lowered(self, lacking: float) -> "Solver":
        limit = self._limits.memory_limit_bytes - math.ceil(lacking / self._limits.usable_share)
        return Solver(self._predictor, replace(self._limits, memory_limit_bytes=limit))

    def _least_seconds(self, packing: Packing, layout: Layout) -> float:
        if layout.offload != "none":  # with unlimited memory no layer does
            return self.least_seconds(packing, replace(layout, offload="none"))
        if not (self.keeps_batch(packing, layout) and self.fills_levels(packing, layout)):
            return np.inf
        return self._problem(packing, layout).least_seconds()

    def fit(self, packing: Packing, layout: Layout, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these stage boundaries and the least time for recomputation; None if none fits."""
        return self.fit_several(packing, layout, [boundaries])[0]

    def fit_several(self, packing: Packing, layout: Layout, several: Sequence[tuple[int, ...]]) -> list[Plan | None]:
        """Return what `fit` does for each of these boundaries, in less time."""
        found = self._problem(packing, layout).fit(several) if several else []
        return self._spare.used(found) if self._spare.has_use(layout) else found

    def fit_fewest(self, packing: Packing, layout: Layout, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the plan with these stage boundaries and the fewest recomputed layers, vision first; None if no fit.

        The costs of recomputing layers of either kind are ignored, as in OmniBal.
        """
        plan = self._problem(packing, layout).fit_fewest(boundaries)
        return self._spare.used([plan])[0] if layout.zero_bubble else plan

    def forward_boundaries(self, packing: Packing, layout: Layout) -> tuple[int, ...]:
        """Return the stage boundaries with the least slowest forward time on the mean pack, regardless of memory."""
        problem = self._problem(packing, layout)
        return self._min_max(problem, problem.forward_seconds)[0]

    def least_bytes(self, packing: Packing, layout: Layout) -> float:
        """Return the expected bytes of the fullest stage of the leanest split, with everything recomputed."""
        return self.fullest(self.leanest(packing, layout))[0]

    def leanest(self, packing: Packing, layout: Layout, *, recompute: bool = True) -> Plan:
        """Return the plan whose fullest stage needs least, with all layers recomputed or none; it need not fit."""
        problem, share = self._problem(packing, layout), int(recompute)

        def needed(held: CandidateStages) -> Floats:
            return problem.stage_bytes(held, share * held.vision_rungs, share * held.language_rungs)

        boundaries, _ = self._min_max(problem, needed)
        further = len(packing.degrees) - 1
        stages = (
            Stage(
                vision=vision,
                language=language,
                recompute_vision=share * vision,
                recompute_language=share * language,
                further_levels=(Recomputed(vision=share * vision, language=share * language),) * further,
            )
            for vision, language in layer_counts(boundaries, self._limits.vision_layers)
        )
        return Plan(packing=packing, layout=layout, stages=tuple(stages))

    def fullest(self, plan: Plan) -> tuple[float, int]:
        """Return (expected bytes, number) of the stage that needs most."""
        (needed,) = self._predictor.plans_bytes([plan])
        return max(needed), int(np.argmax(needed))

    def _min_max(
        self, problem: Problem, function: Callable[[CandidateStages], Floats]
    ) -> tuple[tuple[int, ...], float]:
        """Return (boundaries, value) of the split whose largest value of `function` over stages is least."""
        stages = problem.cuts.choices(function(problem.cuts.different))
        split = min_max_split(stages, self._limits.layers)
        assert split is not None  # no value is infinite
        return tuple(int(choices.ends[row]) for choices, row in zip(stages, split.rows, strict=True)), split.slowest

    def _problem(self, packing: Packing, layout: Layout) -> Problem:
        return Problem(self._predictor, self._limits, packing, layout)


def _offloads_each(plan: Plan) -> bool:
    """Return whether layers of each kind offload of which the layout says so."""
    levels = [level for stage in plan.stages for level in stage.recomputed]
    return all(any(getattr(level, tower) for level in levels) for tower in TOWERS if plan.layout.offloads(tower))
