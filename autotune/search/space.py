"""What the study searches: named parameters, and the plan that they stand for. Every point is a plan."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.search.layouts import layout_name
from autotune.search.solver import Solver
from trials import plugins
from trials.data.packs import PACKERS
from trials.plan import Layout, Packed, Packing, Plan, Stage

Point: TypeAlias = dict[str, Any]

_BOUNDARY, _VISION, _LANGUAGE = "boundary_{}", "recompute_vision_{}", "recompute_language_{}"
_OTHER_PACKER = 0.1
"""Distance between two packings that another packer fills, as a share of a capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values that each axis may take."""

    layouts: tuple[Layout, ...]
    packers: tuple[str, ...]
    """The usual one first."""
    capacities: tuple[tuple[int, int], ...]
    """(qv, qt)"""
    qv_slacks: tuple[int, ...]
    """Qv - Q'v, the usual one first."""
    qt_slacks: tuple[int, ...]
    """Qt - Q't, the usual one first."""
    ends: tuple[int, ...] | None = None
    """Layers up to the end of each stage; None where the split is searched."""
    recompute: Literal["fit", "all", "none"] = "fit"
    """`fit` searches around what the memory asks for."""
    boundary_shift: int = 2
    recompute_shift: int = 2


class Space:
    """Packing, layout, split and recompute as Optuna parameters.

    - `layout`, `packer`, `qv`, `qt`: one of the candidates;
    - `qv_slack`, `qt_slack`: how far below its capacity a pack is full enough (Qv - Q'v, Qt - Q't);
    - `boundary_i`: layers by which the solver's end of stage i is moved;
    - `recompute_vision_i`, `recompute_language_i`: layers of stage i that are recomputed beside the solver's.

    A point that cannot be trained stands for the nearest one that can: one that keeps the global batch, leaves each
    stage a layer, and is not certain to need more than the memory.
    """

    def __init__(self, axes: Axes, solver: Solver) -> None:
        self._axes = axes
        self._layouts = {layout_name(layout): layout for layout in axes.layouts}
        self._relaxes = {name: plugins.load(PACKERS, name).RELAXES for name in axes.packers}
        self._stages = max(layout.pipeline for layout in axes.layouts)
        self.renew(solver)

    def renew(self, solver: Solver) -> None:
        """From now on shifts are counted from the plans of this solver, and what it admits can be trained."""
        self._solver = solver
        self._splitter = solver if self._axes.recompute == "fit" else solver.ample
        self.anchor = cache(self._anchor)
        self._fitted = cache(self._fit)
        self.admits = cache(solver.admits)
        self.__dict__.pop("starts", None)

    # --- the axes ---

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """By parameter name, the same for every trial; shifts as far as a model has layers."""
        return self._distributions(self._solver.layers, self._solver.layers)

    @cached_property
    def near(self) -> dict[str, BaseDistribution]:
        """The same with shifts as small as the axes say: where samplers look that know nothing of training."""
        return self._distributions(self._axes.boundary_shift, self._axes.recompute_shift)

    def _distributions(self, boundary: int, recompute: int) -> dict[str, BaseDistribution]:
        axes = self._axes
        found: dict[str, BaseDistribution] = {
            "layout": CategoricalDistribution(tuple(self._layouts)),
            "packer": CategoricalDistribution(axes.packers),
            "qv": CategoricalDistribution(tuple(sorted({qv for qv, _ in axes.capacities}))),
            "qt": CategoricalDistribution(tuple(sorted({qt for _, qt in axes.capacities}))),
            "qv_slack": CategoricalDistribution(axes.qv_slacks),
            "qt_slack": CategoricalDistribution(axes.qt_slacks),
        }
        if axes.ends is None:
            shift = IntDistribution(-boundary, boundary)
            found |= {_BOUNDARY.format(stage): shift for stage in range(self._stages - 1)}
        if axes.recompute == "fit":
            shift = IntDistribution(-recompute, recompute)
            found |= {name.format(stage): shift for stage in range(self._stages) for name in (_VISION, _LANGUAGE)}
        return found

    # --- points and plans ---

    def plan(self, point: Mapping[str, Any]) -> Plan:
        """The plan of a point, or the nearest one that can be trained. Raises ValueError in an empty space."""
        layout = self._layouts[point["layout"]]
        packing, layout = self._nearest(self._packing(point), layout)
        shifts = [int(point.get(_BOUNDARY.format(stage), 0)) for stage in range(layout.pipeline - 1)]
        more = [
            (int(point.get(_VISION.format(stage), 0)), int(point.get(_LANGUAGE.format(stage), 0)))
            for stage in range(layout.pipeline)
        ]
        while True:
            plan = self._shifted(packing, layout, shifts, more)
            if plan is not None and self.admits(plan):
                return plan
            shifts, more = [_nearer(shift) for shift in shifts], [(_nearer(v), _nearer(t)) for v, t in more]

    def point(self, plan: Plan) -> Point | None:
        """The point that stands for exactly this plan; None for a plan outside the space."""
        packing, name = plan.packing, layout_name(plan.layout)
        if not isinstance(packing, Packed) or name not in self._layouts:
            return None
        anchor = self.anchor(packing, plan.layout)
        fitted = anchor and self._fitted(packing, plan.layout, _ends(plan))
        if not anchor or not fitted:
            return None
        point: Point = {
            "layout": name,
            "packer": packing.packer,
            "qv": packing.qv,
            "qt": packing.qt,
            "qv_slack": _slack(packing.qv, packing.qv_min, self._axes.qv_slacks),
            "qt_slack": _slack(packing.qt, packing.qt_min, self._axes.qt_slacks),
        }
        shifts = [end - usual for end, usual in zip(_ends(plan), _ends(anchor), strict=True)]
        for stage in range(self._stages - 1):
            point[_BOUNDARY.format(stage)] = shifts[stage] if stage < len(shifts) - 1 else 0
        for stage in range(self._stages):
            vision, language = _more(plan.stages[stage], fitted.stages[stage]) if stage < len(fitted.stages) else (0, 0)
            point |= {_VISION.format(stage): vision, _LANGUAGE.format(stage): language}
        offered = {name: value for name, value in point.items() if name in self.distributions}
        return offered if self._offers(offered) and self.plan(offered) == plan else None

    def _offers(self, point: Point) -> bool:
        return all(
            values.choices.count(point[name]) if isinstance(values, CategoricalDistribution) else True
            for name, values in self.distributions.items()
        )

    # --- where to look ---

    @cached_property
    def starts(self) -> tuple[Plan, ...]:
        """The solver's plan for every layout and pair of capacities that can be trained, else as usual."""
        found = (self.anchor(packing, layout) for layout in self._axes.layouts for packing in self._packings())
        return tuple(dict.fromkeys(plan for plan in found if plan is not None and self.admits(plan)))

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans that differ from one of the space by a step along one axis, those of the packing first.

        Another packing comes with the same stages and with the solver's.
        """
        packing = plan.packing
        if not isinstance(packing, Packed):
            return
        for other in dict.fromkeys(self._other_packings(packing)):
            if (anchor := self.anchor(other, plan.layout)) is not None:
                yield from filter(self.admits, dict.fromkeys((replace(plan, packing=other), anchor)))
        if self._axes.ends is None:
            yield from self._moved(plan)
        if self._axes.recompute == "fit":
            for stage, one in enumerate(plan.stages):
                for changed in _recomputing_one_more_or_less(one):
                    other_plan = replace(plan, stages=(*plan.stages[:stage], changed, *plan.stages[stage + 1 :]))
                    if self.admits(other_plan):
                        yield other_plan

    def _moved(self, plan: Plan) -> Iterator[Plan]:
        ends = _ends(plan)
        for number in range(len(ends) - 1):
            for by in (-1, 1):
                moved = (*ends[:number], ends[number] + by, *ends[number + 1 :])
                if all(start < end for start, end in pairwise((0, *moved))):
                    fitted = self._fitted(plan.packing, plan.layout, moved)
                    if fitted is not None and self.admits(fitted):
                        yield fitted

    def _other_packings(self, packing: Packed) -> Iterator[Packed]:
        """Another packer, with one slack that is not as usual; or the same with another slack."""
        axes = self._axes
        point = {"qv": packing.qv, "qt": packing.qt}
        slacks = [(slack, axes.qt_slacks[0]) for slack in axes.qv_slacks]
        slacks += [(axes.qv_slacks[0], slack) for slack in axes.qt_slacks]
        for packer in axes.packers:
            for qv_slack, qt_slack in slacks:
                other = self._packing({**point, "packer": packer, "qv_slack": qv_slack, "qt_slack": qt_slack})
                if other != packing:
                    yield other

    # --- plans ---

    def _packings(self) -> Iterator[Packed]:
        axes = self._axes
        usual = {"packer": axes.packers[0], "qv_slack": axes.qv_slacks[0], "qt_slack": axes.qt_slacks[0]}
        for qv, qt in axes.capacities:
            yield self._packing({**usual, "qv": qv, "qt": qt})

    def _packing(self, point: Mapping[str, Any]) -> Packed:
        """With the usual slacks where the packer relaxes nothing."""
        axes = self._axes
        qv_slack, qt_slack = axes.qv_slacks[0], axes.qt_slacks[0]
        if self._relaxes[point["packer"]]:
            qv_slack, qt_slack = point["qv_slack"], point["qt_slack"]
        return Packed(
            qv=point["qv"],
            qt=point["qt"],
            qv_min=max(0, point["qv"] - qv_slack),
            qt_min=max(0, point["qt"] - qt_slack),
            packer=point["packer"],
        )

    def _nearest(self, packing: Packed, layout: Layout) -> tuple[Packed, Layout]:
        """The packing, or the nearest with which the layout can be trained, or else the nearest of any layout."""
        anchor = self.anchor(packing, layout) if (packing.qv, packing.qt) in self._axes.capacities else None
        if anchor is not None and self.admits(anchor):
            return packing, layout
        of_layout = [plan for plan in self.starts if plan.layout == layout] or self.starts
        nearest = min(of_layout, key=lambda plan: _distance(plan.packing, packing))
        assert isinstance(nearest.packing, Packed)
        return nearest.packing, nearest.layout

    def _anchor(self, packing: Packed, layout: Layout) -> Plan | None:
        """The solver's plan, which all shifts are counted from; None when none fits the memory."""
        if not self._solver.keeps_batch(packing, layout):
            return None
        if self._axes.ends is not None:
            return self._fitted(packing, layout, self._axes.ends)
        return self._recomputing(self._splitter.solve(packing, layout))

    def _fit(self, packing: Packed, layout: Layout, ends: tuple[int, ...]) -> Plan | None:
        return self._recomputing(self._splitter.fit(packing, layout, ends))

    def _recomputing(self, plan: Plan | None) -> Plan | None:
        """With all layers recomputed, or none, where the axes say so."""
        if plan is None or self._axes.recompute == "fit":
            return plan
        every = int(self._axes.recompute == "all")
        return replace(
            plan,
            stages=tuple(
                replace(stage, recompute_vision=every * stage.vision, recompute_language=every * stage.language)
                for stage in plan.stages
            ),
        )

    def _shifted(
        self, packing: Packed, layout: Layout, shifts: Sequence[int], more: Sequence[tuple[int, int]]
    ) -> Plan | None:
        anchor = self.anchor(packing, layout)
        assert anchor is not None
        fitted = self._fitted(packing, layout, _moved_ends(_ends(anchor), shifts)) if any(shifts) else anchor
        if fitted is None:
            return None
        stages = (_recomputing_more(stage, *by) for stage, by in zip(fitted.stages, more, strict=True))
        return replace(fitted, stages=tuple(stages))


