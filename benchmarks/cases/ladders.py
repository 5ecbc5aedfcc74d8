"""Levels of packs on samples of mixed lengths, and on samples of like lengths, by analytic costs: nothing is measured.

A part of `python -m benchmarks.parallel`. Of each model, data and number of devices the plan that a search predicts to
be fastest is compared with HBP's recipe, and with packs of one level as long as the longest sample (ISF).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from typing_extensions import override

from autotune.events import Event, TrialEnded
from autotune.prediction.analytic import A100, analytic_costs
from autotune.search.hbp import hbp_plan
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from benchmarks.cases.solver import INTERN_LM2_2B, INTERN_LM2_7B, INTERN_VIT_300M
from benchmarks.cases.workloads import SimulatedWorkload
from benchmarks.output.result import Check, at_least, at_most, show
from benchmarks.packing import index_of
from benchmarks.search import search
from trials import wire
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.metrics import balance, dist_ratios, step_sums
from trials.layer_costs import LayerCosts
from trials.plan import Levelled, Packed, Packing, Plan

MODELS = {"300M + 2B": (INTERN_VIT_300M, INTERN_LM2_2B), "300M + 7B": (INTERN_VIT_300M, INTERN_LM2_7B)}
DEVICES = (8, 16, 32)
DEGREES = (2, 4, 8)
"""Of ranks in one node."""
MEMORY = 74 << 30
LONG, TIMES = 0.1, (8, 16)
"""Share of the long samples, and the range of their lengths as multiples of a short one's."""
DOCUMENTS = 0.005
"""Share of long documents. HBP reports that packs with 17.3 % of the tokens are shared."""
STEPS = 6
ABR, COMMUNICATION, DIST, OF_ISF, OF_HBP = 0.002, 0.17, 0.002, 1.4, 1.05
MOST_LOST = 1
_TILE_TOKENS = 256
_NEARLY = 1.05
"""Of pipeline degrees within this factor of the best, the search's climbs to better plans are followed."""


def generated(samples: int, random: np.random.Generator) -> DatasetIndex:
    """Generate samples of up to 5 tiles and about 400 tokens of text, and a tenth that is 8 to 16 times as long."""
    times = np.where(random.random(samples) < LONG, random.integers(TIMES[0], TIMES[1] + 1, samples), 1)
    units = times * random.choice([0, 1, 3, 5], size=samples, p=[0.15, 0.25, 0.15, 0.45])
    text = np.minimum(random.lognormal(np.log(300), 0.8, samples), 1500).astype(np.int64)
    return index_of(units, units * _TILE_TOKENS + times * (text + 1))


def like_hbp(samples: int, random: np.random.Generator) -> DatasetIndex:
    """Generate text alone: short answers, and documents of 16K to 128K tokens that have about 17 % of all tokens."""
    short = np.minimum(random.lognormal(np.log(600), 1.0, samples), 32_000)
    long = np.minimum(random.lognormal(np.log(32_000), 0.6, samples), 128_000).clip(16_000)
    tokens = np.where(random.random(samples) < DOCUMENTS, long, short).astype(np.int64) + 1
    return index_of(np.zeros(samples, dtype=np.int64), tokens)


DATA = {"generated": (generated, 32), "like HBP's": (like_hbp, 64)}
"""Samples, and how many of them each device has in a step."""


@dataclass(frozen=True, kw_only=True)
class Mixed(SimulatedWorkload):
    """A simulated workload whose packs ranks may share."""

    matched: bool = True
    """Whether packs of like cost make up rows; else any packs."""

    @override
    @cached_property
    def index(self) -> DatasetIndex:
        if self.data not in DATA:
            return super().index
        samples, _ = DATA[self.data]
        return samples(STEPS * self.batch, np.random.default_rng(0))

    @override
    @property
    def batch(self) -> int:
        return DATA[self.data][1] * self.devices if self.data in DATA else super().batch

    @override
    @cached_property
    def costs(self) -> LayerCosts:
        degrees = [degree for degree in DEGREES if self.devices % degree == 0 and not self.language.heads % degree]
        return analytic_costs(self.vision, self.language, A100, self.tensor, degrees)

    @cached_property
    def weights(self) -> CostWeights:
        """Seconds of a forward pass of this model."""
        layers = {"vision_embedding": 1, "vision": self.vision.layers, "projector": 1, "head": 1}
        costs = [
            (self.costs[kind], {**layers, "language": self.language.layers}[kind]) for kind, _ in self.costs.layers
        ]
        unit, token, square, _ = np.sum([count * np.array(cost.forward_seconds) for cost, count in costs], axis=0)
        return CostWeights(unit=float(unit), token=float(token), square=float(square))

    @override
    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        return build_epoch(
            self.index,
            packing,
            EpochSettings(global_batch_samples=self.batch, weights=self.weights),
            data_parallel=data_parallel,
            window_rows=None if self.matched else 1,
        )


def rows() -> Iterator[dict[str, Any]]:
    for model, data, devices in product(MODELS, DATA, DEVICES):
        began = time.monotonic()
        row = _row(_workload(model, data, devices, MEMORY))
        show(f"{row['case']}: {time.monotonic() - began:.0f} s")
        yield row
    for room in (0.1, 0.4, 0.9):
        yield _lost(room)


