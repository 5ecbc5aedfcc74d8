"""Projected image features in the language model."""

from collections.abc import Sequence

import torch
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.tokens import PackTokens
from trials.model.ends.scales import before_layers
from trials.sharing.group import SharingGroup

_TAKING = ("image_token_id", "video_token_id", "visual_indicator_token_ids")
"""Settings with the tokens that take features: of images, of videos, and of marks between tiles."""


def shown_tokens(config: PretrainedConfig) -> list[int]:
    """Return the ids of the tokens that take features."""
    found = [getattr(config, name, None) for name in _TAKING]
    return [token for each in found if each is not None for token in ([each] if isinstance(each, int) else each)]


def join_text(
    model: PreTrainedModel, features: Sequence[torch.Tensor], tokens: PackTokens, sharing: SharingGroup
) -> tuple[torch.Tensor, ...]:
    """Return language states [1, t, hidden] of this rank's tokens, then the features that later layers add to them.

    Image tokens take the first of `features` [features, hidden] in order. Features beyond them, such as those of a pack
    without images, change nothing, but still get a gradient of zeros.
    """
    part = sharing.share.part(len(tokens.input_ids))
    embedding = model.get_input_embeddings()
    text = embedding(tokens.input_ids[part].to(next(embedding.parameters()).device, non_blocking=True))
    # A rank that cannot read a sample has blank tokens in its place.
    checksum = tokens.checksum
    if not features:
        sharing.check_alike(checksum, text.device)
        return (before_layers(model.config, text.unsqueeze(0)),)
    is_image = _is_shown(model, tokens)
    if sharing.share.degree > 1:
        # The features of a stand-in are no token's.
        own = [each[:0] if tokens.stands_in else each for each in features]
        features = sharing.features_of_tokens(own, is_image, checksum)
    first, *later = features
    images = _places(is_image[part], text.device)
    joined = text.index_copy(0, images, first[: len(images)].to(text.dtype))
    return (before_layers(model.config, joined.unsqueeze(0)), *later)


def add_features(
    model: PreTrainedModel, states: torch.Tensor, features: torch.Tensor, tokens: PackTokens, sharing: SharingGroup
) -> torch.Tensor:
    """Return language states [1, t, hidden] with features [features, hidden] added at the image tokens."""
    part = sharing.share.part(len(tokens.input_ids))
    images = _places(_is_shown(model, tokens)[part], states.device)
    # Out of place: the backward pass may need the states as the layer returned them.
    return states.index_add(1, images, features[None, : len(images)].to(states.dtype))


def _places(chosen: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the indices at which `chosen` [t], on the CPU, is true. On the device the host would wait for them."""
    return torch.nonzero(chosen).flatten().to(device, non_blocking=True)


def _is_shown(model: PreTrainedModel, tokens: PackTokens) -> torch.Tensor:
    """Return which tokens [T] take features, on the CPU."""
    return torch.isin(tokens.input_ids, torch.tensor(shown_tokens(model.config)))
