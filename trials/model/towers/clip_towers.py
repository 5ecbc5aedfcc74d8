"""What families share whose vision tower is CLIP's or SigLIP's, with the states of some of its layers as features.

`vision_feature_layer` counts states: 0 are those before the first layer, -1 those behind the last, without its norm.
Layers behind the last state that is taken, and that norm, are run by nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model.family import VisionModules
from trials.model.refusals.heads import check_heads
from trials.model.shrunk import VOCABULARY, narrow, shorten

_TOWERS = ("clip_vision_model", "siglip_vision_model")
_LARGEST_TILE, _MOST_PATCHES = 4_480, 256
"""Pixels and patches of a tile in a row; published towers have up to 896 and 64."""


def check_tower(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower, for states that it does not have, and for sizes that make no sense."""
    vision = config.vision_config
    if vision.model_type not in _TOWERS:
        raise ModelError(
            f"a vision tower of type {vision.model_type!r} is not supported with model type {config.model_type!r}; use "
            f"a model with one of {', '.join(_TOWERS)}"
        )
    _check_sizes(vision)
    _check_feature_layers(config)
    check_heads(vision, "vision")
    check_heads(config.get_text_config(), "language")
    vocabulary = config.get_text_config().vocab_size
    if not 0 <= config.image_token_id < vocabulary:
        raise ModelError(
            f"image_token_index is {config.image_token_id} but the language model has {vocabulary} tokens; correct "
            "image_token_index or vocab_size in config.json"
        )


def _check_sizes(vision: Any) -> None:
    tile, patch = vision.image_size, vision.patch_size
    if not (isinstance(tile, int) and isinstance(patch, int) and 1 <= patch <= tile <= _LARGEST_TILE):
        raise ModelError(
            f"tiles of image_size {tile} cannot be cut into patches of patch_size {patch}; correct them in the "
            f"vision_config of config.json, to whole numbers up to {_LARGEST_TILE}"
        )
    if tile // patch > _MOST_PATCHES:
        raise ModelError(
            f"tiles of image_size {tile} have {tile // patch} patches of patch_size {patch} in a row, more than the "
            f"{_MOST_PATCHES} that are taken; correct one of them in the vision_config of config.json"
        )
    if vision.num_channels != 3:
        raise ModelError(f"num_channels is {vision.num_channels}, but images have 3; correct it in config.json")


def _check_feature_layers(config: PretrainedConfig) -> None:
    given, layers = config.vision_feature_layer, config.vision_config.num_hidden_layers
    numbers = feature_layers(config)
    if not numbers or not all(1 <= number <= layers for number in numbers):
        raise ModelError(
            f"vision_feature_layer is {given} but the vision model has {layers} layers, whose states are numbered 1 to "
            f"{layers} or -{layers} to -1; correct it in config.json"
        )
    if getattr(config.vision_config, "tie_last_hidden_states", None):
        raise ModelError(
            "tie_last_hidden_states is true, so that the last features pass another norm; it is not supported: set it "
            "to false in the vision_config of config.json if the model was trained so"
        )


def feature_layers(config: PretrainedConfig) -> tuple[int, ...]:
    """Return the number of layers behind which each state is taken, in the order of the projector's inputs."""
    given = config.vision_feature_layer
    states = config.vision_config.num_hidden_layers + 1
    return tuple(number + states if number < 0 else number for number in ([given] if isinstance(given, int) else given))


