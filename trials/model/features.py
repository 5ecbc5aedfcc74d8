"""Projected image features in the language model."""

import torch
from transformers import PreTrainedModel

from trials.data.tokens import PackTokens


def place_features(model: PreTrainedModel, features: torch.Tensor, tokens: PackTokens) -> torch.Tensor:
    """Return language states [1, T, hidden]: embedded text, and features [features, hidden] for images and videos."""
    text = model.get_input_embeddings()(tokens.input_ids)
    is_image = _is_shown(model, tokens).unsqueeze(-1)
    # Takes features in order and leaves over those that no token shows, which still get a gradient of zeros.
    joined: torch.Tensor = text.masked_scatter(is_image, features.to(text.dtype))
    return joined.unsqueeze(0)


def add_features(
    model: PreTrainedModel, states: torch.Tensor, features: torch.Tensor, tokens: PackTokens
) -> torch.Tensor:
    """Return language states [1, T, hidden] with features [features, hidden] added to those of the image tokens."""
    images = torch.nonzero(_is_shown(model, tokens)).flatten()
    # Out of place: the backward pass may need the states as the layer returned them.
    return states.index_add(1, images, features[None, : len(images)].to(states.dtype))


def _is_shown(model: PreTrainedModel, tokens: PackTokens) -> torch.Tensor:
    """Return which tokens [T] take features."""
    is_image: torch.Tensor = tokens.input_ids == model.config.image_token_id
    video = getattr(model.config, "video_token_id", None)
    return is_image if video is None else is_image | (tokens.input_ids == video)
