"""Mistral 3 and LightOnOCR: the Pixtral tower, whose patches are merged before the projector."""

import functools
from collections.abc import Sequence

import torch
from transformers import AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.errors import ModelError
from trials.model import decoder
from trials.model.family import Images
from trials.model.inputs.chat_encoder import chat_encoder
from trials.model.inputs.positions import counted_positions
from trials.model.refusals.heads import check_heads
from trials.model.towers import pixtral_tower
from trials.model.towers.pixtral_inputs import PixtralInputs

AUTO_MODEL = AutoModelForImageTextToText
embed_vision = pixtral_tower.embed_vision
language_runner = decoder.language_runner
model_inputs = pixtral_tower.model_inputs
positions = counted_positions
shrink_vision = pixtral_tower.shrink_vision
vision_modules = pixtral_tower.vision_modules
vision_runner = pixtral_tower.vision_runner
OTHER_FORMS: dict[str, str] = {}
_MOST_MERGED = 64
"""Largest side of a square of merged patches; the published models have 2."""


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is Mistral 3 or LightOnOCR."""
    return config.model_type in ("mistral3", "lighton_ocr")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for another tower than Pixtral's, and for sizes that do not divide."""
    if config.vision_config.model_type != "pixtral":
        raise ModelError(
            f"the vision model type {config.vision_config.model_type!r} is not supported with {config.model_type!r}; "
            "use a model with 'pixtral'"
        )
    if not 1 <= config.spatial_merge_size <= _MOST_MERGED:
        raise ModelError(
            f"spatial_merge_size is {config.spatial_merge_size}; correct it in config.json to 1 to {_MOST_MERGED}"
        )
    pixtral_tower.check_tower(config)
    check_heads(config.get_text_config(), "language")


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count the operations of one merged patch."""
    return pixtral_tower.unit_flops(config, merged=config.spatial_merge_size**2, tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return a square image and one in a row, and their tokens."""
    return pixtral_tower.random_images(config, units, side=config.spatial_merge_size)


encoder = functools.partial(chat_encoder, inputs=PixtralInputs, positions=positions)


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [merged patches, hidden]."""
    size = model.config.vision_config.patch_size
    # transformers' merger divides the sizes in pixels by that of a patch.
    pixels = [(rows * size, columns * size) for rows, columns in tokens.grids.tolist()]
    return (pixtral_tower.projector_of(model)(states[0], pixels),)
