"""Layouts of InternViT-6B with InternLM2-20B on 32 devices, by analytic costs: nothing is measured.

A part of `python -m benchmarks.parallel`. The best plan of each layout, with each tensor degree, is compared with the
best of all: what each dimension is worth. Nodes have 8 devices, and tensor ranks lie on one node. The configuration in
OmniBal's code for this model (`table2_data_model_memory_balanced_0906.yaml`) has pipeline 4 and tensor degree 4, manual
stages, 128 packs in a step, and no recomputation.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

from typing_extensions import override

from autotune.dimensions.folds import layout_name
from autotune.dimensions.tensor import TensorDimension
from autotune.dimensions.usual import layouts
from autotune.events import Event, TrialEnded
from autotune.search.baselines import zero3_plan
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from benchmarks.cases.mixed import DEGREES, MEMORY, Mixed
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_LM2_20B, INTERN_VIT_6B, INTERN_VIT_300M
from benchmarks.machines.analytic import A100, analytic_costs
from benchmarks.output.result import Check, at_least, at_most, show
from benchmarks.search import search
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.job import SpaceSection
from trials.plan import Layout, Plan
from trials.workload import Workload

DEVICES, NODES = 32, 4
BATCH = 384
"""OmniBal's 128 packs of 9 tiles, which about 3 samples fill."""
DATA = ("tiles up to 5", "many tiles")
OMNIBAL = Layout(pipeline=4, data=2, tensor=4, zero=1)
"""bfloat16 weights need ZeRO 1 here; OmniBal has ZeRO 0 with float32 copies of its own."""
OMNIBAL_STAGES = (21, 45, 68, 93)
"""Stage boundaries of its manual partition 0, 23, 47, 72, 101, without layers that are none of the chain here."""
MISSED, LONGER, MOST_LOST = 1.01, 2.0, 1


@dataclass(frozen=True, kw_only=True)
class Cut(Mixed):
    """A simulated workload whose language layers ranks may hold together."""

    nodes: int = 1
    tensor_degrees: tuple[int, ...] = DEGREES
    samples: int | None = None
    """In a step."""

    @override
    @property
    def batch(self) -> int:
        return self.samples or super().batch

    @override
    @cached_property
    def costs(self) -> LayerCosts:
        sharing, cutting = (
            [each for each in degrees if self.devices % each == 0] for degrees in (DEGREES, self.tensor_degrees)
        )
        return analytic_costs(
            self.vision,
            self.language,
            A100,
            sequence_degrees=sharing,
            tensor_degrees=cutting,
            shares=self.devices,
        )

    @override
    @cached_property
    def workload(self) -> Workload:
        found = super().workload
        return replace(found, hardware=replace(found.hardware, nodes=self.nodes))


def rows() -> Iterator[dict[str, Any]]:
    for data in DATA:
        began = time.monotonic()
        yield _row(_large(data))
        show(f"{data}: {time.monotonic() - began:.0f} s")
    for room in (0.1, 0.4, 0.9):
        yield _lost(room)


def _large(data: str) -> Cut:
    return Cut(
        name=f"6B + 20B, {data}, {DEVICES} devices",
        vision=INTERN_VIT_6B,
        language=INTERN_LM2_20B,
        tensor=1,
        data=data,
        devices=DEVICES,
        room=1.0,
        seed=0,
        memory=MEMORY,
        nodes=NODES,
        samples=BATCH,
    )


