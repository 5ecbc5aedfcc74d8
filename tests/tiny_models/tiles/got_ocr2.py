"""GOT-OCR2: windows of 3 x 3 of the 5 x 5 patches of an image in two layers, and none in the one between them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GotOcr2ImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save


def make(folder: Path) -> None:
    save(
        folder,
        config=_config,
        images=GotOcr2ImageProcessorPil(size={"height": 35, "width": 35}),
        special={},
        tokens=("<img>", "<imgpad>", "</img>"),
        chat=CHATML.replace("SHOWN", "<img><imgpad></img>"),
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "got_ocr2",
        "vision_config": {
            "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "mlp_dim": 48,
            "image_size": 35, "patch_size": 7, "window_size": 3, "global_attn_indexes": [1],
        },
        "text_config": {**TEXT, "model_type": "qwen2", "vocab_size": len(ids), "tie_word_embeddings": True},
        "image_token_index": ids["<imgpad>"],
    }  # fmt: skip
