"""One training that is killed at random steps and continued each time, compared with undisturbed ones."""

import json
import math
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.full_training.following import CommandFailed, Step, autotune, run, watched
from benchmarks.full_training.jobs import make_example, write_job

KINDS = ("a rank", "the launcher", "all")
CHECKPOINT_EVERY = 3
LEFT_SECONDS = 15.0
_MARK = "AUTOTUNE_BENCHMARK_MARK"
_STEPS_PER_KILL = 4
_LAYERS = {"vision_config": 4, "text_config": 2}
_SAMPLES, _BATCH = 160, 8
_LAST_STEPS = 8
"""Steps after the last kill, so that no training ends before it is killed."""
_LATEST_SECONDS = 0.1
"""Longest delay of a kill after its step, so that kills hit every part of a step, and checkpoints."""
Losses = Mapping[int, float]


def killed(folder: Path, count: int, search: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row for the undisturbed trainings, one for each kill, and one for the end of the killed training."""
    model, data, _ = make_example(folder / "example", _SAMPLES)
    _make_shallow(model)
    steps = _STEPS_PER_KILL * count + _LAST_STEPS
    jobs = {name: _job(folder / name, model, data, steps, search) for name in ("whole", "again", "killed")}
    tuned = run(autotune("tune", jobs["whole"], "--json"), folder / "tune")
    for name in ("whole", "again"):
        run(_launch(jobs[name], tuned.document["id"]), folder / name, _progress(jobs[name]))
    expected, again = (losses(_progress(jobs[name])) for name in ("whole", "again"))
    yield {"part": "undisturbed", "steps": len(expected), "plan": tuned.document["plan"], **difference(expected, again)}
    drawn = random.Random(0)
    job = jobs["killed"]
    for number in range(count):
        done = _checkpointed(job)
        share = (steps - _LAST_STEPS - done) / (count - number + 1)
        target = min(done + drawn.randint(1, max(1, round(2 * share))), steps - _LAST_STEPS)
        kind = KINDS[number % len(KINDS)]
        row = _kill(job, tuned.document["id"], target, kind, drawn)
        yield {"part": "kill", "kind": kind, "target": target, **row, **difference(expected, losses(_progress(job)))}
    run(_launch(job, tuned.document["id"]), folder / "killed", _progress(job))
    found = losses(_progress(job))
    yield {"part": "end", "steps": len(found), **difference(expected, found)}


def losses(progress: Path) -> Losses:
    """Return the loss of each step of a progress file, without a line that a kill cut off."""
    found = {}
    for line in progress.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            document = json.loads(line)
            found[document["step"]] = document["loss"]
    return found


def difference(expected: Losses, found: Losses) -> dict[str, Any]:
    """Return how many of the found losses equal the expected ones, and the largest relative difference."""
    relative = [abs(loss / expected[step] - 1) for step, loss in found.items()]
    return {
        "losses": len(relative),
        "equal": sum(each == 0 for each in relative),
        "difference": float(np.max(relative, initial=0.0)),  # NaN for a loss that is NaN, which `max` may pass over
    }


def _launch(job: Path, plan: str) -> list[str | Path]:
    return autotune("launch", job, "--plan", plan, "--json")


def _progress(job: Path) -> Path:
    return job.parent / "output" / "progress.jsonl"


def _checkpointed(job: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    found = (job.parent / "output").glob("checkpoint-*")
    return max((int(each.name.rpartition("-")[2]) for each in found), default=0)


def _make_shallow(model: Path) -> None:
    """Reduce the layers of the example's model."""
    config = json.loads((model / "config.json").read_text())
    for part, layers in _LAYERS.items():
        config[part]["num_hidden_layers"] = layers
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][: _LAYERS["text_config"]]
    (model / "config.json").write_text(json.dumps(config))


def _job(folder: Path, model: Path, data: Path, steps: int, search: Mapping[str, Any]) -> Path:
    training = {"global_batch_samples": _BATCH, "max_steps": steps, "checkpoint_every": CHECKPOINT_EVERY}
    epochs = math.ceil(1.2 * steps * _BATCH / _SAMPLES)  # a plan may need fewer steps for an epoch
    return write_job(
        folder / "job.yaml", model, data, data={"workers": 1}, training={**training, "epochs": epochs}, search=search
    )


# --- kills ---


def _kill(job: Path, plan: str, target: int, kind: str, drawn: random.Random) -> dict[str, Any]:
    """Run a launch, and kill it after its step `target`."""
    mark = f"{os.getpid()}-{drawn.getrandbits(64):x}"
    struck: list[float] = []

    def look(process: subprocess.Popen[bytes], steps: Sequence[Step]) -> None:
        if not struck and steps and steps[-1].line["step"] >= target:
            time.sleep(drawn.uniform(0, _LATEST_SECONDS))
            struck.append(time.perf_counter())
            for each in _victims(psutil.Process(process.pid), kind, drawn):
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        if struck and time.perf_counter() - struck[0] > LEFT_SECONDS and process.poll() is None:
            process.kill()  # counted as left: it was there for too long

    ended = watched(_launch(job, plan), job.parent, _progress(job), {_MARK: mark}, look)
    if not struck:
        raise CommandFailed(f"the launch ended before step {target} with exit code {ended.code}")
    left = _left_after(mark, struck[0])
    return {"code": ended.code, "steps": len(ended.steps), **left}


def _victims(launcher: psutil.Process, kind: str, drawn: random.Random) -> list[psutil.Process]:
    family = launcher.children(recursive=True)
    match kind:
        case "a rank":
            return [drawn.choice(sorted((each for each in family if _is_rank(each)), key=lambda each: each.pid))]
        case "the launcher":
            return [launcher]
        case _:
            return [launcher, *family]


def _is_rank(process: psutil.Process) -> bool:
    """Return whether it is a rank, and not a process that decodes images for one."""
    with suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return process.name().startswith("rank ") and not (parent and parent.name().startswith("rank "))
    return False


def _left_after(mark: str, struck: float) -> dict[str, Any]:
    """Wait until no process with this mark in its environment is left; end those that stay too long."""
    while marked := _marked(mark):
        if time.perf_counter() - struck > LEFT_SECONDS:
            break
        time.sleep(0.1)
    seconds = time.perf_counter() - struck
    names = [each.name() for each in marked]
    for each in marked:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGKILL)
    return {"seconds_to_end": seconds, "left": names}


def _marked(mark: str) -> list[psutil.Process]:
    """Return the processes with this mark, which every process inherits from its parent."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