def _row(workload: Cut) -> dict[str, Any]:
    said = list[str]()
    plain_seconds, _ = _searched(replace(workload, tensor_degrees=()))
    offered_seconds, offered = _searched(workload, said.append)
    solver = Solver(workload.predictor, workload.limits(MEMORY))
    possible = TensorDimension().further(workload.workload, solver).possible
    names = [layout_name(each) for each in chain(layouts(workload.shape, DEVICES), possible)]
    everything = feasible_space(workload.workload, solver, remedy="", wanted=SpaceSection(layouts=tuple(names)))
    plans = sorted({*offered.starts, *everything.starts}, key=workload.predictor.epoch_seconds)
    best = workload.predictor.epoch_seconds(plans[0])

    prices = _Prices(
        plans=[(plan, seconds / best) for plan, seconds in zip(plans, solver.epoch_seconds(plans), strict=True)]
    )
    omnibal = [fitted for plan in plans if plan.layout == OMNIBAL and (fitted := _as_published(solver, plan))]
    published = min(map(workload.predictor.epoch_seconds, omnibal), default=None)
    usual = zero3_plan(workload.workload, solver, workload.limits(MEMORY), named=(f"p1-d{DEVICES}-z3",))
    return {
        "case": workload.name,
        "best": wire.to_document(plans[0]),
        "epoch_seconds": best,
        "said": said,
        "found_by_a_search": min(map(workload.predictor.epoch_seconds, offered.starts)) / best,
        "cpu_seconds": {"with tensor degrees": offered_seconds, "without": plain_seconds},
        "tensor": prices.by(lambda plan: plan.layout.tensor),
        "pipeline": prices.by(lambda plan: plan.layout.pipeline),
        "most_ranks_of_a_pack": prices.by(lambda plan: max(plan.packing.degrees)),
        "layouts": prices.by(lambda plan: layout_name(plan.layout)),
        "without_a_plan": [name for name in names if name not in prices.by(lambda plan: layout_name(plan.layout))],
        "omnibal_stages": published and published / best,
        "zero3": usual
        and {
            "samples": wire.to_document(usual.packing)["samples"],
            "price": workload.predictor.epoch_seconds(usual) / best,
        },
    }


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """Plans with their epoch seconds over those of the best one, the best first."""

    plans: Sequence[tuple[Plan, float]]

    def by(self, value_of: Callable[[Plan], object]) -> dict[str, dict[str, Any]]:
        """Return layout and price of the best plan with each value."""
        found: dict[str, dict[str, Any]] = {}
        for plan, price in self.plans:
            found.setdefault(str(value_of(plan)), {"layout": layout_name(plan.layout), "price": price})
        return found


def _as_published(solver: Solver, plan: Plan) -> Plan | None:
    """Return the plan with OmniBal's stages; None where they do not fit."""
    return solver.fit(plan.packing, plan.layout, OMNIBAL_STAGES)


def _searched(workload: Cut, show: Callable[[str], object] = lambda _: None) -> tuple[float, Space]:
    """Return (CPU seconds, space) of what is computed before the first trial; the packs are built anew."""
    fresh = replace(workload)
    solver = Solver(fresh.predictor, fresh.limits(MEMORY))
    data = fresh.workload
    began = time.process_time()
    space = feasible_space(data, solver, remedy="", show=show)
    _ = space.starts
    return time.process_time() - began, space


def _lost(room: float) -> dict[str, Any]:
    """Return a search on 4 ranks of a small model, and how many trials it spent on tensor degrees."""
    workload = Cut(
        name=f"300M + 2B, 4 devices, room {room:.0%}",
        vision=INTERN_VIT_300M,
        language=INTERN_LM2_2B,
        tensor=1,
        data="tiles up to 5",
        devices=4,
        room=room,
        seed=1,
    )
    heard, said = list[Event](), list[str]()
    found = search(workload, 24, heard=heard.append)
    solver = Solver(workload.predictor, workload.limits(workload.memory_limit_bytes))
    feasible_space(workload.workload, solver, remedy="", show=said.append)
    ran = [event.trial.plan for event in heard if isinstance(event, TrialEnded) and not event.is_known]
    return {
        "case": workload.name,
        "said": said,
        "trials": len(ran),
        "trials_of_tensor_degrees": sum(plan.layout.tensor > 1 for plan in ran),
        "winner": wire.to_document(found.plan),
    }


def checks(found: list[dict[str, Any]]) -> list[Check]:
    large, small = ([row for row in found if ("best" in row) is is_large] for is_large in (True, False))
    seconds = [row["cpu_seconds"] for row in large]
    return [
        at_most("best plan of a search over that of all layouts", [row["found_by_a_search"] for row in large], MISSED),
        at_most(
            "CPU seconds before the first trial over those without tensor degrees",
            [each["with tensor degrees"] / each["without"] for each in seconds],
            LONGER,
        ),
        at_least(
            "OmniBal's layout over the best",
            [row["layouts"].get(layout_name(OMNIBAL), {"price": 0.0})["price"] for row in large],
            1.0,
        ),
        at_least(
            "ZeRO 3 with unpacked samples over the best",
            [row["zero3"]["price"] for row in large if row["zero3"]],
            1.0,
        ),
        at_most(
            "trials lost where tensor degrees cannot help",
            [row["trials_of_tensor_degrees"] for row in small if row["winner"]["layout"]["tensor"] == 1],
            MOST_LOST,
        ),
    ]
