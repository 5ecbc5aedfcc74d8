"""The example's model in any size."""

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prediction import EXAMPLE


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Sizes of an InternVL model: layers, width, width of the feed-forward part, and heads."""

    vision: tuple[int, int, int, int]
    language: tuple[int, int, int, int]
    kv_heads: int
    vocabulary: int | None = None
    """None for that of the tokenizer."""
    tile: int = 448
    """Pixels in a row."""
    patch: int = 14


def make_example(folder: Path, samples: int) -> Path:
    """Generate the example's model and data in `folder`."""
    command = [sys.executable, str(EXAMPLE / "generate.py"), "--folder", str(folder), "--samples", str(samples)]
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

    rewrite(folder / "config.json", change)
    size = {"height": model.tile, "width": model.tile}
    rewrite(folder / "preprocessor_config.json", lambda settings: settings.update(size=size))
    return folder


def rewrite(path: Path, change: Any) -> None:
    settings = json.loads(path.read_text())
    change(settings)
    path.write_text(json.dumps(settings))
