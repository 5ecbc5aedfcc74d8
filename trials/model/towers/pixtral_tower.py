"""The Pixtral vision tower: images in their own resolution, each of which attends to itself.

A grid is (height, width) in patches. The pixels of a pack are its patches, image after image and row after row; one
vision unit is the `merged` consecutive patches that make one token of the language model.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.attention.packed import PACKED_ATTENTION
from trials.model.attention.samples import PackedSamples
from trials.model.family import Images, LayerRunner, VisionModules
from trials.model.shrunk import VOCABULARY, narrow

# A choice: published patches have 14 or 16 pixels, and the memory of a unit grows with the square.
_LARGEST_PATCH = 1_024


def check_tower(config: PretrainedConfig) -> None:
    """Raise ModelError for sizes that do not divide, another feature layer than one of the tower, and a wrong token."""
    vision = config.vision_config
    if not isinstance(vision.patch_size, int) or not 1 <= vision.patch_size <= _LARGEST_PATCH:
        raise ModelError(
            f"patch_size is {vision.patch_size}; correct it in the vision_config of config.json to one number from 1 "
            f"to {_LARGEST_PATCH}"
        )
    if vision.num_channels != 3:
        raise ModelError(f"num_channels is {vision.num_channels}, but images have 3; correct it in config.json")
    heads, width = vision.num_attention_heads, vision.head_dim
    if heads * width != vision.hidden_size or width % 4:
        raise ModelError(
            f"the vision model has {heads} attention heads of head_dim {width} for a hidden_size of "
            f"{vision.hidden_size}, which must be their product, with head_dim a multiple of 4; correct "
            "num_attention_heads, head_dim or hidden_size in config.json"
        )
    if not 1 <= layers_used(config) <= vision.num_hidden_layers:
        raise ModelError(
            f"vision_feature_layer {config.vision_feature_layer} is not supported; it must be one of the "
            f"{vision.num_hidden_layers} vision layers, such as -1, the last"
        )
    vocabulary = config.get_text_config().vocab_size
    if not 0 <= config.image_token_id < vocabulary:
        raise ModelError(
            f"{_token_setting(config)} is {config.image_token_id} but the language model has {vocabulary} tokens; "
            f"correct {_token_setting(config)} or vocab_size in config.json"
        )


def layers_used(config: PretrainedConfig) -> int:
    """Return how many of the first vision layers run; 0 for a feature layer that the tower does not have.

    Features of several layers are none, too: their norm is as wide as one. LightOnOCR takes those of the last.
    """
    chosen = getattr(config, "vision_feature_layer", -1)
    if not isinstance(chosen, int):
        chosen = chosen[0] if len(chosen) == 1 else 0
    return int(chosen if chosen >= 0 else chosen + config.vision_config.num_hidden_layers + 1)


def _token_setting(config: PretrainedConfig) -> str:
    return str(config.attribute_map.get("image_token_id", "image_token_id"))


def shrink_vision(settings: dict[str, Any], layers: int) -> None:
    """Leave `layers` layers that run, one behind them if any is unused, and at most two heads; in place."""
    vision, chosen = settings["vision_config"], settings.get("vision_feature_layer", -1)
    last = chosen if isinstance(chosen, int) else chosen[0]
    has_unused = last not in (-1, vision["num_hidden_layers"])
    narrow(vision)
    vision["num_hidden_layers"] = layers + has_unused
    if "vision_feature_layer" in settings:
        settings["vision_feature_layer"] = layers if isinstance(chosen, int) else [layers]
    settings["image_token_index" if "image_token_index" in settings else "image_token_id"] = VOCABULARY - 1


def unit_flops(config: PretrainedConfig, *, merged: int, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and patch, and those of attention (Megatron-LM, appendix).

    A patch attends to its image, which is taken to have a quarter of the patches of the largest one.
    """
    vision = config.vision_config
    size = vision.image_size if isinstance(vision.image_size, int) else max(vision.image_size)
    attended = max(1, (size // vision.patch_size) ** 2 // 4)
    attention = 4 * layers_used(config) * merged * attended * vision.hidden_size
    return float(2 * tower * merged + attention + 2 * projector)


def unit_shape(config: PretrainedConfig, merged: int) -> tuple[int, int]:
    """Return (patches, channels x height x width of a patch)."""
    return merged, config.vision_config.num_channels * config.vision_config.patch_size**2


def random_images(config: PretrainedConfig, units: int, *, side: int) -> Images:
    """Return a square image with as many of the units of `side` x `side` patches as it can hold, and the rest in a row.

    A unit has one token of the language model.
    """
    square = math.isqrt(units)
    shapes = [(square, square), (1, units - square**2)]
    return Images(
        pixels=torch.randn(units, *unit_shape(config, side**2)),
        grids=torch.tensor([(side * height, side * width) for height, width in shapes if width]),
        input_ids=torch.full((units,), config.image_token_id),
    )


def model_inputs(config: PretrainedConfig, input_ids: torch.Tensor, images: Images | None) -> dict[str, Any]:
    """Implement `Family.model_inputs` for models that take images [images, 3, height, width] padded to the largest."""
    if not images:
        return {"input_ids": input_ids[None]}
    size = config.vision_config.patch_size
    height, width = images.grids.max(dim=0).values.tolist()
    shapes = images.grids.tolist()
    patches = images.pixels.flatten(0, 1).split([rows * columns for rows, columns in shapes])
    whole = [
        part.view(rows, columns, -1, size, size).permute(2, 0, 3, 1, 4).reshape(-1, rows * size, columns * size)
        for part, (rows, columns) in zip(patches, shapes, strict=True)
    ]
    padded = [pad(each, (0, width * size - each.shape[2], 0, height * size - each.shape[1])) for each in whole]
    return {
        "input_ids": input_ids[None],
        "pixel_values": torch.stack(padded),
        "image_sizes": images.grids * size,
    }


def tower_of(model: PreTrainedModel) -> Any:
    """Return the vision tower, which has another name in LightOnOCR."""
    return getattr(model.model, "vision_tower", None) or model.model.vision_encoder


def projector_of(model: PreTrainedModel) -> Any:
    """Return the projector, which has another name in LightOnOCR."""
    return getattr(model.model, "multi_modal_projector", None) or model.model.vision_projection


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts; layers behind the one whose features are taken are unused."""
    tower, used = tower_of(model), layers_used(model.config)
    return VisionModules(
        embedding=(tower.patch_conv, tower.ln_pre),
        layers=tuple(tower.transformer.layers[:used]),
        projector=(projector_of(model),),
        unused=tuple(tower.transformer.layers[used:]),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [patches, hidden] of pixels [units, merged patches, values]."""
    tower = tower_of(model)
    # Patches of images of several shapes are no rectangle, so each is an image of its own.
    patches = pixels.flatten(0, 1).unflatten(1, (-1, *tower.patch_conv.kernel_size))
    states: torch.Tensor = tower.ln_pre(tower.patch_conv(patches.to(model.dtype)).flatten(1))
    return states


def vision_runner(model: PreTrainedModel, states: torch.Tensor, tokens: PackTokens) -> LayerRunner:
    """Run layers whose patches attend to those of their image, with positions (row, column)."""
    tower = tower_of(model)
    tower.config._attn_implementation = PACKED_ATTENTION
    shapes = tokens.grids.tolist()
    places = torch.cat([torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in shapes])
    rotary = tower.patch_positional_embedding(states, places.to(states.device, non_blocking=True))
    images = PackedSamples(tuple(rows * columns for rows, columns in shapes), causal=False)

    def run(layer: nn.Module, number: int, states: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = layer(states[None], None, position_embeddings=rotary, samples=images)
        return result[0]

    return run
