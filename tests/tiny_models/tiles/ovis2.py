"""Ovis2: a table of 24 rows, of which 5 are for the marks between up to four tiles, and squares of four patches."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=Ovis2ImageProcessorPil(size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4),
        special={},
        tokens=("<IMG_ATOM>", *MARKS),
        chat=CHATML.replace("SHOWN", "<image>\n"),
        settings={"image_seq_length": 4},
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "ovis2",
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 7, "hidden_stride": 2, "vocab_size": 24,
        },
        "text_config": {**TEXT, "model_type": "qwen2", "vocab_size": len(ids)},
        "image_token_id": ids["<IMG_ATOM>"],
        "visual_indicator_token_ids": [ids[mark] for mark in MARKS],
        "hidden_size": TEXT["hidden_size"],
        "vocab_size": len(ids),
    }  # fmt: skip
