"""Settings of a configuration that a family does not follow are refused before a model is built, with the remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.values.hostile_models import Spoil, config
from tests.values.parameters import parameters
from trials.errors import ModelError
from trials.model.skeleton import build_skeleton, load_config

PATCHES = {
    "no patch": (
        config(vision_config__temporal_patch_size=0),
        r"temporal_patch_size is 0; correct it in the vision_co",
    ),
    "huge merge": (config(vision_config__spatial_merge_size=10**5), r"spatial_merge_size is 100000; .* from 1 to 1024"),
    "four channels": (config(vision_config__in_channels=4), r"in_channels is 4, but images have 3"),
    "no layers": (config(vision_config__depth=0), r"depth is 0; correct it in the vision_config of config.json"),
    "no heads": (config(vision_config__num_heads=0), r"num_heads is 0; correct it in the vision_config of config.json"),
    "heads": (config(vision_config__num_heads=16), r"has 16 heads for a \w+ of 32, which must be a multiple of four"),
    "text heads": (config(text_config__num_key_value_heads=3), r"3 key-value heads, which do not divide its 4 attenti"),
    "token": (config(vision_end_token_id=10**6), r"vision_end_token_id is 1000000 but the language model has \d+ toke"),
}
OUTPUT = (
    config(vision_config__out_hidden_size=48),
    r"out_hidden_size of the vision model is 48 but .*hidden_size is 32",
)
SECTIONS = {
    "sections": (config(text_config__rope_parameters__mrope_section=[2, 2, 2]), r"\[2, 2, 2\], which must .* up to 4"),
    "no sections": (config(text_config__rope_parameters__mrope_section=4), r"mrope_section is 4, which must be a list"),
}
DEEPSTACK = {
    "descending": (config(vision_config__deepstack_visual_indexes=[2, 0]), r"is \[2, 0\], which must be ascending num"),
    "negative": (
        config(vision_config__deepstack_visual_indexes=[-1]),
        r"is \[-1\], which must be ascending numbers of",
    ),
    "no such layer": (config(vision_config__deepstack_visual_indexes=[4]), r"ascending numbers of the 4 vision layers"),
    "no positions": (config(vision_config__num_position_embeddings=0), r"num_position_embeddings is 0; correct it in"),
    "many features": (config(text_config__num_hidden_layers=1), r"2 vision layers, .* but the model has 1; correct"),
}
EXPERTS = {
    "auxiliary loss": (
        config(text_config__output_router_logits=True),
        r"asks for an auxiliary loss of .* to false in",
    ),
    "many experts": (config(text_config__num_experts_per_tok=6), r"num_experts_per_tok is 6 but a layer has 5 experts"),
}
GLM = {
    **{name: case for name, case in PATCHES.items() if name != "token"},
    "output": OUTPUT,
    "token": (config(image_end_token_id=10**6), r"image_end_token_id is 1000000 but the language model has \d+ tokens"),
    "sections": (
        config(text_config__rope_parameters__mrope_section=[1, 1, 2]),
        r"\[1, 1, 2\], which must .* up to 3, half the width of a head times the partial_rotary_factor of 0.75",
    ),
    "usual sections": (
        config(text_config__rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        r"mrope_section is \[8, 12, 12\], which must be a list of numbers that add up to 4",
    ),
    "no positions": (config(vision_config__image_size=6), r"image_size is 6, of which the square of learned positions"),
}


def flat(folder: Path) -> None:
    """Put the language model's settings where GLM-4.1V's first files had them."""
    file = folder / "config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({**settings.pop("text_config"), **settings}))


GLM["flat"] = (flat, r"settings at its top level, .*; take the model's current config.json, with a text_config")
PADDLE = {
    "huge merge": PATCHES["huge merge"],
    "four channels": (config(vision_config__num_channels=4), r"num_channels is 4, but images have 3"),
    "heads": (config(vision_config__num_attention_heads=16), r"has 16 heads for a hidden_size of 32, which must be a"),
    "text heads": PATCHES["text heads"],
    "token": PATCHES["token"],
    **SECTIONS,
    "usual sections": (
        config(text_config__rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        r"mrope_section is \[16, 24, 24\], which must be a list of numbers that add up to 4",
    ),
    "no positions": GLM["no positions"],
}
CASES = {
    "qwen2-vl": {
        **PATCHES,
        **SECTIONS,
        "output": (config(vision_config__hidden_size=48), r"hidden_size of the vision model is 48 but the language"),
    },
    "qwen2-5-vl": {
        **PATCHES,
        **SECTIONS,
        "output": OUTPUT,
        "window": (config(vision_config__window_size=8), r"window_size 8 is below a merged patch of 7 x 2 pixels"),
    },
    "qwen3-vl": {**PATCHES, **DEEPSTACK, "output": OUTPUT},
    "qwen3-vl-moe": EXPERTS,
    "glm4v": GLM,
    "glm4v-moe": EXPERTS,
    "paddleocr-vl": PADDLE,
}
BY_NAME = {f"{model}, {name}": (model, *case) for model, of_model in CASES.items() for name, case in of_model.items()}
SHORT = (
    *(f"qwen3-vl, {name}" for name in CASES["qwen3-vl"]),
    *(f"qwen3-vl-moe, {name}" for name in EXPERTS),
    *("qwen2-vl, output", "qwen2-5-vl, window", "qwen2-5-vl, sections", "qwen2-5-vl, no sections"),
    *("glm4v, sections", "glm4v, usual sections", "glm4v, no positions", "glm4v, token", "glm4v, flat"),
    *("paddleocr-vl, four channels", "paddleocr-vl, heads"),
)
"""Each check once, and what a family reads from settings of its own"""


@pytest.mark.parametrize(("model", "spoil", "message"), parameters(BY_NAME, short=SHORT))
def test_a_setting_that_is_not_followed_is_refused(
    tiny: Callable[[str], Path], model: str, spoil: Spoil, message: str
) -> None:
    folder = tiny(model)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        build_skeleton(load_config(str(folder)), torch.float32)


@pytest.mark.parametrize("section", [None, "text_config", "vision_config"])
def test_a_kernel_of_attention_that_is_not_used_is_passed_over(
    tiny: Callable[[str], Path], section: str | None
) -> None:
    folder = tiny("qwen2-5-vl")
    name = "attn_implementation" if section is None else f"{section}__attn_implementation"
    config(**{name: "flash_attention_2"})(folder)
    assert build_skeleton(load_config(str(folder)), torch.float32).chain.vision_layers
