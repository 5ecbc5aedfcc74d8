"""Predictions of about 200 plans on 12 workloads over all dimensions of layouts, as a version before made them.

`python -m tests.values.golden_predictions` writes them again, which only a change of the formulas is a reason for.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, product
from pathlib import Path
from typing import Any, get_args

from autotune.dimensions.folds import layout_name
from autotune.dimensions.overlap import overlapped
from autotune.dimensions.usual import layouts, sharded_layouts
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from tests.values.data import index_of
from tests.values.exchanges import around_layers, averages, copies, of_weights
from tests.values.search import (
    BATCH,
    COSTS,
    epoch_of,
    frozen_vision,
    keeping,
    limits_of,
    random_rows,
    workload_of,
)
from trials import wire
from trials.costs.coefficients import Coefficients, LayerKind, times
from trials.costs.exchange import Exchange
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import CommunicationCost, LayerCosts, LinkCost, UpdateCost
from trials.plan import Layout, Levelled, Offload, Packed, Packing, Padded, Plan
from trials.workload import Workload

FILE = Path(__file__).parents[1] / "assets" / "predictions.json"
_PLANS = 17
"""Of each workload."""
_FACTORS = tuple(1 + 0.1 * place for place in range(len(FACTORS)))
_DEGREES = (2, 4)
_PACKED = Packed(qv=9, qt=480, qv_min=8, qt_min=416)
_LONGER = Packed(qv=14, qt=900, qv_min=14, qt_min=800, packer="best-fit")
_PACKINGS: tuple[Packing, ...] = (
    Padded(samples=2),
    _PACKED,
    _LONGER,
    replace(_LONGER, sequence=2),
    Levelled(levels=(_PACKED, replace(_LONGER, sequence=2))),
    Levelled(levels=(_PACKED, _LONGER), whole_steps=True),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class GoldenWorkload:
    """A small workload on simulated devices, whose profile has timed all that their layouts need."""

    costs: LayerCosts
    devices: int
    nodes: int
    room: float
    """Memory of a rank over what the leanest plan in data parallelism needs."""

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(_timed(self.costs, self.devices, self.nodes), epoch_of(_INDEX, 2 * BATCH), 4)

    @property
    def workload(self) -> Workload:
        found = workload_of(self.memory, self.devices)
        hardware = replace(found.hardware, nodes=self.nodes, ram_bytes=1 << 40)
        return replace(found, hardware=hardware, global_batch_samples=2 * BATCH)

    @cached_property
    def memory(self) -> int:
        solver = Solver(self.predictor, limits_of(1))
        return round(self.room * solver.least_bytes(_PACKED, Layout(pipeline=1, data=self.devices, zero=1)))

    @property
    def layouts(self) -> Iterator[Layout]:
        """Every layout of these devices, and of half and a quarter of them."""
        costs, model = self.predictor.costs, workload_of().model
        for devices in (self.devices, self.devices // 2, self.devices // 4):
            usual = layouts(model, devices) if devices else ()
            yield from chain(usual, map(partial(overlapped, costs), usual), sharded_layouts(devices) if devices else ())
            for layout, offload in product(usual, get_args(Offload)[1:]):
                yield replace(layout, offload=offload)
            for layout in usual:
                yield from (replace(layout, tensor=self.devices // devices) for _ in range(devices < self.devices))
                if (within := layout.grid.data_ranks_of_node(self.devices // self.nodes)) > 1:
                    yield replace(layout, reduce_within=within)

    def plans(self) -> list[Plan]:
        """Draw plans, which fit the memory or are the leanest."""
        solver, found = Solver(self.predictor, limits_of(self.memory)), dict[str, Plan]()
        pairs = list(product(dict.fromkeys(self.layouts), _PACKINGS))
        for layout, packing in random.Random(self.devices).sample(pairs, len(pairs)):
            if len(found) == _PLANS:
                break
            fits = all(layout.data % degree == 0 for degree in packing.degrees) and solver.unprofiled(layout) is None
            if fits and solver.keeps_batch(packing, layout) and solver.fills_levels(packing, layout):
                plan = solver.solve(packing, layout) or solver.leanest(packing, layout)
                found[plan.id] = plan
        return list(found.values())

    def predicted(self, plans: list[Plan]) -> dict[str, Any]:
        """Return the predictions of plans, and the first three proposals."""
        predictor = self.predictor
        slower = predictor.with_costs(scaled(predictor.costs, _FACTORS))
        space = feasible_space(self.workload, Solver(predictor, limits_of(self.memory)), remedy="")
        predictions = {plan.id: predictor.predict(plan) for plan in plans}
        return {
            # Not the plans: two may take the same time, and rounding, which differs between machines, decides.
            "proposals": [
                [layout_name(plan.layout), predictor.predict(plan).epoch_seconds] for plan in space.starts[:3]
            ],
            "layouts": sorted({layout_name(plan.layout) for plan in space.starts}),
            "plans": {
                plan.id: {
                    "steps": predictions[plan.id].step_seconds.tolist(),
                    "slower": slower.epoch_seconds(plan),
                    "bytes": [[each.low, each.expected, each.high] for each in predictions[plan.id].stage_memory],
                }
                for plan in plans
            },
        }


_INDEX = index_of(random_rows(320, seed=7))
_LINKS = tuple(LinkCost(latency_seconds=factor * 1e-4, seconds_per_byte=factor * 2e-9) for factor in (1, 3))


def _timed(costs: LayerCosts, devices: int, nodes: int) -> LayerCosts:
    """Return costs with all that ranks of these devices exchange."""
    of_kinds = tuple((kind, _whole(kind, cost)) for kind, cost in costs.layers)
    of_node = devices // nodes
    return replace(
        costs,
        layers=of_kinds,
        link=_LINKS[0],
        updates=(*costs.updates, UpdateCost(zero=1, data_parallel=devices, seconds_per_parameter=1.5e-9)),
        communications=tuple(
            _communication(devices, pipeline, of_node) for pipeline in (1, 2) if devices % pipeline == 0
        ),
        exchanges=(
            *_averages(devices, of_node),
            *(exchange for degree in _DEGREES for exchange in _of_degree(degree, dict(of_kinds)["language"])),
            *of_weights(devices, (1e-4, 2e-4, 3e-4, 2e-4, 5e-4), 6e-10),
            copies(3e-10, 4e-10),
        ),
        of_node=of_node if nodes > 1 else 0,
    )


def _whole(kind: LayerKind, cost: LayerCost) -> LayerCost:
    """Return the cost with all bytes and parameters that layers can have."""
    return replace(
        cost,
        transient_bytes=times(cost.kept_bytes, 0.3),
        shared_bytes=times(cost.kept_bytes, 0.1),
        tensor_parallel_parameters=40_000 if kind == "language" else 0,
        tied_parameters=20_000 if kind == "head" else 0,
    )


def _communication(devices: int, pipeline: int, of_node: int) -> CommunicationCost:
    return CommunicationCost(
        pipeline=pipeline,
        data=devices // pipeline,
        link=_LINKS[0],
        between=_LINKS[1] if pipeline > 1 and of_node < devices else None,
        bucket_bytes=1 << 20 if pipeline == 1 else 0,
        hidden_share=0.8 if pipeline == 1 else 0.0,
    )


def _averages(devices: int, of_node: int) -> Iterator[Exchange]:
    for pipeline in (1, 2):
        if devices % pipeline == 0:
            yield averages(pipeline * 8e-10, devices // pipeline, pipeline=pipeline)
    if 1 < of_node < devices:
        yield averages(7e-10, devices, within=of_node)


def _of_degree(degree: int, language: LayerCost) -> Iterator[Exchange]:
    forward: Coefficients = (0, degree * 3e-7, 0, 2e-5)
    yield Exchange(
        name="sequence",
        ranks=degree,
        layer="language",
        forward_seconds=forward,
        backward_seconds=(0, degree * 4e-7, 0, 3e-5),
        recompute_seconds=forward,
        kept_bytes=times(language.kept_bytes, 1.1),
        shared_bytes=times(language.shared_bytes, 1.2),
        transient_bytes=times(language.transient_bytes, 1.3),
    )
    yield Exchange(
        name="sequence",
        ranks=degree,
        layer="projector",
        forward_seconds=(degree * 1e-5, 1e-7, 0, 1e-5),
        backward_seconds=(degree * 2e-5, 1e-7, 0, 1e-5),
    )
    yield around_layers(degree, (0, degree * 5e-7, 0, 4e-5), (0, degree * 7e-7, 0, 6e-5))


_COSTS = {"whole": COSTS, "keeping": keeping(3.0), "frozen": frozen_vision()}
WORKLOADS = {
    f"{name}, {devices} devices on {nodes} nodes": GoldenWorkload(costs=costs, devices=devices, nodes=nodes, room=room)
    for (name, costs), (devices, nodes, room) in product(
        _COSTS.items(), ((2, 1, 1.2), (4, 1, 2.0), (4, 2, 1.1), (8, 2, 1.5))
    )
}


def decoded(document: dict[str, Any]) -> Plan:
    """Return the plan of a document in the file."""
    return wire.decode(Plan, json.dumps(document))


def _write() -> None:
    found = {}
    for name, workload in WORKLOADS.items():
        plans = workload.plans()
        documents = {plan.id: wire.to_document(plan) for plan in plans}
        found[name] = {"documents": documents, **workload.predicted(plans)}
    FILE.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    _write()
