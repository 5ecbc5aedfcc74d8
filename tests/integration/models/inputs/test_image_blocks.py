"""The tokens of an image of Gemma 3, and of a prompt of PaliGemma, attend to each other as in transformers."""

import pytest
import torch
from transformers import AutoConfig, Gemma3TextConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model, get_block_sequence_ids_for_mask

from trials.model.attention.samples import PackedSamples
from trials.model.families.gemma3 import image_blocks

CPU = torch.device("cpu")
SAMPLES = {
    "one image": "ttiiiitt",
    "two images with marks between them": "tiiiitttiiiitt",
    "two images that touch": "tiiiiiiiitt",
    "images at both ends": "iiitiii",
    "images alone": "iiii",
    "text alone": "ttttttt",
}
"""t is a token of text, i one of an image."""
PROMPTS = ("pppppaaaa", "ppp", "aaaa", "pppppppppa", "pa")
"""p is a token of a prompt, a one of the answer."""


def places_of(samples: str) -> torch.Tensor:
    return torch.tensor([each == "i" for each in samples])


def expected(sample: str, window: int | None) -> torch.Tensor:
    """The mask of transformers for one sample, [tokens, tokens]."""
    types = places_of(sample).long()[None]
    config = Gemma3TextConfig(sliding_window=window or 1)
    config._attn_implementation = "eager"
    # By position: transformers 5.24 has another name for the cache, which is the fourth argument.
    states, blocks = torch.zeros(1, len(sample), 8), get_block_sequence_ids_for_mask(types)
    masks = create_masks_for_vision_model(config, states, None, None, None, blocks)
    visible: torch.Tensor = masks["full_attention" if window is None else "sliding_attention"][0, 0] == 0
    return visible


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 50])
def test_each_sample_of_a_pack_has_the_mask_that_transformers_makes_for_it_alone(window: int | None) -> None:
    samples = list(SAMPLES.values())
    blocks = image_blocks(places_of("".join(samples)))
    masks = PackedSamples(tuple(map(len, samples)), blocks).masks(window, CPU)
    for sample, mask in zip(samples, masks, strict=True):
        found = torch.ones(len(sample), len(sample)).tril().bool() if mask is None else mask
        assert torch.equal(found, expected(sample, window)), sample


@pytest.mark.parametrize("window", [None, 1, 2, 3, 6, 50])
def test_no_window_is_between_the_tokens_of_a_prompt(window: int | None) -> None:
    blocks = torch.tensor([0 if each == "p" else -1 for each in "".join(PROMPTS)])
    lengths = tuple(map(len, PROMPTS))
    masks = PackedSamples(lengths, blocks, beyond_window=True).masks(window, CPU)
    config = AutoConfig.for_model("gemma2", sliding_window=window or 1)
    config._attn_implementation = "eager"
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    for length, block, mask in zip(lengths, blocks.split(lengths), masks, strict=True):
        given = {"attention_mask": None, "cache": None, "position_ids": None, "block_sequence_ids": block[None]}
        expected = make(config=config, inputs_embeds=torch.zeros(1, length, 8), **given)[0, 0] == 0
        found = torch.ones(length, length).tril().bool() if mask is None else mask
        assert torch.equal(found, expected)


def test_images_with_marks_between_them_are_two_blocks() -> None:
    assert image_blocks(places_of("tiittiit")).tolist() == [-1, 0, 0, -1, -1, 1, 1, -1]


def test_a_sample_without_images_stays_causal() -> None:
    samples = (SAMPLES["one image"], SAMPLES["text alone"])
    blocks = image_blocks(places_of("".join(samples)))
    with_image, without = PackedSamples(tuple(map(len, samples)), blocks).masks(None, CPU)
    assert with_image is not None
    assert without is None
