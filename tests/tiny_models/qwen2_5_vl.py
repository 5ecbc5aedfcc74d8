"""Qwen2.5-VL: windows of 2 x 2 merged patches in all vision layers but one."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers import Qwen2VLImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

SPECIAL = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
CHAT = CHATML.replace("SHOWN", "<|vision_start|><|image_pad|><|vision_end|>").replace(
    "FILMED", "<|vision_start|><|video_pad|><|vision_end|>"
)
VIDEOS = {
    "patch_size": 7, "merge_size": 2, "size": {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 12}, "fps": 2,
    "max_frames": 12, "do_sample_frames": True,
}  # fmt: skip
"""Settings of a video processor; Qwen3-VL's counts `size` for all frames together."""


def make(folder: Path) -> None:
    save_patched(folder, _config)


def save_patched(folder: Path, config: Callable[[Mapping[str, int]], Mapping[str, Any]]) -> None:
    """Write a model whose images are patches of 7 x 7 pixels, merged by 2 x 2; see `save`."""
    images = Qwen2VLImageProcessorPil(
        patch_size=7, merge_size=2, size={"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 40}
    )
    save(folder, config=config, images=images, special=SPECIAL, chat=CHAT, videos=VIDEOS)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    vision = {
        "depth": 4, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 7, "window_size": 28,
        "out_hidden_size": TEXT["hidden_size"], "fullatt_block_indexes": [2],
    }  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
        "text_config": {**TEXT, "vocab_size": len(ids), "rope_parameters": rope},
        **patch_tokens(ids),
    }


def patch_tokens(ids: Mapping[str, int]) -> dict[str, int]:
    """The ids of the tokens around images, as the configurations of Qwen's models name them."""
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }
