"""Held-out losses of a training with packs, next to those of random order: the same weights, seeds and batch."""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.full_training.following import autotune, run
from benchmarks.full_training.jobs import make_example, write_job
from trials import wire
from trials.plan import Layout, Packed, Packing, Padded, Plan
from trials.stage import Stage

BATCH = 16
EVALUATIONS = 10
_LAYERS = (12, 8)
"""Vision and language layers of the example."""
KINDS: Mapping[str, Packing] = {
    "packs": Packed(qv=6, qt=448, qv_min=6, qt_min=320, packer="best-fit"),
    "random order": Padded(samples=4),
}
"""A mean step of packs has 16.0 samples: with more of them, losses by step would be those of a longer training."""


def neutral(folder: Path, *, steps: int, samples: int, held_out: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield a row with the held-out losses of each training, then their differences by step."""
    model, training, held = make_example(folder / "example", samples, held_out)
    rows = []
    for seed in range(seeds):
        for kind, packing in KINDS.items():
            place = folder / f"{kind.split()[0]}-{seed}"
            job = _job(place, model, training, held, steps=steps, seed=seed)
            rows.append({"part": "training", "kind": kind, "seed": seed} | _trained(place, job, packing))
            yield rows[-1]
    yield {"part": "summary", **summary(rows)}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the difference of the mean held-out losses of both kinds at each step, and the spread over seeds.

    The spread is the mean range over the seeds of a kind. Seeds differ in the first weights and in the order.
    """
    steps = [*rows[0]["losses"]]
    by_step: dict[str, list[list[float]]] = {
        kind: [[row["losses"][step] for row in rows if row["kind"] == kind] for step in steps] for kind in KINDS
    }
    packs, order = (by_step[kind] for kind in KINDS)
    differences = [statistics.fmean(one) - statistics.fmean(other) for one, other in zip(packs, order, strict=True)]
    spreads = [
        statistics.fmean((max(one) - min(one), max(other) - min(other)))
        for one, other in zip(packs, order, strict=True)
    ]
    return {
        "steps": steps,
        "losses": by_step,
        "differences": differences,
        "spreads": spreads,
        "largest_share_of_spread": float(np.max(np.abs(differences) / spreads)),
    }


def _job(place: Path, model: Path, training: Path, held: Path, *, steps: int, seed: int) -> Path:
    job = write_job(
        place / "job.yaml",
        model,
        training,
        hardware={"memory_limit": "2GiB"},
        training={"global_batch_samples": BATCH, "seed": seed, "max_steps": steps, "epochs": steps},
    )
    every = max(1, steps // EVALUATIONS)
    job.write_text(job.read_text() + f"evaluation: {{sources: [{{path: {held}}}], every: {every}}}\n")
    return job


def _trained(place: Path, job: Path, packing: Packing) -> dict[str, Any]:
    vision, language = _LAYERS
    layout, stage = Layout(pipeline=1, data=2, zero=0), Stage(vision=vision, language=language)
    file = place / "plan.json"
    file.write_text(wire.encode(Plan(packing=packing, layout=layout, stages=(stage,))))
    ended = run(autotune("launch", job, "--plan", file, "--json"), place / "launch")
    lines = [json.loads(line) for line in (place / "output" / "progress.jsonl").read_text().splitlines()]
    return {
        "losses": {str(line["step"]): line["evaluation_loss"] for line in lines if "evaluation_loss" in line},
        "samples": [line["samples"] for line in lines if "evaluation_loss" not in line],
        "seconds": ended.seconds,
    }
