"""GLM-4.1V: a quarter of each head without positions, and a square of 4 x 4 learned positions of patches."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

from tests.tiny_models import CHATML, TEXT, save

VISION = {
    "depth": 3, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "patch_size": 7, "image_size": 28,
    "out_hidden_size": TEXT["hidden_size"],
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 1], "partial_rotary_factor": 0.75}
VIDEOS = {
    "patch_size": 7, "merge_size": 2, "size": {"shortest_edge": 14 * 14, "longest_edge": 14 * 14 * 40}, "fps": 2,
}  # fmt: skip
_CHAT = CHATML.replace("SHOWN", "<|begin_of_image|><|image|><|end_of_image|>").replace(
    "FILMED", "<|begin_of_video|><|video|><|end_of_video|>"
)
_AROUND = {
    f"{kind}_{place}_token_id": f"<|{word}_of_{kind}|>"
    for kind in ("image", "video")
    for place, word in (("start", "begin"), ("end", "end"))
}


def make(folder: Path) -> None:
    save_glm(folder, _config)


def save_glm(folder: Path, config: Callable[[Mapping[str, int]], Mapping[str, Any]]) -> None:
    """Write a model whose images are patches of 7 x 7 pixels, merged by 2 x 2; see `save`."""
    # Two frames are counted for an image.
    size = {"shortest_edge": 2 * 14 * 14, "longest_edge": 2 * 14 * 14 * 40}
    save(
        folder,
        config=config,
        images=Glm4vImageProcessorPil(patch_size=7, merge_size=2, size=size),
        special={"image_token": "<|image|>", "video_token": "<|video|>"},
        tokens=tuple(_AROUND.values()),
        chat=_CHAT,
        videos=VIDEOS,
    )


def _config(ids: Mapping[str, int]) -> Mapping[str, Any]:
    return {
        "model_type": "glm4v",
        "vision_config": VISION,
        "text_config": {**TEXT, "num_hidden_layers": 2, "vocab_size": len(ids), "rope_parameters": ROPE},
        **marks(ids),
    }


def marks(ids: Mapping[str, int]) -> dict[str, int]:
    """The ids of the tokens of images and videos, and of those around them."""
    shown = {"image_token_id": ids["<|image|>"], "video_token_id": ids["<|video|>"]}
    return shown | {name: ids[token] for name, token in _AROUND.items()}
