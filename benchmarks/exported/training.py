"""A plan trained by ms-swift's own trainer on CPU ranks, compared with `autotune launch` with the same plan.

Both start from the same weights of a tiny Qwen2.5-VL. The plan has padded micro-batches, as ms-swift packs with
FlashAttention alone, which no CPU has.
"""

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from benchmarks.cases.pages import save_model
from benchmarks.exported.published import number_as_published, write_conversations
from benchmarks.full_training.following import autotune, run
from benchmarks.full_training.jobs import write_job
from benchmarks.full_training.rival import drawn
from benchmarks.full_training.turns import Command, Timed, in_turns
from benchmarks.output.result import Check, at_most, show
from trials import wire
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage

_RANKS, _BATCH, _STEPS, _SAMPLES = 2, 8, 10, 100
_BAR = 1e-3
_LAYERS = (6, 6)
"""Vision and language layers."""
_VISION = {
    "depth": _LAYERS[0], "hidden_size": 128, "num_heads": 4, "intermediate_size": 384, "out_hidden_size": 128,
    "fullatt_block_indexes": [2, 5],
}  # fmt: skip
_TEXT = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": _LAYERS[1], "tie_word_embeddings": True}
_NAME = "Qwen2.5-VL-3B-Instruct"
"""A published name, by which ms-swift goes."""
_PLAN = Plan(
    packing=Padded(samples=2),
    layout=Layout(pipeline=1, data=_RANKS, zero=0),
    stages=(Stage(vision=_LAYERS[0], language=_LAYERS[1]),),
)
_ON_CPU: Mapping[str, Any] = {
    "tuner_type": "full",
    "use_cpu": True,
    "ddp_backend": "gloo",
    "attn_impl": "sdpa",
    "logging_steps": 1,
    "report_to": "none",
    "add_version": False,
}
"""What a user gives to ms-swift besides the export: ranks on CPUs, and a line of progress for each step."""
_VERSIONS = "from importlib.metadata import version; print(*map(version, ('ms-swift', 'transformers', 'torch')))"


def training_row(python: Path) -> dict[str, Any]:
    """Train with the ms-swift in an environment, and return the losses of each step, the speeds and the price."""
    with TemporaryDirectory() as name:
        return {"part": "training", "versions": _versions(python), **trained(python, Path(name))}


def trained(python: Path, folder: Path) -> dict[str, Any]:
    """Do so in a folder, in which all files stay."""
    job = _job(folder)
    homes = {f"XDG_{home}_HOME": str(folder / "homes" / home) for home in ("DATA", "CACHE", "STATE")}

    def ask(command: str, *options: str | Path) -> Any:
        show(f"training: autotune {command}")
        return run(autotune(command, job, *options, "--json"), folder / command, environment=homes).document

    ask("profile")
    best = ask("predict")["plans"][0]
    plans = {"best": json.dumps(best["plan"]), "padded": wire.encode(_PLAN)}
    for plan, text in plans.items():
        (folder / f"{plan}.json").write_text(text)
    (folder / "present.yaml").write_text(yaml.safe_dump(dict(_ON_CPU)))
    given = ("--plan", folder / "padded.json", "--from", folder / "present.yaml", "--trainer-python", python)
    exported = ask("export", "--to", "ms-swift", *given, "--out", folder / "exported")
    show("training: autotune launch and ms-swift in turns")
    timed = in_turns(
        {
            "ms-swift": _ms_swift(python, exported, folder / "ms-swift"),
            "launch": _launch(job, folder / "padded.json", folder / "launch"),
            "launch of the best plan": _launch(job, folder / "best.json", folder / "launch-best"),
        }
    )
    return row_of(best, exported, timed)


def training_checks(row: Mapping[str, Any]) -> list[Check]:
    name = "relative difference of a step's loss in ms-swift and in autotune launch"
    return [at_most(name, [row["largest_difference"]], _BAR)]


def _versions(python: Path) -> dict[str, str]:
    found = subprocess.run((python, "-c", _VERSIONS), capture_output=True, text=True, check=True).stdout.split()
    return dict(zip(("ms-swift", "transformers", "torch"), found, strict=True))


def _job(folder: Path) -> Path:
    source = folder / "configuration"
    save_model(source, _VISION, _TEXT, section=[4, 6, 6], most_patches=64)
    number_as_published(source)
    model = drawn(source, folder / "drawn", 0).rename(folder / _NAME)
    return write_job(
        folder / "job.yaml",
        model,
        write_conversations(folder, _SAMPLES),
        model={"weights": "pretrained"},
        hardware={"memory_limit": "4GiB"},
        training={"global_batch_samples": _BATCH, "max_steps": _STEPS},
        search={"trial_timeout": "30min"},
    )


def _launch(job: Path, plan: Path, folder: Path) -> Command:
    output = folder / "output"
    words = autotune("launch", job, "--plan", plan, "--set", f"training.output={output}")
    # Each has a lock and a database of its own, which let one training at a time use the devices.
    apart = {"XDG_STATE_HOME": str(folder / "state"), "XDG_DATA_HOME": str(folder / "data")}
    return Command(words=words, folder=folder, progress=output / "progress.jsonl", environment=apart)


def _ms_swift(python: Path, exported: Mapping[str, Any], folder: Path) -> Command:
    """Return the command that the export shows, in the environment of ms-swift."""
    where = Path(exported["folder"])
    return Command(
        words=("sh", "-c", f"cd {shlex.quote(str(where))} && {exported['command']}"),
        folder=folder,
        progress=where / "output" / "logging.jsonl",
        environment={
            "PATH": f"{python.absolute().parent}:{os.environ['PATH']}",
            "PYTHONPATH": "",
            "CUDA_VISIBLE_DEVICES": "",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // _RANKS)),  # as autotune's ranks have
        },
    )


def row_of(best: Mapping[str, Any], exported: Mapping[str, Any], timed: Mapping[str, Timed]) -> dict[str, Any]:
    """Return the row of a plan that was predicted best, the document of an export, and what was trained.

    Raise ValueError where both trainings of the exported plan have not the same number of steps.
    """
    lines = {name: [line for line in each.lines if "loss" in line] for name, each in timed.items()}  # of steps
    losses = {name: [line["loss"] for line in lines[name]] for name in ("launch", "ms-swift")}
    samples = [line["samples"] for line in lines["launch"]]  # in both, whose lines are of the same steps
    differences = [abs(theirs / ours - 1) for ours, theirs in zip(*losses.values(), strict=True)]
    speeds = {name: sum(samples[1:]) / sum(timed[name].seconds[: len(samples) - 1]) for name in losses}
    speeds["launch of the best plan"] = timed["launch of the best plan"].samples_per_second
    seconds = exported["price"]["epoch_seconds"]
    return {
        "plan": exported["plan"],
        "best_plan": best["plan"],
        "losses": losses,
        "largest_difference": float(np.max(differences)),
        "samples_per_second": speeds,
        "predicted_samples_per_second": {
            "launch": _SAMPLES / seconds,
            "launch of the best plan": _SAMPLES / best["epoch_seconds"],
        },
        "price": seconds / best["epoch_seconds"],
        "measured_price": speeds["launch of the best plan"] / speeds["launch"],
        "launch_over_ms_swift": speeds["launch"] / speeds["ms-swift"],
    }
