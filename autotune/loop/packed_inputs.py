"""Packs as transformers' own models take them."""

from typing import Any

import torch
from transformers import PretrainedConfig

from trials.data.loader import MicroBatch
from trials.data.records.sample import IGNORED, Encoded
from trials.data.tokens import PackTokens
from trials.model.family import Images, load_family, prompt_types

_MOST_UNITS = 64
"""More than an image has that is cut into the fewest crops."""


def packed_inputs(config: PretrainedConfig, batch: MicroBatch) -> dict[str, Any]:
    """Return the arguments of a model for a pack that was not padded, as tensors with a batch of 1.

    Positions begin anew in each sample: from them transformers builds a mask that keeps samples apart, where there is
    neither an attention mask nor a cache. A pack must not have pixels without tokens (see `stand_in`).
    """
    tokens = batch.tokens
    images = None
    if batch.pixel_values is not None:
        images = Images(pixels=batch.pixel_values, grids=tokens.grids, input_ids=tokens.input_ids)
    inputs = load_family(config).model_inputs(config, tokens.input_ids, images) | prompt_types(tokens.positions)
    # The last token of a sample has no target, so that the labels of the pack can be shifted by transformers.
    labels = torch.cat([torch.tensor([IGNORED]), batch.labels[:-1]])
    given = {name: value for name, value in inputs.items() if value is not None}
    return {**given, "position_ids": _positions(tokens), "labels": labels[None], "use_cache": False}


def _positions(tokens: PackTokens) -> torch.Tensor:
    """Return int64 [1, T]; or [4, 1, T], the place in the sample before time, height and width."""
    if len(tokens.positions) < 3:
        return tokens.positions[:1]
    places = torch.cat([torch.arange(length) for length in tokens.lengths])
    return torch.cat([places[None], tokens.positions])[:, None]


def stand_in(config: PretrainedConfig) -> Encoded | None:
    """Return a sample with blank images and no target, for a pack without images; None for a model without vision.

    With it the vision tower runs on every pack, and its parameters have gradients of 0 instead of none. So data ranks
    have the same parameters to reduce, and AdamW treats them as in a pack with images.
    """
    family = load_family(config)
    with torch.random.fork_rng(devices=[]):  # the pixels that are drawn here are not used
        drawn = (family.random_images(config, units) for units in range(2, _MOST_UNITS))
        # A single image, since several may not be cut, and of two units or more, since some models cut each image.
        images = next(each for each in drawn if len(each.grids) < 2)
    if not len(images.input_ids):
        return None
    input_ids, grids = images.input_ids.numpy(), images.grids.numpy()
    return Encoded(
        input_ids=input_ids,
        labels=torch.full_like(images.input_ids, IGNORED).numpy(),
        positions=family.positions(config, input_ids, grids),
        # Not zeros, which Idefics3 takes for padding and removes.
        pixel_values=torch.ones_like(images.pixels).numpy(),
        grids=grids,
    )