def _workload(model: str, data: str, devices: int, memory: int | None, room: float = 0.9) -> Mixed:
    vision, language = MODELS[model]
    return Mixed(
        name=f"{model}, {data}, {devices} devices",
        vision=vision,
        language=language,
        tensor=1,
        data=data,
        devices=devices,
        room=room,
        seed=1,
        memory=memory,
    )


def _row(workload: Mixed) -> dict[str, Any]:
    predictor, limits = workload.predictor, workload.limits(workload.memory_limit_bytes)
    solver, space = Solver(predictor, limits), workload.space(predictor)
    settings = workload.prepared().job.search
    predicted = Advisor(space, CalibratedPredictor(predictor), limits, settings).predicted(_NEARLY)
    found = min((*predicted, *space.starts), key=predictor.epoch_seconds)
    single = min(
        (plan for plan in space.starts if plan.packing.degrees == (1,)), key=predictor.epoch_seconds, default=None
    )
    hbp = hbp_plan(workload.workload, predictor, solver)
    isf = _isf(solver, hbp) if hbp else None
    return {
        "case": workload.name,
        "found": _described(workload, found),
        "one level on single ranks": single and _described(workload, single),
        "HBP's recipe": hbp and _described(workload, hbp),
        "ISF": isf and _described(workload, isf),
        "speed_over_isf": _ratio(workload, isf, found),
        "speed_over_unmatched_isf": _ratio(workload, isf, found, replace(workload, matched=False)),
        "speed_over_hbp": _ratio(workload, hbp, found),
        "speed_over_single_ranks": _ratio(workload, single, found),
    }


def _isf(solver: Solver, hbp: Plan) -> Plan | None:
    """Return packs as long as the longest sample, in the layout and with the degree of HBP's last level."""
    last = hbp.packing.levels[-1] if isinstance(hbp.packing, Levelled) else hbp.packing
    assert isinstance(last, Packed)
    return solver.fit_fewest(last, hbp.layout, solver.forward_boundaries(last, hbp.layout))


def _ratio(workload: Mixed, slower: Plan | None, plan: Plan, other: Mixed | None = None) -> float | None:
    """Return how many times as fast a plan is as another one, which runs on the `other` workload where it is given."""
    if slower is None:
        return None
    return (other or workload).predictor.epoch_seconds(slower) / workload.predictor.epoch_seconds(plan)


def _described(workload: Mixed, plan: Plan) -> dict[str, Any]:
    prediction = workload.predictor.predict(plan)
    epoch = workload.predictor.sizes(plan.packing, plan.layout).epoch
    found = balance(epoch, workload.weights)
    tokens = epoch.pack_sizes().tokens
    squares = (epoch.pack_sizes().squares / epoch.degrees)[epoch.assignment]
    return {
        "plan": wire.to_document(plan),
        "epoch_seconds": prediction.epoch_seconds,
        "batch_deviation": prediction.batch_deviation,
        "attention_balance_ratio": found.attention_balance_ratio,
        "attention_balance_ratio_of_steps": float(dist_ratios(step_sums(epoch, squares)).mean()),
        "dist_ratio_language": found.dist_ratio_language,
        "dist_ratio_vision": found.dist_ratio_vision if workload.workload.data.vision_units else 0.0,
        "communication_ratio": float(tokens[epoch.degrees > 1].sum() / tokens.sum()),
        "shares": {name: seconds / prediction.epoch_seconds for name, seconds in prediction.breakdown.totals.items()},
    }


def _lost(room: float) -> dict[str, Any]:
    """Return a search on samples of like lengths on 4 ranks, and how many trials it spent on levels or shared packs."""
    workload, heard, said = _workload("300M + 2B", "tiles up to 5", 4, None, room), list[Event](), list[str]()
    found = search(workload, 24, heard=heard.append)
    solver = Solver(workload.predictor, workload.limits(workload.memory_limit_bytes))
    feasible_space(workload.workload, solver, remedy="", show=said.append)
    ran = [event.trial.plan for event in heard if isinstance(event, TrialEnded) and not event.is_known]
    return {
        "case": f"samples of like lengths on 4 ranks, room {room:.0%}",
        "said": said,
        "trials": len(ran),
        "trials_of_levels_or_shared_packs": sum(plan.packing.degrees != (1,) for plan in ran),
        "winner": wire.to_document(found.plan),
    }


def checks(found: list[dict[str, Any]]) -> list[Check]:
    mixed, alike = ([row for row in found if ("found" in row) is is_mixed] for is_mixed in (True, False))
    plans = [row["found"] for row in mixed]
    return [
        at_most("attention balance ratio", [plan["attention_balance_ratio"] for plan in plans], ABR),
        at_most("communication ratio", [plan["communication_ratio"] for plan in plans], COMMUNICATION),
        at_most("dist ratio of text tokens", [plan["dist_ratio_language"] for plan in plans], DIST),
        at_least("speed over ISF with one level", [row["speed_over_unmatched_isf"] or 0.0 for row in mixed], OF_ISF),
        at_least("speed over HBP's recipe", [row["speed_over_hbp"] or 0.0 for row in mixed], OF_HBP),
        at_most(
            "trials lost where levels cannot help",
            [row["trials_of_levels_or_shared_packs"] for row in alike],
            MOST_LOST,
        ),
    ]
