"""What the study searches: named parameters, and the plan that they stand for. Every point is a plan."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeAlias

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import layout_name
from autotune.search.space.splitting import Recompute, Splitting
from trials import plugins
from trials.data.packers import PACKERS
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
    recompute: Recompute = "fit"
    """`fit` searches around what the memory asks for."""
    boundary_shift: int = 2
    recompute_shift: int = 2


class Space:
    """Packing, layout, split and recompute as Optuna parameters.

    - `layout`, `packer`, `qv`, `qt`: one of the candidates;
    - `qv_slack`, `qt_slack`: how far below its capacity a pack is full enough (Qv - Q'v, Qt - Q't);
    - `boundary_i`: layers by which the end of stage i is moved;
    - `recompute_vision_i`, `recompute_language_i`: so many more layers of stage i are recomputed.

    All are counted from the plans of the first solver, so that a point means one and the same plan for the whole study.
    A point that cannot be trained stands for the nearest one that can: one that keeps the global batch, leaves each
    stage a layer, and is not certain to need more than the memory.
    """

    def __init__(self, axes: Axes, solver: Solver, allows: Callable[[Plan], bool] = lambda _: True) -> None:
        self._axes = axes
        self.allows = allows
        """Whether a plan, also one that no point stands for, is one that was asked for."""
        self._layouts = {layout_name(layout): layout for layout in axes.layouts}
        self._relaxes = {name: plugins.load(PACKERS, name).RELAXES for name in axes.packers}
        self._stages = max(layout.pipeline for layout in axes.layouts)
        self._layers = solver.layers
        self._usual = self._now = Splitting(solver, axes.ends, axes.recompute)

    def renew(self, solver: Solver) -> None:
        """From now on this solver says what can be trained, and where to look."""
        self._now = Splitting(solver, self._axes.ends, self._axes.recompute)
        self.__dict__.pop("starts", None)

    # --- the axes ---

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """By parameter name, the same for every trial; shifts as far as a model has layers."""
        return self._distributions(self._layers, self._layers)

    @cached_property
    def near(self) -> dict[str, BaseDistribution]:
        """The same with shifts as small as the axes say: where samplers look that know nothing of training."""
        axes = self._axes
        return self._distributions(min(axes.boundary_shift, self._layers), min(axes.recompute_shift, self._layers))

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
        packing, layout = self._nearest(self._packing(point), self._layouts[point["layout"]])
        anchor = self._now.anchor(packing, layout)
        assert anchor is not None  # of a nearest packing
        shifts, towards = _shifts_of(point, layout.pipeline), self._shifts(anchor)
        while not self._now.admits(plan := self._shifted(packing, layout, shifts)):
            shifts = tuple(map(_nearer, shifts, towards))
        return plan

    def point(self, plan: Plan) -> Point | None:
        """The point that stands for exactly this plan; None for a plan outside the space."""
        packing, name = plan.packing, layout_name(plan.layout)
        if not isinstance(packing, Packed) or name not in self._layouts:
            return None
        point: Point = {
            "layout": name,
            "packer": packing.packer,
            "qv": packing.qv,
            "qt": packing.qt,
            "qv_slack": _slack(packing.qv, packing.qv_min, self._axes.qv_slacks),
            "qt_slack": _slack(packing.qt, packing.qt_min, self._axes.qt_slacks),
        }
        if not self._offers(point) or self._now.anchor(packing, plan.layout) is None:
            return None
        point |= dict.fromkeys((name for name in self.distributions if name not in point), 0)
        shifts = dict(zip(_names(plan.layout.pipeline), self._shifts(plan), strict=True))
        point |= {name: shift for name, shift in shifts.items() if name in point}
        return point if self.plan(point) == plan else None

    def _offers(self, choices: Point) -> bool:
        known = ((self.distributions[name], value) for name, value in choices.items())
        return all(isinstance(values, CategoricalDistribution) and value in values.choices for values, value in known)

    def nearest_miss(self) -> tuple[Packed, Layout, float, int] | None:
        """Of an empty space what lacks least memory, and the bytes and number of its fullest stage.

        None where no packing keeps the global batch.
        """
        pairs = ((packing, layout) for layout in self._axes.layouts for packing in self._packings())
        found = ((packing, layout, self._now.least(packing, layout)) for packing, layout in pairs)
        needing = ((packing, layout, *least) for packing, layout, least in found if least is not None)
        return min(needing, key=lambda each: each[2], default=None)

    # --- where to look ---

    @cached_property
    def starts(self) -> tuple[Plan, ...]:
        """The solver's plan for every layout and pair of capacities that can be trained, else as usual."""
        found = (self._now.anchor(packing, layout) for layout in self._axes.layouts for packing in self._packings())
        return tuple(dict.fromkeys(plan for plan in found if plan is not None and self._now.admits(plan)))

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Plans that differ from one of the space by a step along one axis, those of the packing first.

        Another packing comes with the same stages and with the solver's.
        """
        packing = plan.packing
        if not isinstance(packing, Packed):
            return
        for other in dict.fromkeys(self._other_packings(packing)):
            if (anchor := self._now.anchor(other, plan.layout)) is not None:
                yield from filter(self._now.admits, dict.fromkeys((replace(plan, packing=other), anchor)))
        if self._axes.ends is None:
            yield from self._moved(plan)
        if self._axes.recompute == "fit":
            for stage, one in enumerate(plan.stages):
                for changed in _recomputing_one_more_or_less(one):
                    other_plan = replace(plan, stages=(*plan.stages[:stage], changed, *plan.stages[stage + 1 :]))
                    if self._now.admits(other_plan):
                        yield other_plan

    def _moved(self, plan: Plan) -> Iterator[Plan]:
        ends = plan.ends
        for number in range(len(ends) - 1):
            for by in (-1, 1):
                moved = (*ends[:number], ends[number] + by, *ends[number + 1 :])
                if all(start < end for start, end in pairwise((0, *moved))):
                    fitted = self._now.fitted(plan.packing, plan.layout, moved)
                    if fitted is not None and self._now.admits(fitted):
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
        anchor = self._now.anchor(packing, layout) if (packing.qv, packing.qt) in self._axes.capacities else None
        if anchor is not None and self._now.admits(anchor):
            return packing, layout
        of_layout = [plan for plan in self.starts if plan.layout == layout] or self.starts
        nearest = min(of_layout, key=lambda plan: _distance(plan.packing, packing))
        assert isinstance(nearest.packing, Packed)
        return nearest.packing, nearest.layout

    def _shifted(self, packing: Packed, layout: Layout, shifts: Sequence[int]) -> Plan:
        boundaries, recomputes = shifts[: layout.pipeline - 1], shifts[layout.pipeline - 1 :]
        ends = _moved_ends(self._usual.ends(packing, layout), boundaries)
        by_stage = zip(
            self._usual.stages(packing, layout, ends), zip(recomputes[::2], recomputes[1::2], strict=True), strict=True
        )
        stages = (_recomputing_more(stage, *more) for stage, more in by_stage)
        return Plan(packing=packing, layout=layout, stages=tuple(stages))

    def _shifts(self, plan: Plan) -> tuple[int, ...]:
        """Of the ends of its stages but the last, then of what each stage recomputes of vision and of language."""
        usual_ends = self._usual.ends(plan.packing, plan.layout)
        boundaries = (end - usual for end, usual in zip(plan.ends[:-1], usual_ends[:-1], strict=True))
        usual = self._usual.stages(plan.packing, plan.layout, plan.ends)
        recomputes = (_more(stage, than) for stage, than in zip(plan.stages, usual, strict=True))
        return (*boundaries, *chain.from_iterable(recomputes))


def _names(stages: int) -> list[str]:
    """Of the parameters that are counted from usual plans, in the order of their shifts."""
    of_stages = [name.format(stage) for stage in range(stages) for name in (_VISION, _LANGUAGE)]
    return [*(_BOUNDARY.format(stage) for stage in range(stages - 1)), *of_stages]


def _shifts_of(point: Mapping[str, Any], stages: int) -> tuple[int, ...]:
    return tuple(int(point.get(name, 0)) for name in _names(stages))


def _slack(capacity: int, least: int, slacks: Iterable[int]) -> int | None:
    """The first that leaves so much: one above the capacity leaves nothing."""
    return next((slack for slack in slacks if max(0, capacity - slack) == least), None)


def _distance(one: Packing, other: Packed) -> float:
    assert isinstance(one, Packed)  # of a plan of the space
    of_capacities = abs(math.log((one.qv + 1) / (other.qv + 1))) + abs(math.log(one.qt / other.qt))
    return of_capacities + _OTHER_PACKER * (one.packer != other.packer)


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


def _nearer(shift: int, other: int) -> int:
    """One closer to the other."""
    return shift - (shift > other) + (shift < other)
