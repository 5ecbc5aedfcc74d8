"""Simulated workloads for searches: models, data, devices and memory, and machines that differ from their profile."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

import numpy as np

from autotune.dimensions.usual import layouts
from autotune.prediction.features import COSTS, scaled
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import HEADROOM, Limits
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from autotune.workload import Prepared
from benchmarks.cases.solver import (
    INTERN_LM2_2B,
    INTERN_LM2_7B,
    INTERN_LM2_20B,
    INTERN_VIT_6B,
    INTERN_VIT_300M,
    lengths,
)
from benchmarks.machines.analytic import A100, LanguageShape, VisionShape, analytic_costs
from benchmarks.packing import WEIGHTS
from tests.machines.simulated import Behaviour, SimulatedLauncher
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex, profile
from trials.job import DataSection, Job, ModelSection, SearchSection, Source, TrainingSection
from trials.plan import Packing, Padded, Plan
from trials.workload import Hardware, ModelShape, Software, Workload

_MODELS = {
    "300M + 2B": (INTERN_VIT_300M, INTERN_LM2_2B, 1),
    "300M + 7B": (INTERN_VIT_300M, INTERN_LM2_7B, 1),
    "6B + 20B": (INTERN_VIT_6B, INTERN_LM2_20B, 8),
}
_DATA = ("tiles up to 5", "text and tiles", "many tiles", "single tiles", "long text")
_DEVICES = (2, 4, 8, 16)
_ROOMS = (0.1, 0.4, 0.9)
"""Memory between what the leanest plan needs (0) and what the same needs with nothing recomputed (1)."""
_SAMPLES_PER_DEVICE = 16
_LEAST_SAMPLES, _STEPS = 500, 8
_LIKELY_STAGES = 4
_USUAL_WIDTH, _BYTE_WIDTH = 0.08, 0.03
"""By which the machine's layers take longer or less, and keep more or less, than the profile says."""
NOISY = Behaviour(noise=0.015, drift=0.02, plan_width=0.002, start_seconds=5.0)


