"""The solver's problem as an integer program: written from the problem, not from the solver."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from autotune.prediction.sizes import EpochSizes
from trials.arrays import Floats
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import static_bytes
from trials.plan import Layout
from trials.stage import Stage

_GIB = float(1 << 30)
Variable = tuple[str, int]
"""Name and stage."""
Terms = Mapping[Variable, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimum:
    """What the integer program found."""

    seconds: float
    """Of a step by the closed form."""
    stages: tuple[Stage, ...]
    proven: bool
    """False when the time was up."""


class Program:
    """minimise sum_s t_s + (m - 1) B, with B >= t_s, over the counts of layers of each stage and kind.

    Binaries say of each stage: `here` holds language layers, or a stage before does; `projects` holds the projector;
    `all_vision`, `all_language` recomputes every layer of the kind. Memory is that of 1F1B: min(P - s, m) packs in
    flight, or one less and the one that recomputes a layer. For costs whose layers share no bytes and have no
    transients.
    """

    def __init__(
        self, costs: LayerCosts, sizes: EpochSizes, layout: Layout, layers: tuple[int, int], usable_bytes: float
    ) -> None:
        """`layers` are (vision, language)."""
        self._sizes, self._layout, self._limit = sizes, layout, usable_bytes / _GIB
        self._vision, self._language = layers
        of_kinds = [costs[kind] for kind in KINDS]
        self._parameters = [layer.parameters for layer in of_kinds]
        mean = sizes.table.mean(axis=0)
        passes = [np.array(c.forward_seconds) + c.backward_seconds for c in of_kinds]
        self._seconds = [float(mean @ each) for each in _by_columns(passes)]
        self._seconds[0] += float(mean[:4] @ np.array(costs.loading.pixels_seconds))
        if layout.pipeline > 1:  # a stage that is the first and the last loads its packs once
            self._seconds[4] += float(mean[:4] @ np.array(costs.loading.labels_seconds))
        self._again = [float(mean @ each) for each in _by_columns(c.recompute_seconds for c in of_kinds)]
        self._kept = [each / _GIB for each in _by_columns(c.kept_bytes for c in of_kinds)]
        self._outputs = [each / _GIB for each in _by_columns(c.output_bytes for c in of_kinds)]
        self._columns: dict[Variable, int] = {}
        self._rows: list[tuple[Terms, float, float]] = []

    def solve(self, element_bytes: int, time_limit: float) -> Optimum | None:
        """Return None when nothing is feasible, or nothing was found within `time_limit` seconds."""
        micro_batches, stages = self._sizes.epoch.micro_batches, range(self._layout.pipeline)
        for stage in stages:
            self._add_counts(stage)
            self._add_memory(stage, element_bytes)
            self._at_most({**self._times(stage), ("slowest", 0): -1.0}, -self._fixed_seconds(stage))
        for kind, count in (("vision", self._vision), ("language", self._language), ("projects", 1)):
            self._rows.append(({(kind, stage): 1.0 for stage in stages}, count, count))
        objective: dict[Variable, float] = {("slowest", 0): micro_batches - 1.0}
        for stage in stages:
            objective.update(self._times(stage))
        found = self._run(objective, time_limit)
        if found is None:
            return None
        values, proven = found
        return Optimum(
            seconds=sum(weight * values[v] for v, weight in objective.items()) + sum(map(self._fixed_seconds, stages)),
            stages=tuple(
                Stage(
                    vision=round(values["vision", stage]),
                    language=round(values["language", stage]),
                    recompute_vision=round(values["recompute_vision", stage]),
                    recompute_language=round(values["recompute_language", stage]),
                )
                for stage in stages
            ),
            proven=proven,
        )

    def _times(self, stage: int) -> dict[Variable, float]:
        _, vision, projector, language, _ = self._seconds
        return {
            ("vision", stage): vision,
            ("projects", stage): projector,
            ("language", stage): language,
            ("recompute_vision", stage): self._again[1],
            ("recompute_language", stage): self._again[3],
        }

    def _fixed_seconds(self, stage: int) -> float:
        """Return the seconds of vision embedding and head."""
        first, last = stage == 0, stage == self._layout.pipeline - 1
        return first * self._seconds[0] + last * self._seconds[4]

    def _add_counts(self, stage: int) -> None:
        most = {"vision": self._vision, "language": self._language}
        self._at_most({("vision", stage): -1, ("language", stage): -1}, -1)
        for kind, layers in most.items():
            recomputed, every = (f"recompute_{kind}", stage), (f"all_{kind}", stage)
            self._at_most({recomputed: 1, (kind, stage): -1}, 0)
            # Where not all are recomputed, at least one is not.
            self._at_most({recomputed: 1, (kind, stage): -1, every: -1}, -1)
            self._at_most({(kind, stage): 1, (f"any_{kind}", stage): -layers}, 0)
        self._at_most({("language", stage): 1, ("here", stage): -self._language}, 0)
        self._at_most({("projects", stage): 1, ("vision", stage): -1}, 0)
        for before in range(stage):
            # No vision layer comes behind a language layer, or behind the projector.
            for barrier in ("here", "projects"):
                self._at_most({("vision", stage): 1, (barrier, before): self._vision}, self._vision)
            # No stage has language layers before one that has the projector.
            self._at_most({("projects", stage): 1, ("here", before): 1}, 1)

    def _add_memory(self, stage: int, element_bytes: int) -> None:
        in_flight = min(self._layout.pipeline - stage, self._sizes.epoch.micro_batches)
        static = self._static(stage, element_bytes)
        for running, behind in self._sizes.heaviest(in_flight):
            kept, fixed = self._kept_terms(stage, running + behind)
            self._at_most(_sum(static, kept), self._limit - self._fixed_static(stage, element_bytes) - fixed)
            for kind, column in (("vision", 1), ("language", 3)):
                self._add_recomputing(stage, kind, column, (running, behind), element_bytes)

    def _add_recomputing(
        self, stage: int, kind: str, column: int, packs: tuple[Floats, Floats], element_bytes: int
    ) -> None:
        """Add what two packs keep while the first recomputes the last layer of a kind, where all of the kind are."""
        size, behind = packs
        kept, fixed = self._kept_terms(stage, size, up_to=column)
        output = float(size @ self._outputs[column])
        waiting, fixed_behind = self._kept_terms(stage, behind)
        terms = _sum(_sum(kept, {(f"recompute_{kind}", stage): output}), waiting)
        terms, fixed = _sum(terms, self._static(stage, element_bytes)), fixed + fixed_behind
        much = 100 * self._limit
        switched = {(f"all_{kind}", stage): much, (f"any_{kind}", stage): much}
        needed = fixed - output + float(size @ self._kept[column]) + self._fixed_static(stage, element_bytes)
        self._at_most(_sum(terms, switched), self._limit - needed + 2 * much)

    def _kept_terms(self, stage: int, size: Floats, up_to: int = 5) -> tuple[dict[Variable, float], float]:
        """Return the GiB that packs of this size keep in layers of the first kinds: terms, and what does not vary."""
        kept = [float(size @ of_kind) for of_kind in self._kept]
        terms: dict[Variable, float] = {}
        for kind, column in (("vision", 1), ("language", 3)):
            if column < up_to:
                terms[kind, stage] = kept[column]
                terms[f"recompute_{kind}", stage] = float(size @ self._outputs[column]) - kept[column]
        if up_to > 2:
            terms["projects", stage] = kept[2]
        first, last = stage == 0, stage == self._layout.pipeline - 1
        return terms, first * kept[0] + (last and up_to == 5) * kept[4]

    def _static(self, stage: int, element_bytes: int) -> dict[Variable, float]:
        columns = (("vision", 1), ("projects", 2), ("language", 3))
        return {(name, stage): self._static_gib(column, element_bytes) for name, column in columns}

    def _fixed_static(self, stage: int, element_bytes: int) -> float:
        first, last = stage == 0, stage == self._layout.pipeline - 1
        return first * self._static_gib(0, element_bytes) + last * self._static_gib(4, element_bytes)

    def _static_gib(self, column: int, element_bytes: int) -> float:
        return static_bytes(self._parameters[column], element_bytes, self._layout) / _GIB

    def _at_most(self, terms: Terms, high: float) -> None:
        self._rows.append((terms, -np.inf, high))

    def _run(self, objective: Terms, time_limit: float) -> tuple[dict[Variable, float], bool] | None:
        for terms in (objective, *(row for row, _, _ in self._rows)):
            for variable in terms:
                self._columns.setdefault(variable, len(self._columns))
        matrix = np.stack([self._vector(terms) for terms, _, _ in self._rows])
        low, high = (np.array([row[side] for row in self._rows]) for side in (1, 2))
        names = [name for name, _ in self._columns]
        binary = [name in ("here", "projects") or name.startswith(("all_", "any_")) for name in names]
        result = milp(
            self._vector(objective),
            constraints=LinearConstraint(matrix, low, high),
            integrality=[name != "slowest" for name in names],
            bounds=Bounds(0, np.where(binary, 1, np.inf)),
            options={"time_limit": time_limit, "mip_rel_gap": 1e-9},
        )
        if result.x is None:
            return None
        return dict(zip(self._columns, result.x.tolist(), strict=True)), result.status == 0

    def _vector(self, terms: Terms) -> Floats:
        vector = np.zeros(len(self._columns))
        for variable, factor in terms.items():
            vector[self._columns[variable]] = factor
        return vector


def _by_columns(of_kinds: Iterable[Sequence[float] | Floats]) -> list[Floats]:
    """Return each kind's coefficients of (units, tokens, squares, 1, targets); the last kind, the head, has targets."""
    *others, (units, targets, squares, constant) = of_kinds
    return [*(np.array((*each, 0.0)) for each in others), np.array((units, 0.0, squares, constant, targets))]


def _sum(first: Terms, second: Terms) -> dict[Variable, float]:
    return {variable: first.get(variable, 0.0) + second.get(variable, 0.0) for variable in {**first, **second}}
