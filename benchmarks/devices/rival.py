"""Tuned trainings on one device, and the plain packed loop on the same device in the same minutes."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from autotune.job_file import load_job
from autotune.workload import prepare
from benchmarks.devices.flops import flops_of_sample
from benchmarks.devices.target import RivalCase, Target
from benchmarks.full_training.following import (
    CommandFailed,
    Ended,
    Step,
    autotune,
    run,
    watched,
)
from benchmarks.full_training.jobs import write_job

_DROPPED = 4
"""Steps at the start of a training that do not count."""
_PACKS = (1, 2, 3, 4)
"""Packs of a step for which the loop's lengths are swept."""
TUNED = "tuned"


def rows(target: Target, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield, for each case, what was tuned and swept, each training, and the ratios of their speeds."""
    for case in target.rivals:
        yield from ({"case": case.name, **row} for row in _case(target, case, folder / case.name.replace(" ", "-")))


def _case(target: Target, case: RivalCase, folder: Path) -> Iterator[dict[str, Any]]:
    model, data = case.make(folder, target.samples)
    on_device = target.accelerator == "cuda"
    job = write_job(
        folder / "job.yaml",
        model,
        data,
        model={"dtype": "bfloat16"},
        hardware={"devices": 1, "memory_limit": case.limit},
        training={"global_batch_samples": case.batch, "learning_rate": 1e-5},
        search={"trials": case.trials, "time_limit": case.time_limit, "timed_steps": target.timed_steps},
    )
    prepared = prepare(load_job(job), folder / "work")
    flops = flops_of_sample(prepared)
    tokens = float(prepared.index.text_tokens.mean())
    tuned = run(autotune("tune", job, "--json"), folder / "tune").document
    yield {"row": "tuned", "flops": flops, "tokens": tokens, "plan": tuned["plan"]}
    swept: dict[str, Mapping[str, Any]] = {}
    for precision in ("bfloat16", "autocast") if on_device else ("float32",):
        settings = {
            "model": str(model),
            "data": str(data),
            "precision": precision,
            "device": target.accelerator,
            "workers": target.workers,
            "global_batch": case.batch,
            "learning_rate": 1e-5,
            "memory_limit": prepared.workload.memory_limit_bytes,
        }
        lengths = [int(case.batch * tokens / packs) for packs in _PACKS]
        found = _sweep(settings | {"lengths": lengths}, folder / f"sweep-{precision}")
        swept[precision] = settings | {"lengths": [found["length"]], "recomputed": found["recomputed"]}
        yield {"row": "swept", "precision": precision, **found}
    speeds: dict[str, list[float]] = {}
    for number in range(target.rounds_of_rival):
        for side in (*swept, TUNED):
            place = folder / f"{side}-{number}"
            if side == TUNED:
                output = place / "output"
                words = autotune("launch", job, "--plan", tuned["id"], "--set", f"training.output={output}")
                ended = _some_steps(words, place, output / "progress.jsonl", target.steps)
            else:
                ended = _loop({**swept[side], "progress": str(place / "progress.jsonl")}, place, target.steps)
            timed = ended.steps[_DROPPED:]
            # Steps have different numbers of samples, but a token is about as much work in all.
            speed = sum(step.line["text_tokens"] for step in timed) / (
                timed[-1].arrived - ended.steps[_DROPPED - 1].arrived
            )
            speeds.setdefault(side, []).append(speed)
            achieved = speed / tokens * flops / target.peak_flops if target.peak_flops else None
            yield {
                "row": "training",
                "side": side,
                "tokens_per_second": speed,
                "samples_per_second": speed / tokens,
                "flop_utilisation": achieved,
                "last": ended.steps[-1].line,
            }
    middle = {side: statistics.median(found) for side, found in speeds.items()}
    fastest = max(middle[side] for side in swept)
    yield {"row": "ratios", "limited": case.limit is not None, "over_loop": middle[TUNED] / fastest, "speeds": middle}


def _sweep(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    ended = _loop({**settings, "progress": str(folder / "progress.jsonl")}, folder, 1)
    found: dict[str, Any] = json.loads(
        next(line for line in ended.printed.splitlines() if line.startswith('{"length"'))
    )
    return found


def _loop(settings: Mapping[str, Any], folder: Path, steps: int) -> Ended:
    folder.mkdir(parents=True)
    (folder / "runs.json").write_text(json.dumps([settings]))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    words: list[str | Path] = [*launcher, "-m", "benchmarks.references.packed_loop", folder / "runs.json"]
    environment = {
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),  # torchrun would give it one
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # as autotune's ranks have
    }
    return _some_steps(words, folder, Path(settings["progress"]), steps, environment)


def _some_steps(
    words: Sequence[str | Path],
    folder: Path,
    progress: Path,
    count: int,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run a training until it has made `count` steps. It is killed then: what it would save takes longer."""

    def look(process: subprocess.Popen[bytes], steps: Sequence[Step]) -> None:
        if len(steps) >= count:
            _kill(process)

    ended = watched(words, folder, progress, environment, look)
    if len(ended.steps) < count:
        log = (folder / "stderr.log").read_text()[-2000:]
        raise CommandFailed(f"{' '.join(map(str, words))} made {len(ended.steps)} of {count} steps:\n{log}")
    return ended


def _kill(process: subprocess.Popen[bytes]) -> None:
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family[:-1], timeout=30)
