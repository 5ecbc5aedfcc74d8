"""PaliGemma 2: images of 16 tokens, windows of four in every other layer of Gemma 2, and a template for many turns."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import SiglipImageProcessorPil
from transformers.models.paligemma.processing_paligemma import EXTRA_TOKENS

from tests.tiny_models import TEXT, save
from tests.tiny_models.text import KINDS
from tests.tiny_models.tiles.llava import SIGLIP, SPECIAL

_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{ eos_token if message['role'] == 'assistant' else '\\n' }}{% endfor %}"
)


def make(folder: Path) -> None:
    make_kind(folder, "gemma2")


def make_kind(folder: Path, kind: str, **settings: Any) -> None:
    """Write a model with a language model of a kind, with further settings of that."""

    def config(ids: Mapping[str, int]) -> Mapping[str, Any]:
        text = {**TEXT, "head_dim": 16, **KINDS.get(kind, {}), **settings}
        return {
            "model_type": "paligemma",
            "vision_config": {**SIGLIP, "image_size": 28, "num_hidden_layers": 3, "vision_use_head": False},
            "text_config": {**text, "model_type": kind, "vocab_size": len(ids)},
            "projection_dim": 32,
            "image_token_index": ids["<image>"],
        }

    images = SiglipImageProcessorPil(size={"height": 28, "width": 28}, image_seq_length=16)
    save(folder, config=config, images=images, special=SPECIAL, tokens=("<bos>", *EXTRA_TOKENS), chat=_CHAT)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": "<bos>"}))
