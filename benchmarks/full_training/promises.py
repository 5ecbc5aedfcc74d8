"""Speed of long trainings of three families, compared with what `autotune tune` promised, and their waits for data."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.full_training.following import (
    Ended,
    autotune,
    machine_seconds,
    run,
    spread,
    training_samples_per_second,
    wait_share,
)
from benchmarks.full_training.jobs import write_job
from benchmarks.full_training.photos import FAMILIES, make_data

BATCH = 8
WORKERS = 1
"""Processes of each rank that decode images ahead in the short trainings."""
_DROPPED = 1
"""The first step is a warm-up, which autotune leaves out, too."""


def promises(
    folder: Path, steps: int, short_steps: int, search: Mapping[str, Any], families: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the families: a search, then `steps` steps with its winner, all on one epoch of photos.

    The job has the defaults of CPU ranks, which decode images themselves. Then `short_steps` with processes that decode
    ahead, with the same plan, whose waits are those of a machine with free cores.
    """
    data = make_data(folder / "data", steps * BATCH)
    for name in families:
        FAMILIES[name](folder / name / "model")
        yield {"family": name, **_promise(folder / name, data, short_steps, search)}


def _promise(folder: Path, data: Path, short_steps: int, search: Mapping[str, Any]) -> dict[str, Any]:
    usual, ahead = (
        write_job(
            folder / kind / "job.yaml",
            folder / "model",
            data,
            data=settings,
            training={"global_batch_samples": BATCH},
            search=search,
        )
        for kind, settings in (("usual", {}), ("ahead", {"workers": WORKERS}))
    )
    machine = [machine_seconds()]
    tuned = run(autotune("tune", usual, "--json"), folder / "tune")
    machine.append(machine_seconds())
    trained = _launch(usual)
    machine.append(machine_seconds())
    short = _launch(ahead, "--plan", tuned.document["id"], "--steps", str(short_steps))
    promised = float(tuned.document["estimated_samples_per_second"])
    measured = training_samples_per_second(trained.steps, _DROPPED)
    return {
        "plan": tuned.document["plan"],
        "trials_seconds": tuned.seconds,
        "promised_samples_per_second": promised,
        "promised_error": tuned.document["estimated_samples_per_second_error"],
        "training_samples_per_second": measured,
        "measured_over_promised": measured / promised,
        # Both speeds on a machine that takes as long for a fixed computation; a rough correction of its drift.
        "measured_over_promised_at_one_speed": measured
        / promised
        * (machine[1] + machine[2])
        / (machine[0] + machine[1]),
        "stated_by_launch": {
            key: trained.document[key] for key in ("training_samples_per_second", "promised_samples_per_second")
        },
        "steps": len(trained.steps),
        "samples": sum(step.line["samples"] for step in trained.steps),
        "step_seconds": spread([step.line["seconds"] for step in trained.steps[_DROPPED:]]),
        "step_samples": spread([step.line["samples"] for step in trained.steps[_DROPPED:]]),
        "wait_share": wait_share(trained.steps, _DROPPED),
        "wait_share_ahead": wait_share(short.steps, _DROPPED),
        "training_samples_per_second_ahead": training_samples_per_second(short.steps, _DROPPED),
        "machine_seconds": dict(zip(("before the search", "after it", "after the training"), machine, strict=True)),
        "disturbing_cores": {"search": tuned.disturbing_cores, "training": trained.disturbing_cores},
    }


def _launch(job: Path, *options: str) -> Ended:
    progress = job.parent / "output" / "progress.jsonl"
    return run(autotune("launch", job, "--json", *options), job.parent / "launch", progress)
