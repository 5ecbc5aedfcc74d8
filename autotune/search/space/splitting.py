"""What one solver makes of each packing and layout, within the axes of a search; found once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal, TypeAlias

from autotune.search.solver.solver import Solver
from trials.plan import Layout, Packing, Plan, Stage

Recompute: TypeAlias = Literal["fit", "all", "none"] | tuple[tuple[int, int], ...]
"""What the memory asks for, all layers, none, or so many vision and language layers of each stage."""


class Splitting:
    """Plans of a solver with the split and the recomputation that are given, if any."""

    def __init__(self, solver: Solver, ends: tuple[int, ...] | None, recompute: Recompute) -> None:
        """`ends` are the layers up to the end of each stage; None where the solver splits."""
        self._solver = solver
        self._splitter = solver if recompute == "fit" else solver.ample
        self._ends, self._recompute = ends, recompute
        self.anchor: Callable[[Packing, Layout], Plan | None] = cache(self._anchor)
        """The best plan; None when none fits the memory or keeps the batch."""
        self.fitted: Callable[[Packing, Layout, tuple[int, ...]], Plan | None] = cache(self._fit)
        """The best plan whose stages end so; None when a stage does not fit."""
        self.admits: Callable[[Plan], bool] = cache(solver.admits)
        """Whether a plan can be trained."""
        self.ends: Callable[[Packing, Layout], tuple[int, ...]] = cache(self._usual_ends)
        """Where the stages of the best plan end, or would with memory to spare."""
        self.stages: Callable[[Packing, Layout, tuple[int, ...]], tuple[Stage, ...]] = cache(self._usual_stages)
        """Those of the best plan whose stages end so, or with everything recomputed where that does not fit."""

    def least(self, packing: Packing, layout: Layout) -> tuple[float, int] | None:
        """(bytes, number) of the fullest stage under what needs least; None where nothing keeps the batch."""
        if not self._solver.keeps_batch(packing, layout):
            return None
        if self._ends is None:
            return self._solver.fullest(self._solver.leanest(packing, layout, recompute=self._recompute != "none"))
        stages = self.stages(packing, layout, self._ends)
        return self._solver.fullest(Plan(packing=packing, layout=layout, stages=stages))

    def _anchor(self, packing: Packing, layout: Layout) -> Plan | None:
        if not self._solver.keeps_batch(packing, layout):
            return None
        if self._ends is not None:
            return self.fitted(packing, layout, self._ends)
        plan = self._splitter.solve(packing, layout)
        if plan is None or self._recompute == "fit":
            return plan
        given = self._recomputing(plan, self._recompute)
        if self.admits(given):
            return given
        return self._solver.leanest(packing, layout, recompute=self._recompute == "all")

    def _fit(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        plan = self._splitter.fit(packing, layout, ends)
        return plan and self._recomputing(plan, self._recompute)

    def _usual_ends(self, packing: Packing, layout: Layout) -> tuple[int, ...]:
        if self._ends is not None:
            return self._ends
        plan = self.anchor(packing, layout) or self._solver.ample.solve(packing, layout)
        assert plan is not None  # where there is memory to spare
        return plan.ends

    def _usual_stages(self, packing: Packing, layout: Layout, ends: tuple[int, ...]) -> tuple[Stage, ...]:
        if (plan := self.fitted(packing, layout, ends)) is not None:
            return plan.stages
        ample = self._solver.ample.fit(packing, layout, ends)
        assert ample is not None  # where there is memory to spare
        return self._recomputing(ample, "all").stages

    def _recomputing(self, plan: Plan, recompute: Recompute) -> Plan:
        if recompute == "fit":
            return plan
        if isinstance(recompute, str):
            every = int(recompute == "all")
            recompute = tuple((every * stage.vision, every * stage.language) for stage in plan.stages)
        stages = (
            replace(stage, recompute_vision=vision, recompute_language=language)
            for stage, (vision, language) in zip(plan.stages, recompute, strict=True)
        )
        return replace(plan, stages=tuple(stages))
