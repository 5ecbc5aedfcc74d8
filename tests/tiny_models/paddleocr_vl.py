"""PaddleOCR-VL: a square of 3 x 3 learned positions of patches, and squares of four patches that are merged."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

_MARKS = {"vision_start_token_id": "<|IMAGE_START|>", "vision_end_token_id": "<|IMAGE_END|>"}


def make(folder: Path) -> None:
    size = {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 40}
    save(
        folder,
        config=_config,
        images=PaddleOCRVLImageProcessorPil(patch_size=7, merge_size=2, size=size),
        special={"image_token": "<|IMAGE_PLACEHOLDER|>"},
        tokens=(*_MARKS.values(), "<|video_pad|>"),
        chat=CHATML.replace("SHOWN", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    return {
        "model_type": "paddleocr_vl",
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "image_size": 21, "patch_size": 7,
            # As published: transformers reads neither, and the image processor makes patches of one frame.
            "temporal_patch_size": 2, "tokens_per_second": 2,
        },
        "text_config": {**TEXT, "head_dim": 8, "vocab_size": len(ids), "rope_parameters": rope},
        "image_token_id": ids["<|IMAGE_PLACEHOLDER|>"],
        "video_token_id": ids["<|video_pad|>"],
        **{name: ids[token] for name, token in _MARKS.items()},
    }  # fmt: skip