def _slack(capacity: int, least: int, slacks: Iterable[int]) -> int | None:
    """The first that leaves so much: one above the capacity leaves nothing."""
    return next((slack for slack in slacks if max(0, capacity - slack) == least), None)


def _distance(one: Packing, other: Packed) -> float:
    assert isinstance(one, Packed)  # of a plan of the space
    of_capacities = abs(math.log((one.qv + 1) / (other.qv + 1))) + abs(math.log(one.qt / other.qt))
    return of_capacities + _OTHER_PACKER * (one.packer != other.packer)


def _ends(plan: Plan) -> tuple[int, ...]:
    """Layers of the chain up to the end of each stage."""
    return tuple(accumulate(stage.vision + stage.language for stage in plan.stages))


def _moved_ends(ends: tuple[int, ...], shifts: Sequence[int]) -> tuple[int, ...]:
    """Ends of the stages after the shifts, each stage keeping at least one layer."""
    layers, stages = ends[-1], len(ends)
    moved: list[int] = []
    for number, shift in enumerate(shifts):
        least = (moved[-1] if moved else 0) + 1
        most = layers - (stages - 1 - number)
        moved.append(min(max(ends[number] + shift, least), most))
    return (*moved, layers)


def _more(stage: Stage, than: Stage) -> tuple[int, int]:
    return (
        stage.recompute_vision - than.recompute_vision,
        stage.recompute_language - than.recompute_language,
    )


def _recomputing_more(stage: Stage, vision: int, language: int) -> Stage:
    """With so many more layers recomputed, or fewer, as far as the stage has them."""
    return replace(
        stage,
        recompute_vision=min(max(stage.recompute_vision + vision, 0), stage.vision),
        recompute_language=min(max(stage.recompute_language + language, 0), stage.language),
    )


def _recomputing_one_more_or_less(stage: Stage) -> Iterator[Stage]:
    for vision, language in ((-1, 0), (1, 0), (0, -1), (0, 1)):
        changed = _recomputing_more(stage, vision, language)
        if changed != stage:
            yield changed


def _nearer(shift: int) -> int:
    """One closer to none."""
    return shift - (shift > 0) + (shift < 0)
