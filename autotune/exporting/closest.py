"""The best plan within the limits of a trainer."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from autotune.dimensions.folds import layout_name
from autotune.dimensions.usual import sharded_layouts, zero_stages
from autotune.errors import ExportError, NoFeasiblePlan
from autotune.forecast.forecast import Forecaster
from autotune.search.packed import packed_plans
from autotune.search.solver.limits import Limits
from autotune.search.space.abilities import Target
from autotune.search.space.capacities import holds_all
from autotune.search.space.feasible import feasible_space
from autotune.search.space.held import LENGTHS, Holding
from autotune.search.space.sequential import PackOrder
from trials.job import SpaceSection
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldPlan:
    """A plan as a trainer can hold it."""

    plan: Plan
    seconds: float
    """Predicted seconds of an epoch, with the plan's own order of packs."""
    order: PackOrder | None = None
    """Order of the samples from which the trainer rebuilds the packs; None where it needs none."""


class Restricted:
    """The plans of a job within the limits of a trainer."""

    def __init__(self, forecaster: Forecaster, target: Target) -> None:
        self.forecaster, self.abilities = forecaster, target.abilities
        self._holding = Holding(target, forecaster.workload, forecaster.epoch)
        self.missing = self._holding.missing
        """Return what of a plan the trainer does not have, in words; empty where it can hold the plan."""
        self._solver = forecaster.solver()
        shape = forecaster.workload.model
        self._layers = (shape.vision_layers, shape.language_layers)
        self._layouts = self._possible_layouts()
        self._names = tuple(map(layout_name, self._layouts))

    def holding(self, plan: Plan) -> HeldPlan | None:
        """Return the plan itself where the trainer can hold it; None where it cannot."""
        if self.abilities.missing(plan):
            return None
        (seconds,) = self.forecaster.epoch_seconds((plan,))
        return self._held(plan, seconds, count=1)

    def best(self) -> HeldPlan:
        """Return the fastest plan that the trainer can hold. Raise ExportError where there is none."""
        candidates = self._padded if self.abilities.packs == "none" else (*self._switched, *self._padded)
        best: HeldPlan | None = None
        for seconds, plan in self.forecaster.ranked(candidates):
            if best is not None and seconds >= best.seconds:
                break
            found = self._held(plan, seconds)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        if best is None:
            raise ExportError(
                "no plan that the trainer can hold fits the memory and keeps the global batch; give more --memory or "
                "--devices, or train with `autotune launch JOB`"
            )
        return best

    def without_split(self) -> float:
        """Return the least epoch seconds with the trainer's layouts and packs of one level; whatever is recomputed."""
        solved = self._within(SpaceSection(layouts=self._names, sequence=("1",)))
        # Plans that are found within more limits may be faster, and are within these as well.
        return self._least((*solved, *self._switched))

    def with_switches(self) -> float:
        """Return the least epoch seconds with its layouts and its switches for checkpointing, whatever the packs."""
        return self._least(self._switched)

    def _least(self, plans: Sequence[Plan]) -> float:
        ranked = self.forecaster.ranked((*plans, *self._padded))
        return ranked[0][0] if ranked else math.inf

    def _possible_layouts(self) -> tuple[Layout, ...]:
        model, devices = self.forecaster.workload.model, self.forecaster.workload.hardware.devices
        plain = (Layout(pipeline=1, data=devices, zero=zero) for zero in zero_stages(model, devices))
        every = (*plain, *sharded_layouts(devices))
        return self.abilities.layouts(tuple(each for each in every if self._solver.unprofiled(each) is None))

    @cached_property
    def _switched(self) -> tuple[Plan, ...]:
        """The solver's plans for each position of the switches, and those of packs that length alone limits."""
        workload = self.forecaster.workload
        limits = Limits.of(workload, self.forecaster.job.search.parallel)
        sections = (self.abilities.space(self._names, self._layers, switch) for switch in self.abilities.switches)
        solved = [plan for section in sections for plan in self._within(section)]
        by_length = packed_plans(workload, self._solver, limits, hold_all=holds_all(workload))
        layouts = set(map(self._solver.overlapped, self._layouts))
        alike = (each for each in by_length if each.layout in layouts and self.abilities.recomputes_alike(each))
        return (*solved, *alike)

    def _within(self, wanted: SpaceSection) -> tuple[Plan, ...]:
        try:
            space = feasible_space(self.forecaster.workload, self._solver, remedy="", wanted=wanted)
        except NoFeasiblePlan:
            return ()
        return space.starts

    @cached_property
    def _padded(self) -> tuple[Plan, ...]:
        return tuple(self._each_padded())

    def _each_padded(self) -> Iterator[Plan]:
        """Yield plans with 1, 2, 4 and so on unpacked samples in a micro-batch."""
        samples = tuple(self._holding.samples())
        for layout, switch, each in product(self._layouts, self.abilities.switches, samples):
            yield Plan(packing=Padded(samples=each), layout=layout, stages=(self._stage(switch),))

    def _stage(self, switch: tuple[bool, bool]) -> Stage:
        vision, language = self._layers
        return Stage(
            vision=vision,
            language=language,
            recompute_vision=vision * switch[0],
            recompute_language=language * switch[1],
        )

    def _held(self, plan: Plan, seconds: float, count: int = LENGTHS) -> HeldPlan | None:
        """Return the plan, or the one with the nearest shorter packs whose order tells the trainer where they end."""
        packing = plan.packing
        if self.abilities.packs != "in order" or not isinstance(packing, Packed):
            return HeldPlan(plan=plan, seconds=seconds)
        found = self._holding.nearest(packing, plan.layout.data, count)
        if found is None:
            return None
        shorter, order = found
        if shorter != packing:
            plan = replace(plan, packing=shorter)
            (seconds,) = self.forecaster.epoch_seconds((plan,))
        return HeldPlan(plan=plan, seconds=seconds, order=order)
