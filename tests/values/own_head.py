"""Tiny models with an output projection of their own, whose configurations do not say so, as many are published."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

_TIES = "tie_word_embeddings"


def make_untied(make: Callable[[Path], None], folder: Path) -> None:
    """Make a model of a family whose configuration ties both matrices by default, with weights that are not tied.

    PaddleOCR-VL has the settings of its language model at the top level, with a false that transformers passes over.
    """
    make(folder)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = config.text_config.tie_word_embeddings = False
    with torch.random.fork_rng():
        torch.manual_seed(5)
        AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    del settings[_TIES], settings["text_config"][_TIES]
    if settings["model_type"] == "paddleocr_vl":
        settings = {_TIES: False, **settings.pop("text_config"), **settings}
    (folder / "config.json").write_text(json.dumps(settings))
