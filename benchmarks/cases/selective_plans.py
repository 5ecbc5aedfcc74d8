"""The best plans with and without selective recomputation, by analytic costs: nothing is measured on a GPU.

    python -m benchmarks.cases.selective_plans

For each model, number of devices and memory, the plan of least predicted time among those from which a search would
begin is found twice: with the costs of selective recomputation, and with none. Both are timed on a simulated machine
too (benchmarks/machines/machine.py), with all its distortions, and the bytes of their stages are counted event by
event. `plain` costs are those of language layers without fused kernels. `bound_gain` is that of plans whose
recomputation takes no time. Prints one JSON object.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import product
from typing import Any

from typing_extensions import override

from autotune.dimensions.folds import layout_name
from autotune.errors import NoFeasiblePlan
from autotune.prediction.predictor import Predictor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from benchmarks.cases.mixed import DEGREES
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_LM2_7B, INTERN_LM2_20B, INTERN_VIT_6B, INTERN_VIT_300M
from benchmarks.cases.workloads import SimulatedWorkload
from benchmarks.machines.analytic import A100, LABEL, LanguageShape, VisionShape, analytic_costs, without_selective
from benchmarks.machines.dials import drawn_dials
from benchmarks.machines.kernels import drawn_device
from benchmarks.machines.layers import layer_works
from benchmarks.machines.links import drawn_network
from benchmarks.machines.machine import EpochOf, Machine
from benchmarks.machines.occupancy import most_of_epoch
from benchmarks.output.result import at_least, at_most, finish, show
from trials.costs.coefficients import NOTHING
from trials.costs.layer_costs import LayerCosts
from trials.plan import Packed, Plan
from trials.stage import TOWERS, Stage
from trials.workload import Workload

MODELS: Mapping[str, tuple[VisionShape, LanguageShape]] = {
    "300M + 2B": (INTERN_VIT_300M, INTERN_LM2_2B),
    "300M + 7B": (INTERN_VIT_300M, INTERN_LM2_7B),
    "6B + 20B": (INTERN_VIT_6B, INTERN_LM2_20B),
}
LARGEST = "6B + 20B"
DEVICES, GIGABYTES = (8, 16), (80, 40)
DATA = "tiles up to 5"
BAR = 1.3
_OF_NODE = 8
_SAMPLES_PER_DEVICE = 12
"""In a step, as OmniBal's 128 packs of about 3 samples on 32 devices."""


