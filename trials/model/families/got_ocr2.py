"""GOT-OCR2: one large tile for each image, a tower with windows in most layers (SAM), and convolutions behind it."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images, VisionModules
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.corrected import convolved_features as _tile_tokens
from trials.model.inputs.positions import counted_positions
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY
from trials.model.towers import siglip, tiles

AUTO_MODEL = AutoModelForImageTextToText
language_runner = decoder.language_runner
model_inputs = tiles.model_inputs
positions = counted_positions
vision_runner = tiles.vision_runner
OTHER_FORMS = {
    "GOT": "it is GOT-OCR2 in the form of its own code; give the Hugging Face form, of model_type 'got_ocr2', such as "
    "stepfun-ai/GOT-OCR-2.0-hf"
}
_SHRUNK_SIDE, _SHRUNK_WINDOW = 5, 3
"""Patches in a row of a shrunk tile and of its windows, of which the last is padded."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is GOT-OCR2."""
    return bool(config.model_type == "got_ocr2")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that make no sense."""
    vision = config.vision_config
    siglip.check_tower(config)
    siglip.check_tokens(config, "image_token_id")
    check_heads(config.get_text_config(), "language")
    if vision.window_size < 0:
        raise ModelError(
            f"window_size is {vision.window_size}; correct it in the vision_config of config.json, to 0 for none"
        )


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and token, and those of attention (Megatron-LM, appendix).

    Weights of the convolutions see as many tokens on the average as the tower has features.
    """
    vision, inside = config.vision_config, siglip.patches_in_a_row(config) ** 2
    layers = range(vision.num_hidden_layers)
    whole = len(set(layers) & set(vision.global_attn_indexes)) if vision.window_size else len(layers)
    attended = whole * inside + (len(layers) - whole) * vision.window_size**2
    attention = 4 * inside * attended * vision.hidden_size
    return float(2 * tower * inside + attention + 2 * projector * 3 * _tile_tokens(config))


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return images [units, 3, height, width] and their tokens."""
    return tiles.random_tiles(config, units, siglip.unit_shape(config), _tile_tokens(config))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave the tower `layers` layers with at most two heads, and tiles that are larger than small windows."""
    vision = settings["vision_config"]
    whole = [number for number in vision["global_attn_indexes"] if number < layers]
    siglip.shrink_tower(vision, layers, _SHRUNK_SIDE)
    vision["global_attn_indexes"] = whole
    vision["window_size"] = min(vision["window_size"], _SHRUNK_WINDOW)
    settings["image_token_index"] = min(settings["image_token_index"], VOCABULARY - 1)


def _inputs(config: PretrainedConfig, processor: Any) -> siglip.OneTileInputs:
    return siglip.OneTileInputs(config, processor.image_processor, _tile_tokens(config))


encoder = functools.partial(chat_encoder, inputs=_inputs, positions=positions)


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts."""
    tower = model.model.vision_tower
    for layer in tower.layers:
        layer.attn.get_rel_pos = _relative_positions
    learned = [] if tower.pos_embed is None else [tower.pos_embed]
    return VisionModules(
        embedding=(tower.patch_embed, *learned),
        layers=tuple(tower.layers),
        behind=(tower.neck,),
        projector=(model.model.multi_modal_projector,),
    )


def _relative_positions(queries: int, keys: int, table: torch.Tensor) -> torch.Tensor:
    """Return the entries of a table of relative positions for as many queries as keys, [queries, keys, channels].

    The model's own code looks them up by numbers on the CPU, so that each layer would wait for a copy to its device.
    """
    entries = functional.interpolate(table.T[None], size=2 * keys - 1, mode="linear")[0].T
    places = torch.arange(queries, device=table.device)
    return entries[places[:, None] - places + keys - 1]


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [images, rows, columns, hidden] of pixels [images, 3, height, width]."""
    tower = model.model.vision_tower
    states: torch.Tensor = tower.patch_embed(pixels.to(model.dtype))
    return states if tower.pos_embed is None else states + tower.pos_embed


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [images x features, hidden]."""
    features = model.model.multi_modal_projector(model.model.vision_tower.neck(states[0]))
    return (features.flatten(0, 1),)
