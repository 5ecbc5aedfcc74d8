"""The search space: named parameters, and the plan that each point stands for."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, TypeAlias

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.dimensions.folds import layout_name
from autotune.search.solver.rungs import TOWER, Rungs, has_rungs
from autotune.search.solver.solver import Solver
from autotune.search.space.origins import Origin, by_bound
from autotune.search.space.packings import Ladders, Packings
from autotune.search.space.shifts import (
    further_rungs,
    moved,
    recomputing_more,
    recomputing_other,
    uses,
    using_more,
    using_other,
)
from autotune.search.space.splitting import Recompute, Splitting
from trials.plan import Layout, Levelled, Packed, Packing, Plan

Point: TypeAlias = dict[str, Any]

# A choice: ladders multiply packings, and those of one are alike.
_OF_LADDER = 4
"""Most starts of one ladder in a layout."""
_BOUNDARY, _VISION, _LANGUAGE = "boundary_{}", "recompute_vision_{}", "recompute_language_{}"
_GATHERED, _DEFERRED = "gathered_once", "most_deferred_{}"


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
    padded: tuple[int, ...] = ()
    """Samples of unpacked micro-batches; without any, packs alone are searched."""
    ladders: Ladders | None = None
    """Levels of packs, and packs that ranks share; None where only packs of one level on single ranks are searched."""
    boundaries: tuple[int, ...] | None = None
    """Stage boundaries; None where the split is searched."""
    recompute: Recompute = "fit"
    """`fit` searches around what the memory requires, `towers` among those that are recomputed whole."""
    boundary_shift: int = 2
    recompute_shift: int = 2
    holds: Callable[[Plan], bool] = lambda _: True
    """Whether the trainer for which is searched can hold a plan; others are not in the space."""


def packings_of(axes: Axes) -> Packings:
    """Return the packings of the axes."""
    return Packings(axes.packers, axes.capacities, (axes.qv_slacks, axes.qt_slacks), axes.ladders, axes.padded)


class Space:
    """Packing, layout, split and recompute as Optuna parameters.

    - `layout`, `packer`, `qv`, `qt`: one of the candidates;
    - `qv_slack`, `qt_slack`: how far below its capacity a pack is full enough (Qv - Q'v, Qt - Q't);
    - `sequence`: the sequence degree of each level, `1-4` for two levels; `qv` and `qt` are those of the last one;
    - `level_1_qv`, `level_1_qt`: capacities of the first of several levels;
    - `samples`: those of an unpacked micro-batch, 0 for packs;
    - `boundary_i`: layers by which the boundary after stage i is shifted;
    - `recompute_vision_i`, `recompute_language_i`: further layers of stage i that are recomputed, at every level; where
      some are recomputed selectively or towers whole, further rungs (`rungs_of`);
    - `gathered_once`: further layers whose weights ZeRO 3 gathers once;
    - `most_deferred_i`: further packs that stage i of a zero-bubble schedule defers at most.

    Shifts are relative to the plans of the first solver, so that a point means the same plan for the whole study. A
    point that cannot be trained stands for the nearest one that can: one that keeps the global batch, leaves each
    stage a layer, may fit the memory, and can be held by the trainer.
    """

    def __init__(self, axes: Axes, solver: Solver, allows: Callable[[Plan], bool] = lambda _: True) -> None:
        self.axes = axes
        self._allows = allows
        self._layouts = {layout_name(layout): layout for layout in axes.layouts}
        self._packings = packings_of(axes)
        self._stages = max(layout.pipeline for layout in axes.layouts)
        self._layers = solver.layers
        # Shifts stay relative to the first solver, while `renew` replaces the one that decides what can be trained.
        self._usual = self._now = Splitting(solver, axes.boundaries, axes.recompute, axes.holds)
        self._pairs: dict[tuple[Packing, Layout], bool] = {}
        """Whether points have this packing and layout."""

    @property
    def has_ladders(self) -> bool:
        """Whether levels of packs, or packs that ranks share, are searched."""
        return self.axes.ladders is not None

    @property
    def solver(self) -> Solver:
        """Solver that decides which plans can be trained."""
        return self._now.solver

    def widened(self, layouts: Sequence[Layout], solver: Solver) -> "Space":
        """Return the space with further layouts, which keeps what this one has solved by its only `solver`."""
        other = Space(replace(self.axes, layouts=(*self.axes.layouts, *layouts)), solver, self._allows)
        other._usual = other._now = self._usual
        return other

    def renew(self, solver: Solver) -> None:
        """Use another solver to decide which plans can be trained, and for the starts."""
        self._now = Splitting(solver, self.axes.boundaries, self.axes.recompute, self.axes.holds)
        # Forgets the cached property, whose plans the earlier solver made.
        self.__dict__.pop("starts", None)
        self._pairs.clear()

    def allows(self, plan: Plan) -> bool:
        """Return whether a plan, in the space or not, has what the job fixes, and the trainer can hold it."""
        return self._allows(plan) and self.axes.holds(plan)

    # --- the axes ---

    @property
    def _shifts_recompute(self) -> bool:
        return self.axes.recompute in ("fit", "towers")

    @property
    def _shifts_uses(self) -> bool:
        # Plans whose recomputation the job or a trainer names leave spare memory unused.
        return self.axes.recompute == "fit"

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Distributions by parameter name, the same for every trial; shifts reach over the whole model."""
        return self._distributions(self._layers, self._layers)

    @cached_property
    def near(self) -> dict[str, BaseDistribution]:
        """Distributions with the small shifts of the axes, for samplers that know nothing about plans."""
        axes = self.axes
        return self._distributions(min(axes.boundary_shift, self._layers), min(axes.recompute_shift, self._layers))

    def _distributions(self, boundary: int, recompute: int) -> dict[str, BaseDistribution]:
        axes = self.axes
        found: dict[str, BaseDistribution] = {
            "layout": CategoricalDistribution(tuple(self._layouts)),
            **self._packings.distributions,
        }
        if axes.boundaries is None:
            shift = IntDistribution(-boundary, boundary)
            found |= {_BOUNDARY.format(stage): shift for stage in range(self._stages - 1)}
        if self._shifts_recompute:
            shift = IntDistribution(-recompute, recompute)
            found |= {name.format(stage): shift for stage in range(self._stages) for name in (_VISION, _LANGUAGE)}
        if self._shifts_uses:
            names = (name for layout in axes.layouts for name in _names_of_uses(layout))
            found |= dict.fromkeys(names, IntDistribution(-recompute, recompute))
        return found

    # --- points and plans ---

    def plan(self, point: Mapping[str, Any]) -> Plan:
        """Return the plan of a point, or the nearest one that can be trained. Raise ValueError in an empty space."""
        anchor = self._nearest(point)
        packing, layout = anchor.packing, anchor.layout
        shifts = tuple(int(point.get(name, 0)) for name in _shift_names(layout))
        towards = self._shifts(anchor)
        while shifts != towards:
            if self._now.admits(plan := self._shifted(packing, layout, shifts)):
                return plan
            # One step closer to the anchor, which can be trained.
            shifts = tuple(one - (one > other) + (one < other) for one, other in zip(shifts, towards, strict=True))
        return anchor

    def point(self, plan: Plan) -> Point | None:
        """Return the point that stands for exactly this plan; None for a plan outside the space."""
        if not self.holds(plan):
            return None
        of_packing = self._packings.point(plan.packing, plan.layout)
        assert of_packing is not None  # of a plan of the space
        # Optuna needs a value for each parameter, also for those of stages that the layout does not have.
        point: Point = {**dict.fromkeys(self.distributions, 0), "layout": layout_name(plan.layout), **of_packing}
        shifts = zip(_shift_names(plan.layout), self._shifts(plan), strict=True)
        return point | {name: shift for name, shift in shifts if name in point}

    def holds(self, plan: Plan) -> bool:
        """Return whether a point stands for exactly this plan of the model's layers."""
        packing, layout = plan.packing, plan.layout
        if not self.has_points(packing, layout) or not self._now.admits(plan):
            return False
        if self.axes.boundaries is not None and plan.boundaries != self.axes.boundaries:
            return False
        if not self._shifts_recompute:
            return plan.stages == self._usual.stages(packing, layout, plan.boundaries)
        # The levels of a stage share a shift, and rungs have an order, which not every plan has.
        return self.pointed(plan) == plan

    def has_points(self, packing: Packing, layout: Layout) -> bool:
        """Return whether there are points of this packing and layout, and they stand for plans with both."""
        if (packing, layout) not in self._pairs:
            self._pairs[packing, layout] = self._has_pair(packing, layout)
        return self._pairs[packing, layout]

    def _has_pair(self, packing: Packing, layout: Layout) -> bool:
        if layout not in self.axes.layouts or self._packings.point(packing, layout) is None:
            return False
        anchor = self._anchor(packing, layout)
        return anchor is not None and self._now.admits(anchor)

    def pointed(self, plan: Plan) -> Plan:
        """Return the plan, or where no shift of all levels gives what it recomputes, one that recomputes more.

        Among plans that recompute whole towers it is one that leaves spare memory unused.
        """
        rungs = self._rungs(plan.packing, plan.layout)
        has_shift = self.axes.recompute != "towers" and not isinstance(plan.packing, Levelled)
        if has_shift and all(has_rungs(stage, rungs) for stage in plan.stages):
            return plan
        return self._shifted(plan.packing, plan.layout, self._shifts(plan))

    def nearest_miss(self) -> tuple[Packed, Layout, float, int] | None:
        """Return the packing and layout that lack least memory, with (bytes, number) of their fullest stage.

        None where no packing keeps the global batch.
        """
        packs = [packing for packing in self._packings.usual() if isinstance(packing, Packed)]
        pairs = ((packing, layout) for layout in self.axes.layouts for packing in packs)
        found = ((packing, layout, self._now.least(packing, layout)) for packing, layout in pairs)
        needing = ((packing, layout, *least) for packing, layout, least in found if least is not None)
        return min(needing, key=lambda each: each[2], default=None)

    # --- where to look ---

    @cached_property
    def starts(self) -> tuple[Plan, ...]:
        """The solver's plans of all layouts and capacities that can be trained, and a few for each ladder."""
        return tuple(dict.fromkeys(chain.from_iterable(map(self.solved, self.origins))))

    @cached_property
    def origins(self) -> tuple[Origin, ...]:
        """Where the starts come from, in their order."""
        found: list[Origin] = []
        usual = tuple(self._packings.usual())
        for layout in self.axes.layouts:
            found += (Origin(layout=layout, packings=(packing,)) for packing in usual)
            of_ladders = map(tuple, self._packings.of_ladders(layout))
            found += (Origin(layout=layout, packings=packings, usual=usual) for packings in of_ladders)
        return tuple(found)

    def by_bound(self) -> list[tuple[float, Origin]]:
        """Return (least epoch seconds of its starts, origin) by ascending seconds."""
        return by_bound(self.origins, self._now.least_seconds)

    def solved(self, origin: Origin) -> list[Plan]:
        """Return the starts of an origin; they are kept."""
        anchors = (self._anchor(packing, origin.layout) for packing in origin.packings)
        return list(islice((plan for plan in anchors if plan and self._now.admits(plan)), _OF_LADDER))

    @property
    def is_empty(self) -> bool:
        """Whether there is no start."""
        return not any(self.solved(origin) for _, origin in self.by_bound())

    def fastest_seconds(self) -> float:
        """Return the epoch seconds of the fastest start; infinite where there is none."""
        least = math.inf
        for bound, origin in self.by_bound():
            if bound >= least:
                break
            least = min((least, *self._now.epoch_seconds(self.solved(origin))))
        return least

    def neighbours(self, plan: Plan) -> Iterator[Plan]:
        """Yield plans that differ by a step along one axis, other packings first; none for another layout's plan.

        Another packing comes with the same stages, and with those of the solver.
        """
        packing = plan.packing
        if plan.layout not in self.axes.layouts or self._packings.point(packing, plan.layout) is None:
            return
        found: dict[Plan, None] = {}
        for other in self._packings.others(packing, plan.layout):
            if (anchor := self._anchor(other, plan.layout)) is not None:
                # The stages say what they recompute for each level, so other levels cannot keep them.
                same = [replace(plan, packing=other)] if other.degrees == packing.degrees else []
                found |= dict.fromkeys(self._now.admitted((*map(self.pointed, same), anchor)))
        if self.axes.boundaries is None:
            fitted = self._now.fitted_each(packing, plan.layout, [*moved(plan.boundaries)])
            found |= dict.fromkeys(self._now.admitted(each and self.pointed(each) for each in fitted))
        if self._shifts_recompute:
            others = recomputing_other(plan, self._rungs(plan.packing, plan.layout))
            found |= dict.fromkeys(self._now.admitted(map(self.pointed, others)))
        if self._shifts_uses:
            found |= dict.fromkeys(self._now.admitted(map(self.pointed, using_other(plan))))
        yield from (each for each in found if each != plan)

    # --- plans ---

    def _anchor(self, packing: Packing, layout: Layout) -> Plan | None:
        """Return the solver's plan, as near as the parameters come to it; None where there is none."""
        anchor = self._now.anchor(packing, layout)
        return None if anchor is None else self.pointed(anchor)

    def _nearest(self, point: Mapping[str, Any]) -> Plan:
        """Return the solver's plan of the point's packing and layout, or of the nearest that can be trained."""
        layout = self._layouts[point["layout"]]
        packing = self._packings.packing(point, layout)
        anchor = None if packing is None else self._anchor(packing, layout)
        if anchor is not None and self._now.admits(anchor):
            return anchor
        of_layout = [plan for plan in self.starts if plan.layout == layout] or self.starts

        def distance(plan: Plan) -> float:
            of_packing = self._packings.point(plan.packing, plan.layout)
            assert of_packing is not None  # of a plan of the space
            return self._packings.distance(point, of_packing)

        return min(of_layout, key=distance)

    def _shifted(self, packing: Packing, layout: Layout, shifts: Sequence[int]) -> Plan:
        inner_ends, of_stages = layout.pipeline - 1, 2 * layout.pipeline
        boundary_shifts, others = shifts[:inner_ends], shifts[inner_ends:]
        recomputes, further_uses = others[:of_stages], others[of_stages:]
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
        rungs = self._rungs(packing, layout)
        stages = (recomputing_more(stage, rungs, *more) for stage, more in by_stage)
        return using_more(Plan(packing=packing, layout=layout, stages=tuple(stages)), further_uses)

    def _rungs(self, packing: Packing, layout: Layout) -> Rungs:
        if self.axes.recompute == "towers":
            return TOWER
        return self._usual.solver.rungs(packing, layout) if self.axes.recompute == "fit" else (1, 1)

    def _shifts(self, plan: Plan) -> tuple[int, ...]:
        """Return the shifts of a plan in the order of `_shift_names`."""
        usual_boundaries = self._usual.boundaries(plan.packing, plan.layout)
        boundaries = (end - usual for end, usual in zip(plan.boundaries[:-1], usual_boundaries[:-1], strict=True))
        usual = self._usual.stages(plan.packing, plan.layout, plan.boundaries)
        rungs = self._rungs(plan.packing, plan.layout)
        recomputes = (further_rungs(stage, other, rungs) for stage, other in zip(plan.stages, usual, strict=True))
        of_both = zip(uses(plan), uses(replace(plan, stages=usual)), strict=True)
        further_uses = (self._shifts_uses * (use - of_usual) for use, of_usual in of_both)
        return (*boundaries, *chain.from_iterable(recomputes), *further_uses)


def _shift_names(layout: Layout) -> list[str]:
    """Return the names of shifts: boundaries, vision and language recomputation of each stage, uses of memory."""
    stages = range(layout.pipeline)
    of_stages = [name.format(stage) for stage in stages for name in (_VISION, _LANGUAGE)]
    return [*map(_BOUNDARY.format, stages[:-1]), *of_stages, *_names_of_uses(layout)]


def _names_of_uses(layout: Layout) -> list[str]:
    if layout.shards_weights:
        return [_GATHERED]
    return [*map(_DEFERRED.format, range(1, layout.pipeline))] if layout.zero_bubble else []
