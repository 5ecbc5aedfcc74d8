"""The search space: named parameters, and the plan that each point stands for."""

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
from trials.plan import Layout, Packed, Plan, Stage

Point: TypeAlias = dict[str, Any]

_BOUNDARY, _VISION, _LANGUAGE = "boundary_{}", "recompute_vision_{}", "recompute_language_{}"
_OTHER_PACKER = 0.1
"""Distance between packings of different packers, as a share of a capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """The values of each axis."""

    layouts: tuple[Layout, ...]
    packers: tuple[str, ...]
    """The usual one first."""
    capacities: tuple[tuple[int, int], ...]
    """(qv, qt)"""
    qv_slacks: tuple[int, ...]
    """Qv - Q'v, the usual one first."""
    qt_slacks: tuple[int, ...]
    """Qt - Q't, the usual one first."""
    boundaries: tuple[int, ...] | None = None
    """Stage boundaries; None where the split is searched."""
    recompute: Recompute = "fit"
    """`fit` searches around what the memory requires."""
    boundary_shift: int = 2
    recompute_shift: int = 2


class Space:
    """Packing, layout, split and recompute as Optuna parameters.

    - `layout`, `packer`, `qv`, `qt`: one of the candidates;
    - `qv_slack`, `qt_slack`: how far below its capacity a pack is full enough (Qv - Q'v, Qt - Q't);
    - `boundary_i`: layers by which the boundary after stage i is shifted;
    - `recompute_vision_i`, `recompute_language_i`: further layers of stage i that are recomputed.

    Shifts are relative to the plans of the first solver, so that a point means the same plan for the whole study. A
    point that cannot be trained stands for the nearest one that can: one that keeps the global batch, leaves each
    stage a layer, and may fit the memory.
    """

    def __init__(self, axes: Axes, solver: Solver, allows: Callable[[Plan], bool] = lambda _: True) -> None:
        self._axes = axes
        self.allows = allows
        """Return whether a plan, in the space or not, has the values that the job fixes."""
        self._layouts = {layout_name(layout): layout for layout in axes.layouts}
        self._relaxes = {name: plugins.load(PACKERS, name).RELAXES for name in axes.packers}
        self._stages = max(layout.pipeline for layout in axes.layouts)
        self._layers = solver.layers
        self._usual = self._now = Splitting(solver, axes.boundaries, axes.recompute)

    def renew(self, solver: Solver) -> None:
        """Use another solver to decide which plans can be trained, and for the starts."""
        self._now = Splitting(solver, self._axes.boundaries, self._axes.recompute)
        self.__dict__.pop("starts", None)

    # --- the axes ---

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Distributions by parameter name, the same for every trial; shifts reach over the whole model."""
        return self._distributions(self._layers, self._layers)

    @cached_property
    def near(self) -> dict[str, BaseDistribution]:
        """Distributions with the small shifts of the axes, for samplers that know nothing about plans."""
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
        if axes.boundaries is None:
            shift = IntDistribution(-boundary, boundary)
            found |= {_BOUNDARY.format(stage): shift for stage in range(self._stages - 1)}
        if axes.recompute == "fit":
            shift = IntDistribution(-recompute, recompute)
            found |= {name.format(stage): shift for stage in range(self._stages) for name in (_VISION, _LANGUAGE)}
        return found

    # --- points and plans ---

    def plan(self, point: Mapping[str, Any]) -> Plan:
        """Return the plan of a point, or the nearest one that can be trained. Raises ValueError in an empty space."""
        packing, layout = self._nearest(self._packing(point), self._layouts[point["layout"]])
        anchor = self._now.anchor(packing, layout)
        assert anchor is not None  # of a nearest packing
        shifts = tuple(int(point.get(name, 0)) for name in _shift_names(layout.pipeline))
        towards = self._shifts(anchor)
        while not self._now.admits(plan := self._shifted(packing, layout, shifts)):
            # One step closer to the anchor, which can be trained, so that the loop ends.
            shifts = tuple(one - (one > other) + (one < other) for one, other in zip(shifts, towards, strict=True))
        return plan

    def point(self, plan: Plan) -> Point | None:
        """Return the point that stands for exactly this plan; None for a plan outside the space."""
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
        choices = ((self.distributions[name], value) for name, value in point.items())
        is_offered = all(isinstance(one, CategoricalDistribution) and value in one.choices for one, value in choices)
        if not is_offered or self._now.anchor(packing, plan.layout) is None:
            return None
        # Optuna needs a value for each parameter, also for those of stages that the layout does not have.
        point |= dict.fromkeys((name for name in self.distributions if name not in point), 0)
        shifts = dict(zip(_shift_names(plan.layout.pipeline), self._shifts(plan), strict=True))
        point |= {name: shift for name, shift in shifts.items() if name in point}
        return point if self.plan(point) == plan else None

    def nearest_miss(self) -> tuple[Packed, Layout, float, int] | None:
        """Return the packing and layout that lack least memory, with (bytes, number) of their fullest stage.

        None where no packing keeps the global batch.
        """
        pairs = ((packing, layout) for layout in self._axes.layouts for packing in self._packings())
        found = ((packing, layout, self._now.least(packing, layout)) for packing, layout in pairs)
        needing = ((packing, layout, *least) for packing, layout, least in found if least is not None)
        return min(needing, key=lambda each: each[2], default=None)

    # --- where to look ---

    @cached_property
    def starts(self) -> tuple[Plan, ...]:
        """The solver's plans of all layouts and capacities that can be trained, with the usual packer and slacks."""
        found = (self._now.anchor(packing, layout) for layout in self._axes.layouts for packing in self._packings())
        return tuple(dict.fromkeys(self._now.admitted(found)))

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans that differ by a step along one axis, other packings first; none for another layout's plan.

        Another packing comes with the same stages, and with those of the solver.
        """
        packing = plan.packing
        if not isinstance(packing, Packed) or plan.layout not in self._axes.layouts:
            return
        for other in dict.fromkeys(self._other_packings(packing)):
            if (anchor := self._now.anchor(other, plan.layout)) is not None:
                yield from self._now.admitted(dict.fromkeys((replace(plan, packing=other), anchor)))
        if self._axes.boundaries is None:
            fitted = self._now.fitted_each(packing, plan.layout, [*_moved(plan.boundaries)])
            yield from self._now.admitted(fitted)
        if self._axes.recompute == "fit":
            yield from self._now.admitted(_recomputing_other(plan))

    def _other_packings(self, packing: Packed) -> Iterator[Packed]:
        """Yield packings with the same capacities, another packer or slack, and at most one slack that is not usual."""
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
        """Return the packing of a point, with the usual slacks where the packer relaxes nothing."""
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
        """Return the packing, else the nearest with which the layout can be trained, else the nearest of any layout."""
        anchor = self._now.anchor(packing, layout) if (packing.qv, packing.qt) in self._axes.capacities else None
        if anchor is not None and self._now.admits(anchor):
            return packing, layout
        of_layout = [plan for plan in self.starts if plan.layout == layout] or self.starts

        def distance(plan: Plan) -> float:
            one = plan.packing
            assert isinstance(one, Packed)  # of a plan of the space
            of_capacities = abs(math.log((one.qv + 1) / (packing.qv + 1))) + abs(math.log(one.qt / packing.qt))
            return of_capacities + _OTHER_PACKER * (one.packer != packing.packer)

        nearest = min(of_layout, key=distance)
        assert isinstance(nearest.packing, Packed)
        return nearest.packing, nearest.layout

    def _shifted(self, packing: Packed, layout: Layout, shifts: Sequence[int]) -> Plan:
        boundary_shifts, recomputes = shifts[: layout.pipeline - 1], shifts[layout.pipeline - 1 :]
        usual = self._usual.boundaries(packing, layout)
        inner: list[int] = []
        for number, shift in enumerate(boundary_shifts):
            least = (inner[-1] if inner else 0) + 1
            most = usual[-1] - (layout.pipeline - 1 - number)  # each later stage keeps a layer
            inner.append(min(max(usual[number] + shift, least), most))
        boundaries = (*inner, usual[-1])
        by_stage = zip(
            self._usual.stages(packing, layout, boundaries),
            zip(recomputes[::2], recomputes[1::2], strict=True),
            strict=True,
        )
        stages = (_recomputing_more(stage, *more) for stage, more in by_stage)
        return Plan(packing=packing, layout=layout, stages=tuple(stages))

    def _shifts(self, plan: Plan) -> tuple[int, ...]:
        """Return the shifts of a plan in the order of `_shift_names`."""
        usual_boundaries = self._usual.boundaries(plan.packing, plan.layout)
        boundaries = (end - usual for end, usual in zip(plan.boundaries[:-1], usual_boundaries[:-1], strict=True))
        usual = self._usual.stages(plan.packing, plan.layout, plan.boundaries)
        recomputes = (
            (
                stage.recompute_vision - other.recompute_vision,
                stage.recompute_language - other.recompute_language,
            )
            for stage, other in zip(plan.stages, usual, strict=True)
        )
        return (*boundaries, *chain.from_iterable(recomputes))


def _shift_names(stages: int) -> list[str]:
    """Return the names of shift parameters: the boundaries, then vision and language recomputation of each stage."""
    of_stages = [name.format(stage) for stage in range(stages) for name in (_VISION, _LANGUAGE)]
    return [*(_BOUNDARY.format(stage) for stage in range(stages - 1)), *of_stages]


def _slack(capacity: int, least: int, slacks: Iterable[int]) -> int | None:
    """Return the first slack that leaves `least` of the capacity; one above the capacity leaves 0."""
    return next((slack for slack in slacks if max(0, capacity - slack) == least), None)


def _recomputing_more(stage: Stage, vision: int, language: int) -> Stage:
    """Return the stage with more layers recomputed, or fewer, as far as it has them."""
    return replace(
        stage,
        recompute_vision=min(max(stage.recompute_vision + vision, 0), stage.vision),
        recompute_language=min(max(stage.recompute_language + language, 0), stage.language),
    )


def _recomputing_other(plan: Plan) -> Iterator[Plan]:
    """Yield the plans of which one stage recomputes one layer more or less."""
    for number, stage in enumerate(plan.stages):
        steps = (_recomputing_more(stage, *step) for step in ((-1, 0), (1, 0), (0, -1), (0, 1)))
        for changed in (step for step in steps if step != stage):
            yield replace(plan, stages=(*plan.stages[:number], changed, *plan.stages[number + 1 :]))


def _moved(boundaries: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield stage boundaries of which one is moved by a layer."""
    for number in range(len(boundaries) - 1):
        for by in (-1, 1):
            moved = (*boundaries[:number], boundaries[number] + by, *boundaries[number + 1 :])
            if all(start < end for start, end in pairwise((0, *moved))):
                yield moved
