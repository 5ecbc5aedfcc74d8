"""Plans of one solver for each packing and layout, within the axes of a search; cached."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Literal, TypeAlias

from autotune.search.solver.solver import Solver
from trials.plan import Layout, Packing, Plan
from trials.stage import Recomputed, Stage

Recompute: TypeAlias = Literal["fit", "towers", "all", "none"] | tuple[tuple[int, int], ...]
"""As many layers as the memory requires, the towers for which plans are fastest, all, none, or the given (vision,
language) counts of each stage."""


class Splitting:
    """Plans of a solver, with the split and the recomputation of the job where it fixes them."""

    def __init__(
        self,
        solver: Solver,
        boundaries: tuple[int, ...] | None,
        recompute: Recompute,
        holds: Callable[[Plan], bool],
    ) -> None:
        """`boundaries` are those of the stages; None where the solver splits. A plan has to be one that `holds`."""
        self.solver = solver
        self._holds = holds
        # Under a limit the solver would choose its own recomputation, so a fixed one takes the split without limit.
        self._splitter = solver if recompute == "fit" else solver.ample
        self._boundaries, self._recompute = boundaries, recompute
        self.anchor: Callable[[Packing, Layout], Plan | None] = cache(self._anchor)
        """Return the best plan; None when none fits the memory or keeps the batch."""
        self._fitted: dict[tuple[Packing, Layout, tuple[int, ...]], Plan | None] = {}
        self._admits: dict[Plan, bool] = {}
        self.least_seconds = solver.least_seconds
        self.boundaries: Callable[[Packing, Layout], tuple[int, ...]] = cache(self._usual_boundaries)
        """Return the stage boundaries of the best plan, or of the best with unlimited memory where none fits."""
        self.stages: Callable[[Packing, Layout, tuple[int, ...]], tuple[Stage, ...]] = cache(self._usual_stages)
        """Return the best stages with these boundaries; with everything recomputed where none fit."""

    def fitted(self, packing: Packing, layout: Layout, boundaries: tuple[int, ...]) -> Plan | None:
        """Return the best plan with these stage boundaries; None when a stage does not fit."""
        return self.fitted_each(packing, layout, (boundaries,))[0]

    def fitted_each(self, packing: Packing, layout: Layout, several: Sequence[tuple[int, ...]]) -> list[Plan | None]:
        """Return what `fitted` does for each of these boundaries, in less time."""
        new = [boundaries for boundaries in several if (packing, layout, boundaries) not in self._fitted]
        for boundaries, plan in zip(new, self._splitter.fit_several(packing, layout, new), strict=True):
            self._fitted[packing, layout, boundaries] = plan and self._recomputing(plan)
        return [self._fitted[packing, layout, boundaries] for boundaries in several]

    def epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the epoch seconds that the solver predicts for each plan."""
        return self.solver.epoch_seconds(plans)

    def admits(self, plan: Plan) -> bool:
        """Return whether a plan can be trained."""
        return bool(self.admitted((plan,)))

    def admitted(self, plans: Iterable[Plan | None]) -> list[Plan]:
        """Return those of the plans that can be trained, and that the trainer can hold."""
        given = [plan for plan in plans if plan is not None]
        new = [plan for plan in dict.fromkeys(given) if plan not in self._admits]
        for plan, fits in zip(new, self.solver.admits_each(new), strict=True):
            self._admits[plan] = fits and self._holds(plan)
        return [plan for plan in given if self._admits[plan]]

    def least(self, packing: Packing, layout: Layout) -> tuple[float, int] | None:
        """Return (bytes, number) of the fullest stage of the leanest plan; None where none keeps the batch."""
        if not self.solver.keeps_batch(packing, layout):
            return None
        if self._boundaries is None:
            return self.solver.fullest(self.solver.leanest(packing, layout, recompute=self._recompute != "none"))
        stages = self.stages(packing, layout, self._boundaries)
        return self.solver.fullest(Plan(packing=packing, layout=layout, stages=stages))

    def _anchor(self, packing: Packing, layout: Layout) -> Plan | None:
        if not (self.solver.keeps_batch(packing, layout) and self.solver.fills_levels(packing, layout)):
            return None
        if self._boundaries is not None:
            return self.fitted(packing, layout, self._boundaries)
        plan = self._splitter.solve(packing, layout)
        if plan is None or self._recompute == "fit":
            return plan
        given = self._recomputing(plan)
        if self.admits(given):
            return given
        return self.solver.leanest(packing, layout, recompute=self._recompute == "all")

    def _usual_boundaries(self, packing: Packing, layout: Layout) -> tuple[int, ...]:
        if self._boundaries is not None:
            return self._boundaries
        plan = self.anchor(packing, layout) or self.solver.ample.solve(packing, layout)
        assert plan is not None  # with unlimited memory
        return plan.boundaries

    def _usual_stages(self, packing: Packing, layout: Layout, boundaries: tuple[int, ...]) -> tuple[Stage, ...]:
        if (plan := self.fitted(packing, layout, boundaries)) is not None:
            return plan.stages
        ample = self.solver.ample.fit(packing, layout, boundaries)
        assert ample is not None  # with unlimited memory
        return _with_all(ample).stages

    def _recomputing(self, plan: Plan) -> Plan:
        """Return the plan with the recomputation of the axis: of several the fastest, or if none can be trained all."""
        match self._recompute:
            case "fit":
                return plan
            case "towers":
                fitting = self.admitted(_of_towers(plan))
                seconds = self.epoch_seconds(fitting)
                return fitting[seconds.index(min(seconds))] if fitting else _with_all(plan)
            case "all":
                return _with_all(plan)
            case "none":
                return _with_counts(plan, [(0, 0)] * len(plan.stages))
            case counts:
                return _with_counts(plan, counts)


def _of_towers(plan: Plan) -> Iterator[Plan]:
    """Yield the plan with whole towers recomputed: none, either, and both."""
    for language, vision in product((0, 1), repeat=2):
        yield _with_counts(plan, [(vision * stage.vision, language * stage.language) for stage in plan.stages])


def _with_all(plan: Plan) -> Plan:
    return _with_counts(plan, [(stage.vision, stage.language) for stage in plan.stages])


def _with_counts(plan: Plan, counts: Sequence[tuple[int, int]]) -> Plan:
    """Return the plan with these (vision, language) layers of each stage recomputed, for packs of each level.

    `gathered_once` becomes 0: its value in the given plan may not fit beside another recomputation.
    """
    stages = (
        replace(stage, gathered_once=0).recomputing(
            [Recomputed(vision=vision, language=language)] * len(stage.recomputed)
        )
        for stage, (vision, language) in zip(plan.stages, counts, strict=True)
    )
    return replace(plan, stages=tuple(stages))
