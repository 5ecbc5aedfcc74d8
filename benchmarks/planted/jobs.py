"""Jobs with one planted cause of lost time each, and the same jobs without it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np

from autotune.workload import Prepared
from benchmarks.planted.machine import Machine, Speeds
from tests.values.data import index_of
from trials.data.epoch import CostWeights
from trials.data.index import profile
from trials.job import DataSection, Job, ModelSection, SearchSection, Source, TrainingSection
from trials.workload import Hardware, ModelShape, Software, Workload

Rows: TypeAlias = Sequence[tuple[int, int]]
"""(vision units, text tokens) of samples."""
_UNITS, _TOKENS = 4, 160
_UNIT_SECONDS = 1e-3
_LAYERS = 8
_STEPS = 8


def _equal(count: int, random: np.random.Generator) -> Rows:
    del random
    return [(_UNITS, _TOKENS)] * count


def _some_long(count: int, random: np.random.Generator) -> Rows:
    """Draw samples of which some have a long text, and the others a short one."""
    return [(_UNITS, 1280 if each else 32) for each in random.random(count) < 0.35]


def _long_alike(count: int, random: np.random.Generator) -> Rows:
    """Draw samples with as many tokens as `_some_long` has, evenly."""
    del random
    return [(_UNITS, round(0.35 * 1280 + 0.65 * 32))] * count


def _some_films(count: int, random: np.random.Generator) -> Rows:
    """Give all images to a tenth of the samples; packs differ in units, which are not padded."""
    return [(10 * _UNITS if each else 0, _TOKENS) for each in random.random(count) < 0.1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedJob:
    """A job on a machine."""

    rows: Callable[[int, np.random.Generator], Rows] = _equal
    vision_layers: int = _LAYERS
    language_layers: int = _LAYERS
    devices: int = 4
    batch: int = 128
    speeds: Speeds = field(default_factory=lambda: Speeds(unit=_UNIT_SECONDS, token=_UNIT_SECONDS * _UNITS / _TOKENS))

    def prepared(self, seed: int = 0) -> Prepared:
        index = index_of(self.rows(_STEPS * self.batch, np.random.default_rng(seed)))
        weights = CostWeights(unit=self.speeds.unit, token=self.speeds.token, square=0.0)
        model = ModelShape(
            name="planted",
            family="internvl",
            dtype="float32",
            vision_layers=self.vision_layers,
            language_layers=self.language_layers,
            parameters=0,
            unit_flops=weights.unit,
            token_flops=weights.token,
            square_flops=weights.square,
            config_digest="planted",
        )
        hardware = Hardware(
            accelerator="simulated",
            device_name="another form",
            devices=self.devices,
            device_memory_bytes=80 << 30,
            compute_capability=None,
            driver=None,
            cpu_name="",
            cpu_cores=1,
            ram_bytes=1,
        )
        workload = Workload(
            model=model,
            data=profile(index),
            hardware=hardware,
            software=Software(python="", torch="", deepspeed="", transformers=""),
            oversize="own-pack",
            global_batch_samples=self.batch,
            memory_limit_bytes=80 << 30,
        )
        job = Job(
            model=ModelSection(path="planted"),
            data=DataSection(sources=(Source(path=Path("lengths")),), workers=0),
            training=TrainingSection(global_batch_samples=self.batch),
            search=SearchSection.model_validate({"time_limit": "300000h", "trials": 8, "timed_steps": 4}),
        )
        return Prepared(job=job, workload=workload, index=index, index_file=Path("index.npz"), weights=weights)

    def machine(self, seed: int = 0) -> Machine:
        return Machine(self.prepared(seed), self.speeds, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """A cause, planted in a job."""

    cause: str
    """A part of the time of an epoch."""
    job: PlantedJob
    without: PlantedJob
    """The same job without the cause."""


_EVEN = PlantedJob()


def _changed(**speeds: float) -> PlantedJob:
    return replace(_EVEN, speeds=replace(_EVEN.speeds, **speeds))


_MOSTLY_TEXT = replace(_EVEN, vision_layers=2, language_layers=14, rows=_long_alike)
_TWO_COPIES = replace(_EVEN, devices=8)
PLANTED = (
    Planted(cause="padding", job=replace(_MOSTLY_TEXT, rows=_some_long), without=_MOSTLY_TEXT),
    Planted(cause="data_imbalance", job=replace(_TWO_COPIES, rows=_some_films), without=_TWO_COPIES),
    Planted(
        cause="stage_imbalance",
        job=_changed(unit=1.8 * _UNIT_SECONDS, token=0.2 * _EVEN.speeds.token),
        without=_EVEN,
    ),
    Planted(cause="bubble", job=replace(_EVEN, batch=8), without=_EVEN),
    Planted(cause="recompute", job=_EVEN, without=_EVEN),
    Planted(cause="communication", job=_changed(byte=3e-7), without=_EVEN),
    Planted(cause="loading", job=_changed(read=4e-4), without=_EVEN),
)
"""Nothing is planted for recomputation: the usual settings recompute everything though the memory is ample."""
