"""Speed of trainings with the plans that `autotune recommend` gives from a profile, on one and on two ranks."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from autotune.machine.hardware import probe_hardware
from benchmarks.full_training.following import autotune, run, training_samples_per_second
from benchmarks.full_training.jobs import write_job
from benchmarks.full_training.photos import FAMILIES, make_data

BATCH = 8
_DEVICES = (1, 2)
_DROPPED = 2


def recommended(folder: Path, steps: int, families: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the families and numbers of ranks: the predicted and the measured samples per second.

    Layers are profiled on two ranks with a core each. A recommendation is for ranks of as many cores, so a single rank
    trains on one core.
    """
    data = make_data(folder / "data", steps * BATCH)
    for name in families:
        model = folder / name / "model"
        FAMILIES[name](model)
        settings = {"global_batch_samples": BATCH}
        job = write_job(folder / name / "job.yaml", model, data, hardware={"memory_limit": None}, training=settings)
        profiled = run(autotune("profile", job), folder / name / "profile")
        wanted = [word for devices in _DEVICES for word in ("--devices", str(devices))]
        given = ["--set", f"training.global_batch_samples={BATCH}", "--set", "model.dtype=float32"]
        command = autotune(
            "recommend", model, data, "--device", probe_hardware().device_name, *wanted, *given, "--json"
        )
        found = run(command, folder / name / "recommend")
        for choice in found.document["choices"]:
            measured = _measured(job, choice, folder / name)
            yield {
                "family": name,
                "devices": choice["devices"],
                "profile_seconds": profiled.seconds,
                "recommend_seconds": found.seconds,
                "origin": choice["origin"],
                "stated_error": choice["relative_error"],
                "predicted": choice["predicted_samples_per_second"],
                "measured": measured,
                "measured_over_predicted": measured / choice["predicted_samples_per_second"],
            }


def _measured(job: Path, choice: dict[str, Any], folder: Path) -> float:
    devices = choice["devices"]
    plan = folder / f"plan {devices}.json"
    plan.write_text(json.dumps(choice["plan"]))
    output = folder / f"output {devices}"
    settings = [f"hardware.devices={devices}", f"training.output={output}"]
    words = autotune("launch", job, "--plan", plan, *(word for each in settings for word in ("--set", each)))
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:devices]))
    ended = run(["taskset", "-c", cores, *words], folder / f"launch {devices}", output / "progress.jsonl")
    return training_samples_per_second(ended.steps, _DROPPED)
