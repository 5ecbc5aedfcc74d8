"""Job files of the benchmark, and the example in two parts."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

_GENERATE = Path(__file__).parents[2] / "examples" / "tiny-internvl" / "generate.py"


def make_example(folder: Path, samples: int, held_out: int = 0) -> tuple[Path, Path, Path]:
    """Make the example in `folder`; return its model, and the annotation files of training and held-out samples."""
    count = str(samples + held_out)
    generate = [sys.executable, str(_GENERATE), "--folder", str(folder), "--samples", count]
    subprocess.run(generate, check=True, stdout=sys.stderr)
    data = folder / "data"
    lines = (data / "train.jsonl").read_text().splitlines(keepends=True)
    training, rest = data / "training.jsonl", data / "held-out.jsonl"
    training.write_text("".join(lines[:samples]))
    rest.write_text("".join(lines[samples:]))
    return folder / "model", training, rest


def write_job(file: Path, model: Path, data: Path, /, **changes: Mapping[str, Any]) -> Path:
    """Write a job for two ranks with the folder `output` next to it; `changes` are added to its sections."""
    document: dict[str, dict[str, Any]] = {
        "model": {"path": str(model), "weights": "random", "dtype": "float32"},
        "data": {"sources": [{"path": str(data)}]},
        "hardware": {"devices": 2, "memory_limit": "200MiB"},
        "training": {"global_batch_samples": 16, "learning_rate": 1e-3, "output": str(file.parent / "output")},
        "search": {"trials": 8, "time_limit": "60s"},
    }
    for section, values in changes.items():
        document[section] |= values
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(document))
    return file
