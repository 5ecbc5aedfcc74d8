"""Jobs on generated data, with a model of any size."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from autotune.workload import Prepared, prepare
from benchmarks.devices.target import Model, Target
from benchmarks.prediction import EXAMPLE
from trials.job import Job


def make_example(folder: Path, target: Target) -> Path:
    """Generate the example's model and data in `folder`."""
    command = [sys.executable, str(EXAMPLE / "generate.py"), "--folder", str(folder), "--samples", str(target.samples)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return folder


def with_model(example: Path, model: Model, name: str) -> Path:
    """Copy the example's model, with other sizes, and return its folder."""
    folder = Path(shutil.copytree(example / "model", example / name))
    layers, hidden, mlp, heads = model.vision

    def change(settings: dict[str, Any]) -> None:
        settings["vision_config"] |= {
            "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": mlp, "num_attention_heads": heads,
            "image_size": [model.tile, model.tile], "patch_size": [model.patch, model.patch],
        }  # fmt: skip
        count, width, inner, of_text = model.language
        text = settings["text_config"]
        text |= {
            "num_hidden_layers": count, "hidden_size": width, "intermediate_size": inner,
            "num_attention_heads": of_text, "num_key_value_heads": model.kv_heads,
            "vocab_size": model.vocabulary or text["vocab_size"], "layer_types": [text["layer_types"][0]] * count,
        }  # fmt: skip
        settings["image_seq_length"] = (model.tile // model.patch // 2) ** 2

    _rewrite(folder / "config.json", change)
    size = {"height": model.tile, "width": model.tile}
    _rewrite(folder / "preprocessor_config.json", lambda settings: settings.update(size=size))
    return folder


def _rewrite(path: Path, change: Any) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))


def job_of(example: Path, model: Path, target: Target, devices: int, dtype: str) -> Job:
    """Return a job of the model on the example's data."""
    return Job.model_validate(
        {
            "model": {"path": str(model), "weights": "random", "dtype": dtype},
            "data": {"sources": [{"path": str(example / "data" / "train.jsonl")}]},
            "hardware": {"devices": devices} | ({"memory_limit": "2GiB"} if target.pretended else {}),
            "training": {
                "global_batch_samples": target.batch,
                "output": str(example / f"trained-{model.name}-{devices}"),
                "max_steps": 8,
            },
            "search": {"trials": target.trials, "time_limit": target.time_limit, "timed_steps": target.timed_steps},
        }
    )


def prepared_of(example: Path, model: Path, target: Target, devices: int, dtype: str) -> Prepared:
    """Return the prepared job."""
    job = job_of(example, model, target, devices, dtype)
    return prepare(job, example / f"work-{model.name}-{devices}-{dtype}")
