"""The example trained in turns by autotune and by the Trainer of transformers, from the same weights."""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.full_training.following import Ended, autotune, run, spread, training_samples_per_second
from benchmarks.full_training.jobs import make_example, write_job

_TRAINER = Path(__file__).parents[1] / "references" / "hf_trainer.py"
BATCH = 16
_PER_DEVICE = ("1", "2", "4", "8")
_OTHERS: Mapping[str, Mapping[str, Any]] = {
    "nothing recomputed": {"checkpointing": False},
    "grouped by length": {"sampling": "group_by_length"},
}
"""Settings that are measured for information, with the best number of samples per device."""
_DROPPED = 3
"""Steps at the start of each training that do not count."""
_SWEPT_STEPS, _SWEPT_DROPPED = 4, 1


def compare(
    folder: Path, *, samples: int, held_out: int, seeds: int, search: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield rows: the sweep of the Trainer's settings, each training, and the held-out losses with their spread."""
    processor, training, held = make_example(folder / "example", samples, held_out)
    models = [drawn(processor, folder / f"drawn-{seed}", seed) for seed in range(seeds)]
    jobs = [
        write_job(
            folder / f"autotune-{seed}" / "job.yaml",
            model,
            training,
            model={"weights": "pretrained"},
            training={"seed": seed},
            search=search,
        )
        for seed, model in enumerate(models)
    ]
    tuned = run(autotune("tune", jobs[0], "--json"), folder / "tune")
    swept = _sweep(folder / "sweep", models[0], training, {size: {"per_device": int(size)} for size in _PER_DEVICE})
    best = best_batch(swept)
    others = {name: {"per_device": best, **change} for name, change in _OTHERS.items()}
    swept |= _sweep(folder / "others", models[0], training, others)
    yield {"part": "sweep", "per_device": best, "training_samples_per_second": swept, "plan": tuned.document["plan"]}
    rows = []
    for seed, (job, model) in enumerate(zip(jobs, models, strict=True)):
        ours = run(
            autotune("launch", job, "--plan", tuned.document["id"], "--json"),
            job.parent / "launch",
            job.parent / "output" / "progress.jsonl",
        )
        rows.append(_row("autotune", seed, ours, job.parent / "output" / "model"))
        yield rows[-1]
        place = folder / f"trainer-{seed}"
        settings = _settings(model, training, place / "progress.jsonl", seed=seed, per_device=best)
        theirs = _train([settings | {"output": str(place / "model")}], place, place / "progress.jsonl")
        rows.append(_row("trainer", seed, theirs, place / "model"))
        yield rows[-1]
    trained = {"models": [row["model"] for row in rows], "processor": str(processor), "data": str(held)}
    losses = _ask("evaluate", trained, folder / "losses").document
    yield {"part": "summary", **summary(rows, losses)}


def best_batch(swept: Mapping[str, float]) -> int:
    """Return the fastest number of samples of a micro-batch."""
    return int(max(swept, key=lambda size: swept[size]))


def summary(rows: Sequence[Mapping[str, Any]], losses: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Return the gain in speed of each pair of trainings, and the held-out losses.

    Seeds differ in the first weights and the order. The two means may differ by chance as much as trainings of one kind
    do: `loss_spread` is the mean range of the losses of a kind.
    """
    speeds, found = ({kind: _of(rows, kind, name) for kind in ("autotune", "trainer")} for name in ("speed", "model"))
    lost = {kind: [losses[model]["loss"] for model in models] for kind, models in found.items()}
    gains = [ours / theirs for ours, theirs in zip(speeds["autotune"], speeds["trainer"], strict=True)]
    return {
        "gains": gains,
        "gain": statistics.median(gains),
        "losses": lost,
        "loss_difference": statistics.fmean(lost["autotune"]) - statistics.fmean(lost["trainer"]),
        "loss_differences": [ours - theirs for ours, theirs in zip(lost["autotune"], lost["trainer"], strict=True)],
        "loss_spread": statistics.fmean(max(each) - min(each) for each in lost.values()),
        "held_out_targets": next(iter(losses.values()))["targets"],
    }


def _of(rows: Sequence[Mapping[str, Any]], kind: str, name: str) -> list[Any]:
    return [row[name] for row in rows if row["kind"] == kind]


def _row(kind: str, seed: int, ended: Ended, model: Path) -> dict[str, Any]:
    # Both are timed by the arrival of their lines; the times between them include all that a step needs.
    between = [later.arrived - earlier.arrived for earlier, later in pairwise(ended.steps)]
    return {
        "part": "training",
        "kind": kind,
        "seed": seed,
        "speed": training_samples_per_second(ended.steps, _DROPPED),
        "steps": len(ended.steps),
        "samples": sum(step.line["samples"] for step in ended.steps),
        "step_seconds": spread(between[_DROPPED:]),
        "seconds": ended.seconds,
        "disturbing_cores": ended.disturbing_cores,
        "model": str(model),
    }


def drawn(source: Path, folder: Path, seed: int) -> Path:
    """Return a model folder with weights that transformers has drawn."""
    settings = {"source": str(source), "folder": str(folder / "model"), "seed": seed}
    _ask("draw", settings, folder)
    return folder / "model"


# --- the Trainer ---


def _sweep(folder: Path, model: Path, data: Path, variants: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the speed of the Trainer with each of some settings, which run twice: forwards and then backwards."""
    folder.mkdir(parents=True)
    names = [*variants, *reversed(list(variants))]
    files = [folder / f"{number}.jsonl" for number in range(len(names))]
    runs = [
        _settings(model, data, file, max_steps=_SWEPT_STEPS, **variants[name])
        for name, file in zip(names, files, strict=True)
    ]
    _train(runs, folder)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in variants}
    for name, file in zip(names, files, strict=True):
        found[name] += [json.loads(line) for line in file.read_text().splitlines()][_SWEPT_DROPPED:]
    return {
        name: sum(line["samples"] for line in lines) / sum(line["seconds"] for line in lines)
        for name, lines in found.items()
    }


def _settings(model: Path, data: Path, progress: Path, **settings: Any) -> dict[str, Any]:
    return {"model": str(model), "data": str(data), "progress": str(progress), "global_batch": BATCH, **settings}


def _train(runs: Sequence[Mapping[str, Any]], folder: Path, progress: Path | None = None) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.json").write_text(json.dumps(runs))
    threads = max(1, len(os.sched_getaffinity(0)) // 2)  # as autotune's ranks have
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    return run([*launcher, _TRAINER, "train", folder / "runs.json"], folder, progress, environment)


def _ask(task: str, settings: Mapping[str, Any], folder: Path) -> Ended:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    return run([sys.executable, _TRAINER, task, folder / "settings.json"], folder)
