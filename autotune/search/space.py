"""What the study searches: named parameters, and the plan that they stand for."""

from collections.abc import Mapping, Sequence
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.search.layouts import layout_name
from autotune.search.solver import Solver
from trials import plugins
from trials.data.packs import PACKERS
from trials.plan import Layout, Packed, Plan, Stage

_SHIFT = 2
_VISION_SLACKS = (0, 1, 2)
_TEXT_SLACKS = (0, 32, 64, 128, 256)
_PACKERS = plugins.names(PACKERS)


class Space:
    """Packing, layout, split and recompute as Optuna parameters.

    - `layout`, `packer`, `qv`, `qt`: one of the candidates;
    - `qv_slack`, `qt_slack`: how far below its capacity a pack is full enough (Qv - Q'v, Qt - Q't);
    - `boundary_i`: layers by which the solver's end of stage i is moved;
    - `recompute_i`: layers that stage i recomputes more (or fewer) than the memory is predicted to ask.
    """

    def __init__(self, layouts: Sequence[Layout], capacities: Sequence[tuple[int, int]], solver: Solver) -> None:
        self._layouts = {layout_name(layout): layout for layout in layouts}
        self._capacities = capacities
        self._solver = solver
        self._stages = max(layout.pipeline for layout in layouts)

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """By parameter name; the same for every trial."""
        shift = IntDistribution(-_SHIFT, _SHIFT)
        return {
            "layout": CategoricalDistribution(tuple(self._layouts)),
            "packer": CategoricalDistribution(_PACKERS),
            "qv": CategoricalDistribution(tuple(sorted({qv for qv, _ in self._capacities}))),
            "qt": CategoricalDistribution(tuple(sorted({qt for _, qt in self._capacities}))),
            "qv_slack": CategoricalDistribution(_VISION_SLACKS),
            "qt_slack": CategoricalDistribution(_TEXT_SLACKS),
            **{f"boundary_{stage}": shift for stage in range(self._stages - 1)},
            **{f"recompute_{stage}": shift for stage in range(self._stages)},
        }

    def grid(self) -> list[dict[str, Any]]:
        """Every layout, packer and pair of capacities, with the solver's own split and recompute."""
        still = {name: 0 for name in self.distributions if name.startswith(("boundary_", "recompute_"))}
        return [
            {"layout": layout, "packer": packer, "qv": qv, "qt": qt, "qv_slack": 0, "qt_slack": 64, **still}
            for layout in self._layouts
            for packer in _PACKERS
            for qv, qt in self._capacities
        ]

    def plan(self, parameters: Mapping[str, Any]) -> Plan | None:
        """The plan of a point; None when no split of its packing and layout fits the memory."""
        layout = self._layouts[parameters["layout"]]
        packing = _packing(parameters)
        solved = self._solver.solve(packing, layout)
        if solved is None:
            return None
        shifts = [parameters[f"boundary_{stage}"] for stage in range(layout.pipeline - 1)]
        moved = self._solver.fit(packing, layout, _moved(solved, shifts)) if any(shifts) else solved
        if moved is None:
            return None
        more = [parameters[f"recompute_{number}"] for number in range(layout.pipeline)]
        stages = tuple(_recompute_more(stage, by) for stage, by in zip(moved.stages, more, strict=True))
        return Plan(packing=packing, layout=layout, stages=stages)


def _packing(parameters: Mapping[str, Any]) -> Packed:
    return Packed(
        qv=parameters["qv"],
        qt=parameters["qt"],
        qv_min=max(0, parameters["qv"] - parameters["qv_slack"]),
        qt_min=max(0, parameters["qt"] - parameters["qt_slack"]),
        packer=parameters["packer"],
    )


def _moved(plan: Plan, shifts: Sequence[int]) -> tuple[int, ...]:
    """Ends of the stages after the shifts, each stage keeping at least one layer."""
    counts = [stage.vision + stage.language for stage in plan.stages]
    layers, stages = sum(counts), len(counts)
    ends: list[int] = []
    for number, shift in enumerate(shifts):
        least = (ends[-1] if ends else 0) + 1
        most = layers - (stages - 1 - number)
        ends.append(min(max(sum(counts[: number + 1]) + shift, least), most))
    return (*ends, layers)


def _recompute_more(stage: Stage, by: int) -> Stage:
    """The stage with `by` more recomputed layers, as far as it has them.

    Vision layers are the first to be recomputed, and the last to be spared.
    """
    vision = min(stage.recompute_vision + max(by, 0), stage.vision)
    language = stage.recompute_language + by - (vision - stage.recompute_vision)
    if language < 0:
        vision, language = max(vision + language, 0), 0
    return Stage(
        vision=stage.vision,
        language=stage.language,
        recompute_vision=vision,
        recompute_language=min(language, stage.language),
    )
