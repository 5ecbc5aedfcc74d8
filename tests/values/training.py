"""Jobs on the example's data, and plans for its model of 12 vision and 8 language layers."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autotune.workload import Prepared, prepare
from trials.job import Job
from trials.plan import Layout, Offload, Packed, Packing, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.stage import TOWERS, Stage
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training

PACKED = Packed(qv=10, qt=500, qv_min=10, qt_min=400)


def job_of(example: Path, output: Path, **changes: dict[str, Any]) -> Job:
    """A small job; `changes` are added to its sections."""
    document: dict[str, dict[str, Any]] = {
        "model": {"path": str(example / "model"), "weights": "random", "dtype": "float32"},
        "data": {"sources": [{"path": str(example / "data" / "train.jsonl")}]},
        "hardware": {"devices": 2, "memory_limit": "2GiB"},
        "training": {"global_batch_samples": 8, "learning_rate": 1e-3, "output": str(output)},
        "search": {"trials": 8, "time_limit": "60s", "timed_steps": 2},
    }
    for section, values in changes.items():
        document[section] = {**document.get(section, {}), **values}
    return Job.model_validate(document)


def variant_of(example: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return the example with a changed configuration of its model."""
    shutil.copytree(example / "model", folder / "model")
    (folder / "data").symlink_to(example / "data")
    file = folder / "model" / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return folder


def prepared_of(example: Path, folder: Path, **changes: dict[str, Any]) -> Prepared:
    """Return the prepared job, with its files in `folder`."""
    return prepare(job_of(example, folder / "output", **changes), folder)


def stage(text: str) -> Stage:
    """`10+2r4,1s6,0g5`: 10 + 2 layers, of which 4 + 1 are recomputed, 6 + 0 selectively, and 5 gathered once."""
    found = re.fullmatch(r"(\d+)\+(\d+)(?:r(\d+),(\d+))?(?:s(\d+),(\d+))?(?:g(\d+))?", text)
    assert found, text
    freed = (f"{how}_{tower}" for how in ("recompute", "selective") for tower in TOWERS)
    counts = ("vision", "language", *freed, "gathered_once")
    values: dict[str, Any] = {name: int(count or 0) for name, count in zip(counts, found.groups(), strict=True)}
    return Stage(**values)


def plan_of(
    *stages: str, data: int = 1, tensor: int = 1, zero: ZeroStage = 0, within: int = 1, packing: Packing = PACKED
) -> Plan:
    """A plan whose pipeline has these stages."""
    layout = Layout(pipeline=len(stages), data=data, tensor=tensor, zero=zero, reduce_within=within)
    return Plan(packing=packing, layout=layout, stages=tuple(stage(text) for text in stages))


def offloading(plan: Plan, offload: Offload) -> Plan:
    """The plan, with layers of these kinds that offload what they would recompute."""
    return replace(plan, layout=replace(plan.layout, offload=offload))


def train(pool: WarmPool, prepared: Prepared, plan: Plan, max_steps: int | None = None) -> TrainingReport:
    """Train on warm ranks, and return the report of rank 0."""
    task = Training(output=prepared.job.training.output, max_steps=max_steps)
    answer = pool.ask(prepared.request(plan, task), 180)
    assert isinstance(answer, Answers), answer
    report = answer.reports[0]
    assert isinstance(report, TrainingReport)
    return report
