"""Simulated workloads of samples of mixed lengths, generated and in a distribution like HBP's, with analytic costs."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from typing_extensions import override

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.solver.solver import Solver
from benchmarks.cases.lengths import index_of
from benchmarks.cases.workloads import SimulatedWorkload
from benchmarks.machines.analytic import A100, analytic_costs
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.plan import Packing, Plan

SAMPLES = 1_000_000
"""About as many as Tulu 3 has, HBP's short samples."""
MEMORY = 74 << 30
DEGREES = (2, 4, 8)
"""Of ranks in one node."""
LONG, TIMES = 0.1, (8, 16)
"""Share of the long samples, and the range of their lengths as multiples of a short one's."""
DOCUMENTS = 0.005
"""Share of long documents. HBP reports that packs with 17.3 % of the tokens are shared."""
EXCHANGES = 6
"""Seconds of exchanges in packs as published, as a multiple of what data sheets give (docs/benchmarks/parallel.md)."""
_TILE_TOKENS = 256


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


@lru_cache(maxsize=len(DATA))
def _index(data: str) -> DatasetIndex:
    samples, _ = DATA[data]
    return samples(SAMPLES, np.random.default_rng(0))


@dataclass(frozen=True, kw_only=True)
class Mixed(SimulatedWorkload):
    """A simulated workload whose packs ranks may share."""

    matched: bool = True
    """Whether packs of like cost make up rows; else any packs."""
    published: bool = False
    """Whether plans run as HBP's did: with its exchanges, and ZeRO 3, whose own exchanges take no time."""

    @override
    @cached_property
    def index(self) -> DatasetIndex:
        return _index(self.data) if self.data in DATA else super().index

    @override
    @property
    def batch(self) -> int:
        return DATA[self.data][1] * self.devices if self.data in DATA else super().batch

    @override
    @cached_property
    def costs(self) -> LayerCosts:
        degrees = [degree for degree in DEGREES if self.devices % degree == 0 and not self.language.heads % degree]
        costs = analytic_costs(self.vision, self.language, A100, self.tensor, degrees)
        if not self.published:
            return costs
        slower = (each.times(EXCHANGES if each.name == "sequence" else 1) for each in costs.exchanges)
        hidden = Exchange.of_bytes("scatter", self.devices, 0.0, 0.0)  # behind computation, as are gathers
        return replace(costs, exchanges=(*slower, hidden))

    @cached_property
    def weights(self) -> CostWeights:
        """Seconds of a forward pass of this model."""
        layers = {"vision_embedding": 1, "vision": self.vision.layers, "projector": 1, "head": 1}
        costs = [
            (self.costs[kind], {**layers, "language": self.language.layers}[kind]) for kind, _ in self.costs.layers
        ]
        unit, token, square, _ = np.sum([count * np.array(cost.forward_seconds) for cost, count in costs], axis=0)
        target = self.costs["head"].forward_seconds[1]
        return CostWeights(unit=float(unit), token=float(token) - target, square=float(square), target=target)

    @override
    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        return self.epoch_of(self.index, packing, data_parallel)

    def epoch_of(self, index: DatasetIndex, packing: Packing, data_parallel: int) -> Epoch:
        """Return the epoch of these samples."""
        # Packs without cost are alike, so that rows are random.
        weights = self.weights if self.matched else CostWeights(unit=0.0, token=0.0, square=0.0)
        settings = EpochSettings(global_batch_samples=self.batch, weights=weights)
        return build_epoch(index, packing, settings, data_parallel=data_parallel)

    @cached_property
    def calibrated(self) -> CalibratedPredictor:
        """Predictor of a search, which compares plans on an excerpt of the samples."""
        job = self.prepared().job
        return CalibratedPredictor.of_job(job, self.index, self.weights, costs=self.costs, element_bytes=2)

    @cached_property
    def solver(self) -> Solver:
        return Solver(self.calibrated.profiled, self.limits(self.memory_limit_bytes))

    def may_fit(self, plan: Plan) -> bool:
        """Return whether a search would not reject the plan, by the heaviest packs of all samples."""
        memory = self.predictor.plans_memory([plan])[0]
        return self.limits(self.memory_limit_bytes).first_above(memory) is None
