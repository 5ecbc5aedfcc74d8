"""Plans that are compared on an excerpt of their epoch, and on the whole epoch, by analytic costs: nothing is measured.

A part of `python -m benchmarks.first_trial`. Samples are random, and those of a folder of recorded lengths.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from autotune.prediction.predictor import Predictor
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from benchmarks.cases.layouts import Cut
from benchmarks.cases.solver import INTERN_LM2_7B, INTERN_LM2_20B, INTERN_VIT_6B, INTERN_VIT_300M, lengths
from benchmarks.output.result import Check, at_most, show
from benchmarks.packing import load
from trials.data.index import DatasetIndex
from trials.plan import Plan
from trials.workload import Workload

_MODELS = {"6B + 20B": (INTERN_VIT_6B, INTERN_LM2_20B), "300M + 7B": (INTERN_VIT_300M, INTERN_LM2_7B)}
_RECORDED = "recorded"
_CASES = (
    ("6B + 20B", _RECORDED, 8),
    ("300M + 7B", _RECORDED, 32),
    ("6B + 20B", _RECORDED, 64),
    ("6B + 20B", "tiles up to 5", 8),
    ("300M + 7B", "many tiles", 8),
    ("6B + 20B", "many tiles", 32),
    ("300M + 7B", "tiles up to 5", 64),
    ("6B + 20B", "tiles up to 5", 128),
)
_SAMPLES = 60_000
"""Random ones."""
_OF_NODE = 8
_EACH = 7
"""One of this number of solved plans is compared."""
_NEARLY = 1.2
_NEAR = 1.1
"""Times of plans up to this factor of the best are compared apart: slower ones wait for a few heavy packs."""
SLOWER, UNLIKE = 0.01, 0.01


@dataclass(frozen=True, kw_only=True)
class LongWorkload(Cut):
    """A simulated workload on nodes of 8 devices, with any number of samples in an epoch."""

    tensor: int = 1
    data: str = "tiles up to 5"
    room: float = 0.4
    seed: int = 0
    samples_of_epoch: int | None = None
    folder: Path | None = None
    """Recorded lengths, in place of random ones."""

    @override
    @cached_property
    def index(self) -> DatasetIndex:
        if self.folder is not None:
            return load(self.folder)
        return super().index if self.samples_of_epoch is None else lengths(self.data, self.seed, self.samples_of_epoch)

    @override
    @cached_property
    def workload(self) -> Workload:
        found = super().workload
        return replace(found, hardware=replace(found.hardware, nodes=-(-self.devices // _OF_NODE)))


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each case; `folder` has the recorded lengths."""
    for model, data, devices in _CASES:
        began = time.monotonic()
        yield _row(model, data, devices, folder)
        show(f"{model}, {data}, {devices} devices: {time.monotonic() - began:.0f} s")


def checks(found: Sequence[dict[str, Any]]) -> list[Check]:
    return [
        at_most("slower than the plan of the whole epoch", [row["slower"] for row in found], SLOWER),
        at_most(
            "standard deviation of predicted times of the best plans",
            [row["seconds_deviation_of_the_best"] for row in found],
            UNLIKE,
        ),
        at_most("peak of the chosen plan over the memory limit", [row["peak_share"] for row in found], 1.0),
    ]


def _row(model: str, data: str, devices: int, folder: Path) -> dict[str, Any]:
    vision, language = _MODELS[model]
    usual = LongWorkload(name="excerpt", vision=vision, language=language, devices=devices, seed=5)
    limit = usual.memory_limit_bytes  # of a short epoch
    random = {"data": data, "samples_of_epoch": _SAMPLES}
    workload = replace(usual, memory=limit, **({"folder": folder} if data == _RECORDED else random))
    prepared = workload.prepared(trials=12)
    excerpt = CalibratedPredictor.of_job(
        prepared.job, prepared.index, prepared.weights, costs=workload.costs, element_bytes=2
    )
    whole = CalibratedPredictor(Predictor(workload.costs, prepared.epoch, 2))  # `excerpt.base` keeps few epochs

    def chosen(predictor: CalibratedPredictor) -> tuple[Plan, tuple[Plan, ...], float]:
        """Return the plan that is tried first, solved plans, and the CPU seconds."""
        start = time.process_time()
        space = workload.space(predictor.profiled)
        advisor = Advisor(space, predictor, workload.limits(limit), prepared.job.search)
        plan = next(advisor.predicted(_NEARLY))
        return plan, space.starts[::_EACH], time.process_time() - start

    plan, some, seconds = chosen(excerpt)
    other, _, of_whole = chosen(whole)
    of_whole_epochs = np.array(whole.plans_epoch_seconds(some))
    ratios = np.array(excerpt.plans_epoch_seconds(some)) / of_whole_epochs
    near = ratios[of_whole_epochs <= _NEAR * of_whole_epochs.min()]
    peaks = [
        max(stage.expected for stage in part) / max(stage.expected for stage in all_of_it)
        for part, all_of_it in zip(excerpt.plans_memory(some), whole.plans_memory(some), strict=True)
    ]
    return {
        "model": model,
        "data": data,
        "devices": devices,
        "samples": len(prepared.index),
        "compared_samples": len(excerpt.profiled.sizes(plan.packing, plan.layout).epoch.index),
        "slower": whole.epoch_seconds(plan) / whole.epoch_seconds(other) - 1,
        "seconds_ratio": float(ratios.mean()),
        "seconds_deviation": float(ratios.std()),
        "seconds_deviation_of_the_best": float(near.std()),
        "least_peak_ratio": min(peaks),
        "peak_share": max(excerpt.predict(plan).stage_bytes) / limit,
        "cpu_seconds": {"excerpt": seconds, "whole": of_whole},
    }