def tower_tokens(config: PretrainedConfig) -> int:
    """Return the tokens of one tile inside the tower."""
    vision = config.vision_config
    return int(vision.image_size // vision.patch_size) ** 2 + int(vision.model_type == "clip_vision_model")


def tile_features(config: PretrainedConfig) -> int:
    """Return the features of one tile: "default" leaves out the first token, even where that is a patch."""
    return tower_tokens(config) - int(_leaves_first_out(config))


def _leaves_first_out(config: PretrainedConfig) -> bool:
    """Return whether the first token of the tower is no feature. ViP-LLaVA has no setting for that."""
    return bool(getattr(config, "vision_feature_select_strategy", "default") == "default")


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count 2 operations for each parameter and token, and those of attention (Megatron-LM, appendix)."""
    inside = tower_tokens(config)
    # Layers behind the last state that is taken do not run.
    attention = 4 * max(feature_layers(config)) * inside**2 * config.vision_config.hidden_size
    return float(2 * tower * inside + attention + 2 * projector * tile_features(config))


def vision_modules(model: PreTrainedModel) -> VisionModules:
    """Return the tower in parts, and the projector with the parameter of line ends where the model has one."""
    tower, numbers = model.model.vision_tower, feature_layers(model.config)
    last = max(numbers)
    # `pre_layrnorm` is CLIP's, spelled as in transformers; SigLIP has no norm there.
    before = [part for name in ("embeddings", "pre_layrnorm") if (part := getattr(tower, name, None)) is not None]
    behind = [part for part in tower.children() if part not in before and part is not tower.encoder]
    newline = getattr(model.model, "image_newline", None)
    return VisionModules(
        embedding=tuple(before),
        layers=tuple(tower.encoder.layers[:last]),
        kept=tuple(sorted({number - 1 for number in numbers} - {last - 1})),
        projector=(model.model.multi_modal_projector, *([] if newline is None else [newline])),
        unused=(*tower.encoder.layers[last:], *behind),
    )


def embed_vision(model: PreTrainedModel, pixels: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return vision states [tiles, tokens, hidden] of pixels [tiles, 3, height, width]."""
    tower = model.model.vision_tower
    states: torch.Tensor = tower.embeddings(pixels.to(model.dtype))
    return tower.pre_layrnorm(states) if hasattr(tower, "pre_layrnorm") else states


def project(model: PreTrainedModel, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return features [tiles, features, language hidden] of the states that `Family.image_features` takes."""
    features: torch.Tensor = model.model.multi_modal_projector(projected_states(model, states))
    return features


def projected_states(model: PreTrainedModel, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return what the projector takes, [tiles, features, width], of the states that `Family.image_features` takes."""
    numbers = feature_layers(model.config)
    last = max(numbers)
    state_of = dict(zip((last, *sorted(set(numbers) - {last})), states, strict=True))
    taken = torch.cat([state_of[number] for number in numbers], dim=-1)
    return taken[:, int(_leaves_first_out(model.config)) :]


def shrink_tower(settings: dict[str, Any], layers: int, side: int) -> None:
    """Leave the tower `layers` layers that are run, at most one that is not, and tiles of `side` x `side` patches.

    As many states are taken as before, each behind a layer of its own.
    """
    vision, given = settings["vision_config"], settings["vision_feature_layer"]
    before = vision["num_hidden_layers"]
    # Negative numbers count back from the last state, and there is one more state than layers.
    numbers = [number % (before + 1) for number in ([given] if isinstance(given, int) else given)]
    places = sorted(set(numbers))
    last = max(layers, len(places))
    shrunk = [last - len(places) + 1 + places.index(number) for number in numbers]
    shorten(vision, last + min(1, before - max(numbers)))
    narrow(vision)
    vision["image_size"] = side * vision["patch_size"]
    settings["vision_feature_layer"] = shrunk[0] if isinstance(given, int) else shrunk
    for name in ("image_token_index", "video_token_index"):
        if name in settings:
            settings[name] = min(settings[name], VOCABULARY - 1)


# --- data ---


def check_preparation(images: Any) -> None:
    """Raise ModelError for an image processor that makes tiles larger than any tower takes."""
    for name in ("size", "crop_size"):
        sizes: Mapping[str, Any] = dict(getattr(images, name, None) or {})
        if any(isinstance(size, int | float) and not 0 < size <= _LARGEST_TILE for size in sizes.values()):
            raise ModelError(
                f"{name} of the image processor is {sizes}; correct it in preprocessor_config.json, to the model's "
                "image_size"
            )


def check_tile(config: PretrainedConfig, made: NDArray[np.float32]) -> None:
    """Raise ModelError unless the tiles [tiles, ...] that an image processor made have the shape of the tower's."""
    side = config.vision_config.image_size
    if made.shape[1:] != (3, side, side) or not np.isfinite(made).all():
        raise ModelError(
            f"the image processor makes tiles of {made.shape[1:]} numbers, or some that are not finite, but the model "
            f"takes {(3, side, side)}; correct `size` and `crop_size` in preprocessor_config.json"
        )
