"""LLaVA-1.5: a CLIP tower, the states behind its last layer but one, without the class token."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import CLIPImageProcessorPil

from tests.tiny_models import TEXT, save

CHAT = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %} {% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT: {% endif %}"
)
SPECIAL = {"image_token": "<image>"}
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 28, "patch_size": 7, "projection_dim": 32,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "image_size": 30, "patch_size": 7,
}  # fmt: skip
"""Patches leave two rows of pixels over, as in LLaVA-OneVision (384 and 14)."""


def make(folder: Path) -> None:
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    settings = {"patch_size": 7, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    save(folder, config=_config, images=images, special=SPECIAL, chat=CHAT, settings=settings)


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "llava",
        "vision_config": CLIP,
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(ids)},
        "image_token_index": ids["<image>"],
    }