@dataclass(frozen=True, kw_only=True)
class SimulatedWorkload:
    """A job on a machine that only calculates."""

    name: str
    vision: VisionShape
    language: LanguageShape
    tensor: int
    """Tensor degree, folded into the costs of the layers."""
    data: str
    devices: int
    room: float
    seed: int
    growth: float = 1.0
    """Of data and batch."""
    memory: int | None = None
    """Bytes of each rank; by `room` when absent."""
    wrong: tuple[float, ...] | None = None
    """Factors of COSTS, and of kept bytes, by which the machine differs from the profile; drawn when absent."""

    @cached_property
    def index(self) -> DatasetIndex:
        seed = len(self.name) + (self.growth != 1.0)
        return lengths(self.data, seed, round(self.growth * max(_LEAST_SAMPLES, _STEPS * self.batch)))

    @property
    def batch(self) -> int:
        return round(self.growth * _SAMPLES_PER_DEVICE * self.devices)

    def epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        return build_epoch(
            self.index,
            packing,
            EpochSettings(global_batch_samples=self.batch, weights=WEIGHTS),
            data_parallel=data_parallel,
        )

    @cached_property
    def costs(self) -> LayerCosts:
        """Costs as the profile gives them."""
        return analytic_costs(self.vision, self.language, A100, self.tensor)

    @cached_property
    def predictor(self) -> Predictor:
        return Predictor(self.costs, self.epoch, 2)

    @cached_property
    def truth(self) -> Predictor:
        """Predictor with the machine's own costs."""
        random = np.random.default_rng(self.seed)
        drawn = np.exp(random.normal(0, [*[_USUAL_WIDTH] * len(COSTS), _BYTE_WIDTH]))
        *times, kept = drawn.tolist() if self.wrong is None else self.wrong
        return self.predictor.with_costs(scaled(self.costs, times), (1.0, kept))

    @cached_property
    def memory_limit_bytes(self) -> int:
        """Limit that leaves the machine the room of this workload."""
        if self.memory is not None:
            return self.memory
        layout = next(
            layout
            for layout in layouts(self.shape, self.devices)
            if layout.pipeline == min(self.devices, _LIKELY_STAGES)
        )
        packing = Padded(samples=2)
        roomy = Solver(self.truth, self.limits(1 << 60))
        kept = roomy.solve(packing, layout)
        assert kept is not None
        least, most = roomy.least_bytes(packing, layout), max(self.truth.predict(kept).stage_bytes)
        return round((least + self.room * max(most - least, 0)) / HEADROOM)

    def limits(self, memory_limit_bytes: int) -> Limits:
        return Limits(
            vision_layers=self.vision.layers,
            language_layers=self.language.layers,
            memory_limit_bytes=memory_limit_bytes,
        )

    @property
    def shape(self) -> ModelShape:
        return ModelShape(
            name=self.name,
            family="internvl",
            dtype="bfloat16",
            vision_layers=self.vision.layers,
            language_layers=self.language.layers,
            parameters=0,
            unit_flops=WEIGHTS.unit,
            token_flops=WEIGHTS.token,
            square_flops=WEIGHTS.square,
            config_digest=self.name,
            target_flops=WEIGHTS.target,
        )

    @cached_property
    def workload(self) -> Workload:
        return Workload(
            model=self.shape,
            data=profile(self.index),
            hardware=Hardware(
                accelerator="simulated",
                device_name=A100.name,
                devices=self.devices,
                device_memory_bytes=80 << 30,
                compute_capability=None,
                driver=None,
                cpu_name="",
                cpu_cores=1,
                ram_bytes=1,
            ),
            software=Software(python="", torch="", deepspeed="", transformers=""),
            oversize="own-pack",
            global_batch_samples=self.batch,
            memory_limit_bytes=self.memory_limit_bytes,
        )

    def prepared(self, **search: object) -> Prepared:
        job = Job(
            model=ModelSection(path=self.name),
            data=DataSection(sources=(Source(path=Path("lengths")),)),
            training=TrainingSection(global_batch_samples=self.batch),
            search=SearchSection.model_validate({"time_limit": "300000h", **search}),
        )
        return Prepared(
            job=job, workload=self.workload, index=self.index, index_file=Path("index.npz"), weights=WEIGHTS
        )

    def space(self, predictor: Predictor) -> Space:
        return feasible_space(self.workload, Solver(predictor, self.limits(self.memory_limit_bytes)), remedy="")

    def launcher(self, behaviour: Behaviour, seed: int) -> SimulatedLauncher:
        return SimulatedLauncher(self.truth, behaviour, seed)

    @cached_property
    def best_seconds(self) -> float:
        """Seconds of the fastest plan that fits, by the machine's own costs: the solver's best, and then neighbours."""
        launcher, space = self.launcher(NOISY, seed=0), self.space(self.truth)
        fits = [plan for plan in space.starts if self.fits(plan)]
        ordered = sorted(fits, key=launcher.epoch_seconds)
        best, looked_at = ordered[:_AROUND], set[Plan]()
        while around := [plan for plan in best if plan not in looked_at]:
            looked_at |= {*around}
            found = {*best, *(other for plan in around for other in space.neighbours(plan) if self.fits(other))}
            best = sorted(found, key=lambda plan: (launcher.epoch_seconds(plan), plan.id))[:_AROUND]
        return launcher.epoch_seconds(best[0])

    def fits(self, plan: Plan) -> bool:
        sizes = self.truth.sizes(plan.packing, plan.layout)
        stages = self.truth.stage_memory(plan, sizes)
        return max(stage.expected for stage in stages) <= self.memory_limit_bytes


_AROUND = 4


def workloads(count: int) -> Iterator[SimulatedWorkload]:
    """Yield `count` workloads that differ in all: a fixed random choice of models x data x devices x memory."""
    grid = list(product(_MODELS.items(), _DATA, _DEVICES, _ROOMS))
    for seed, number in enumerate(np.random.default_rng(0).permutation(len(grid))[:count]):
        (model, (vision, language, tensor)), data, devices, room = grid[number]
        yield SimulatedWorkload(
            name=f"{model}, {data}, {devices} devices, room {room:.0%}",
            vision=vision,
            language=language,
            tensor=tensor,
            data=data,
            devices=devices,
            room=room,
            seed=seed,
        )