@dataclass(frozen=True, kw_only=True)
class Tight(SimulatedWorkload):
    """A model on devices of a given memory, with every dimension of the usual search."""

    fused: bool

    @override
    @property
    def batch(self) -> int:
        return _SAMPLES_PER_DEVICE * self.devices

    @override
    @cached_property
    def costs(self) -> LayerCosts:
        return analytic_costs(
            self.vision, self.language, A100,
            sequence_degrees=DEGREES, tensor_degrees=DEGREES, shares=self.devices, fused=self.fused,
        )  # fmt: skip

    @cached_property
    def epochs(self) -> EpochOf:
        return cache(self.epoch)

    @override
    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.costs, self.epochs, 2)

    @override
    @cached_property
    def workload(self) -> Workload:
        found = super().workload
        return replace(found, hardware=replace(found.hardware, nodes=self.devices // _OF_NODE))

    def best(self, costs: LayerCosts) -> Plan | None:
        """Return the plan of least predicted time with these costs; None where none fits."""
        predictor = self.predictor.with_costs(costs)
        try:
            space = feasible_space(self.workload, Solver(predictor, self.limits(self.memory_limit_bytes)), remedy="")
        except NoFeasiblePlan:
            return None
        return min(space.starts, key=predictor.epoch_seconds, default=None)

    @cached_property
    def machine(self) -> Machine:
        return Machine(
            layer_works(self.vision, self.language),
            self.devices,
            self.epochs,
            self.predictor,
            device=drawn_device(self.seed),
            network=drawn_network(self.seed),
            dials=drawn_dials(1.0, self.seed),
            seed=self.seed,
        )


def main() -> None:
    found = list[dict[str, Any]]()
    for name, devices, gigabytes in product(MODELS, DEVICES, GIGABYTES):
        for fused in (True, False)[: 1 + (name == LARGEST)]:
            found.append(_row(_tight(name, devices, gigabytes, fused=fused)))
            show(found[-1])
    gains = [row for row in found if "gain" in row]
    counted = [
        row[way]["counted_of_limit"]
        for row in gains
        for way in ("selective", "without")
        if "counted_of_limit" in row[way]
    ]
    target = [row["gain"] for row in gains if row["case"].startswith("6B + 20B, 16 devices of 40 GB")]
    finish(
        [{"costs": LABEL}, *found],
        [
            at_least("6B + 20B on 16 devices of 40 GB, epoch of the best plan without over that with", target, BAR),
            at_least("epoch of the best plan without over that with", [row["gain"] for row in gains], 1 - 1e-3),
            at_most("most bytes counted by event, over the limit", counted, 1.0),
        ],
    )


def _tight(name: str, devices: int, gigabytes: int, *, fused: bool) -> Tight:
    vision, language = MODELS[name]
    return Tight(
        name=f"{name}, {devices} devices of {gigabytes} GB, {'fused' if fused else 'plain'}",
        vision=vision,
        language=language,
        tensor=1,
        data=DATA,
        devices=devices,
        room=1.0,
        seed=0,
        memory=gigabytes * 10**9,
        fused=fused,
    )


def _row(job: Tight) -> dict[str, Any]:
    selective = job.best(job.costs)
    if selective is None:
        return {"case": job.name, "fits": False}
    # Where nothing is recomputed, the costs of recomputation change nothing.
    is_free = not any(map(_frees, selective.stages))
    usual, free = (
        selective if is_free else job.best(costs) for costs in (without_selective(job.costs), _free(job.costs))
    )
    found = [_described(job, plan) for plan in (selective, usual) if plan is not None]
    if usual is None or free is None:
        return {"case": job.name, "fits": False, "selective": found[0]}
    gains = {
        name: found[1][key] / found[0][key]
        for name, key in (("gain", "seconds"), ("machine_gain", "machine_seconds"))
        if all(key in each for each in found)
    }
    bound = job.predictor.with_costs(_free(job.costs)).epoch_seconds(free)
    return {
        "case": job.name,
        **gains,
        "bound_gain": found[1]["seconds"] / bound,
        "selective": found[0],
        "without": found[1],
    }


def _frees(stage: Stage) -> bool:
    return any(level.whole(tower) or level.selective(tower) for level in stage.recomputed for tower in TOWERS)


def _free(costs: LayerCosts) -> LayerCosts:
    """Return the costs of layers whose recomputation takes no time."""
    layers = tuple((kind, replace(cost, recompute_seconds=NOTHING)) for kind, cost in costs.layers)
    return without_selective(replace(costs, layers=layers))


def _described(job: Tight, plan: Plan) -> dict[str, Any]:
    described: dict[str, Any] = {
        "layout": layout_name(plan.layout),
        "capacities": (plan.packing.qv, plan.packing.qt) if isinstance(plan.packing, Packed) else None,
        "stages": _stages(plan),
        "seconds": job.predictor.epoch_seconds(plan),
        "of_limit": max(job.predictor.predict(plan).stage_bytes) / job.memory_limit_bytes,
    }
    if plan.layout.zero != 1 or plan.layout.tensor > 1 or plan.packing.degrees != (1,):
        return described  # the machine has none of these
    counted = most_of_epoch(job.costs, plan, job.epochs(plan.packing, plan.layout.data))
    return described | {
        "machine_seconds": job.machine.epoch_seconds(plan),
        "counted_of_limit": max(counted) / job.memory_limit_bytes,
    }


def _stages(plan: Plan) -> str:
    """Return the vision + language layers of each stage: of those, recomputed as a whole, and selectively."""
    return " ".join(
        f"{each.vision}+{each.language}({each.recompute_vision}+{each.recompute_language}; "
        f"{each.selective_vision}+{each.selective_language})"
        for each in plan.stages
    )


if __name__ == "__main__":
    main()
