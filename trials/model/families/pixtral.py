"""Pixtral-12B: the Pixtral tower in LLaVA's form, with one token of the language model for each patch."""

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


def takes(config: PretrainedConfig) -> bool:
    """Return whether this is LLaVA with a Pixtral tower."""
    return bool(config.model_type == "llava" and config.vision_config.model_type == "pixtral")


def check(config: PretrainedConfig) -> None:
    """Raise ModelError for features without the first patch, and for sizes that do not divide."""
    if config.vision_feature_select_strategy != "full":
        raise ModelError(
            f"vision_feature_select_strategy is {config.vision_feature_select_strategy!r}, which leaves out the first "
            "patch of a Pixtral tower; set it to 'full' in config.json"
        )
    pixtral_tower.check_tower(config)
    check_heads(config.get_text_config(), "language")


def unit_flops(config: PretrainedConfig, *, tower: int, projector: int) -> float:
    """Count the operations of one patch."""
    return pixtral_tower.unit_flops(config, merged=1, tower=tower, projector=projector)


def random_images(config: PretrainedConfig, units: int) -> Images:
    """Return a square image and one in a row, and their tokens."""
    return pixtral_tower.random_images(config, units, side=1)


encoder = functools.partial(chat_encoder, inputs=PixtralInputs, positions=positions)


def image_features(
    model: PreTrainedModel, states: Sequence[torch.Tensor], tokens: PackTokens
) -> Sequence[torch.Tensor]:
    """Return features [patches, hidden]."""
    return (model.model.multi_modal_projector(states[0]),)
