"""Configurations and processors of models with SigLIP towers that do not fit are refused with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.values.hostile_models import Spoil, config, settings
from trials.errors import ModelError
from trials.job import DataSection, ModelSection
from trials.model.inputs.encoders import load_encoder
from trials.model.skeleton import build_skeleton, load_config

MODELS = {
    "gemma3": "gemma3",
    "idefics3": "idefics3",
    "aya": "aya-vision",
    "cohere": "cohere2-vision",
    "deepseek": "deepseek-vl",
    "got": "got-ocr2",
    "ovis": "ovis2",
    "pali": "paligemma",
}
IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
CONFIGURATIONS: list[tuple[str, Spoil, str]] = [
    ("gemma3", config(mm_tokens_per_image=5), "4 x 4 patches of an image cannot be pooled to 5 tokens"),
    ("gemma3", config(boi_token_index=None), "boi_token_id is None but the language model has 320 tokens"),
    ("gemma3", config(vision_config__model_type="clip_vision_model"), "the vision model is 'clip_vision_model'"),
    ("gemma3", config(vision_config__image_size=[18, 18]), r"tiles of \[18, 18\] pixels cannot be cut into patc"),
    ("gemma3", config(vision_config__image_size=9_000), "tiles of 9000 pixels .* one number up to 4480"),
    ("gemma3", config(vision_config__num_attention_heads=5), "the vision model has 5 attention heads, which do"),
    ("gemma3", config(vision_config__num_channels=1), "num_channels is 1, but images have 3"),
    ("gemma3", config(text_config__sliding_window=0), "sliding_window is 0; correct it in config.json"),
    ("gemma3", config(text_config__use_bidirectional_attention=True), "use_bidirectional_attention is set"),
    ("idefics3", config(scale_factor=3), "4 x 4 patches of a tile cannot be merged in squares with a scale_fac"),
    ("aya", config(downsample_factor=0), "in squares of downsample_factor 0; correct it"),
    ("aya", config(vision_feature_select_strategy="default"), "15 patches of a tile cannot be merged in squares"),
    ("aya", config(vision_feature_layer=[-1, -2]), "but the projector takes the states of one layer; correct it"),
    ("cohere", config(alignment_intermediate_size=25), "alignment_intermediate_size is 25, of which one half"),
    ("got", config(vision_config__window_size=-1), "window_size is -1; correct it in the vision_config of config.js"),
    ("ovis", config(vision_config__tokenize_function="gumbel_argmax"), "is 'gumbel_argmax', which draws noise"),
    ("ovis", config(vision_config__hidden_stride=0), "squares of hidden_stride 0; correct it, or image_size"),
    ("ovis", config(vision_config__num_visual_indicator_tokens=4), "tokens is 4, but 5 of the 24 rows of"),
    ("ovis", config(visual_indicator_token_ids=[3, 4]), r"ids are \[3, 4\]; correct them in config.json to 6"),
    ("ovis", config(hidden_size=16), "hidden_size is 16 but 32 in the text_config; correct config.json"),
    ("pali", config(projection_dim=16), "projection_dim is 16, but the language model's hidden_size is 32; correct"),
    ("pali", config(image_token_index=10**6), "image_token_id is 1000000 but the language model has"),
]
LIKE_CONFIGURATIONS: list[tuple[str, Spoil, str]] = [
    ("gemma3", config(mm_tokens_per_image=None), "cannot be pooled to 0 tokens"),
    ("gemma3", config(vision_config__patch_size=5), "3 x 3 patches of an image cannot be pooled to 4 tokens"),
    ("gemma3", config(image_token_index=10**6), "image_token_id is 1000000 but the language model has 320 tokens"),
    ("idefics3", config(scale_factor=0), "with a scale_factor of 0; correct scale_factor"),
    ("idefics3", config(image_token_id=-1), "image_token_id is -1 but the language model has"),
    ("aya", config(downsample_factor=3), "16 patches of a tile cannot be merged in squares of downsample_factor 3"),
    ("cohere", config(downsample_factor=3), "4 x 4 patches of a tile cannot be merged in squares of downsample"),
    ("cohere", config(downsample_factor=0), "in squares of downsample_factor 0; correct it"),
    ("cohere", config(image_token_id=10**6), "image_token_id is 1000000 but the language model has"),
    ("cohere", config(vision_config__model_type="clip_vision_model"), "models of type .cohere2_vision. have"),
    ("deepseek", config(vision_config__model_type="clip_vision_model"), "models of type 'deepseek_vl' have 'sigli"),
    ("got", config(vision_config__image_size=[35, 35]), r"tiles of \[35, 35\] pixels cannot be cut into patches"),
    ("got", config(image_token_index=10**6), "image_token_id is 1000000 but the language model has"),
    ("ovis", config(vision_config__tokenize_function="max"), "function is 'max', which .* or is unknown"),
    ("ovis", config(vision_config__hidden_stride=3), "4 x 4 patches of a tile cannot be merged in squares of hid"),
    ("ovis", config(visual_indicator_token_ids=[4, 5, 6, 7, 7]), "to 6 different ones of the language mod"),
    ("ovis", config(image_token_id=10**6), "image_token_id is 1000000 and visual_indicator"),
    ("deepseek", config(image_token_id=-1), "image_token_id is -1 but the language model has"),
    ("pali", config(vision_config__model_type="clip_vision_model"), "models of type 'paligemma' have 'siglip"),
]
"""The same checks, of other families and values"""
PROCESSORS: list[tuple[str, Spoil, str]] = [
    ("gemma3", settings(IMAGES, do_pan_and_scan=True), "do_pan_and_scan is True, but crops of images are not sup"),
    ("gemma3", settings(PROCESSOR, image_seq_length=5), "image_seq_length is 5 .* mm_tokens_per_image is 4"),
    ("gemma3", settings(IMAGES, size={"height": 9, "width": 18}), r"tiles of \(9, 18\) pixels but the model takes"),
    ("aya", settings(PROCESSOR, downsample_factor=1), "shows 1 tiles as 19 tokens, but the model makes 4 features"),
    ("aya", settings(IMAGES, max_patches=500), "cuts images into 1 to 500 tiles; correct min_patches and max_pat"),
    ("cohere", settings(IMAGES, patch_size=3), "is 3, by which a tile has 9 tokens, but the model makes 4"),
    ("cohere", settings(IMAGES, resample=1), "resample is 1, but images of this model are resized by 2 or 3"),
    ("ovis", config(visual_indicator_token_ids=[8, 7, 6, 5, 4]), r"<IMG_ATOM>, <IMG_START>, .* are \[3, 4, 5"),
    ("deepseek", settings(PROCESSOR, num_image_tokens=9), "num_image_tokens is 9 .* the model makes 16 features o"),
    ("deepseek", settings(IMAGES, do_pad=False), r"makes \(3, 20, 28\) numbers of an image where the model takes"),
    ("deepseek", settings(IMAGES, image_mean=0.5), "cannot be loaded.*; correct preprocessor_config.json, or save"),
    ("gemma3", settings(IMAGES, image_processor_type="Qwen2_5_VLImageProcessor"), "does not have; remove it from prep"),
    ("gemma3", settings(IMAGES, do_resize=False), "do_resize of the image processor is False"),
    ("gemma3", config(boi_token_index=7), r"images stand between the tokens \(3, 4\) of the tokenizer, but"),
    ("gemma3", config(image_token_index=7), "the tokenizer's image token is 5, the model's is 7"),
    ("idefics3", settings(PROCESSOR, image_seq_len=5), "image_seq_len is 5 .* but a tile has 4 tokens"),
    ("idefics3", settings(IMAGES, size={"height": 18, "width": 18}), "size of the image processor .* longest_edge"),
    ("idefics3", settings(IMAGES, max_image_size={"longest_edge": 10}), r"makes tiles of \(10, 10\) pixels but"),
    ("idefics3", settings(IMAGES, size={"longest_edge": 10**9}), "images of 10+ pixels cannot be split into tiles"),
    ("idefics3", settings("tokenizer_config.json", global_image_token="<row_1_col_1>"), "the tokenizer has .*row_"),
]
LIKE_PROCESSORS: list[tuple[str, Spoil, str]] = [
    ("cohere", settings(IMAGES, max_patches=500), "cuts images into 1 to 500 tiles; correct min_patches and"),
    ("cohere", settings(IMAGES, size={"height": 28, "width": 21}), r"tiles of \(28, 21\) pixels but the model"),
    ("ovis", settings(PROCESSOR, image_seq_length=9), "image_seq_length is 9 .* but the model makes 4 feat"),
    ("ovis", settings(IMAGES, size={"height": 21, "width": 28}), r"tiles of \(21, 28\) pixels but the model"),
    ("ovis", settings(IMAGES, min_patches=13), "cuts images into 13 to 4 tiles; correct min_patches"),
    ("got", settings(IMAGES, size={"height": 28, "width": 28}), r"makes tiles of \(28, 28\) pixels but the model"),
    ("pali", settings(IMAGES, image_seq_length=9), "image_seq_length is 9 .* the model makes 16 features of an im"),
    ("pali", settings(IMAGES, size={"height": 9, "width": 18}), r"tiles of \(9, 18\) pixels but the model takes"),
    ("pali", config(image_token_index=7), "the tokenizer's image token is 3, the model's is 7"),
    ("deepseek", settings(IMAGES, min_size=40), r"makes \(3, 40, 40\) numbers of an image where the model takes"),
    ("gemma3", config(vision_config__image_size=9_000), "tiles of 9000 pixels .* one number up to 4480"),
    ("idefics3", settings(IMAGES, do_resize=False), "do_resize of the image processor is False"),
    ("idefics3", settings(IMAGES, max_image_size={"longest_edge": 1}), "images of 50 pixels cannot be split into"),
]


def with_variants(short: list[tuple[str, Spoil, str]], others: list[tuple[str, Spoil, str]]) -> list[Any]:
    return [*short, *(pytest.param(*case, marks=pytest.mark.long) for case in others)]


@pytest.fixture
def spoiled(tiny: Callable[[str], Path], name: str, spoil: Spoil) -> Path:
    """The folder of a model in which something is wrong."""
    folder = tiny(MODELS[name])
    spoil(folder)
    return folder


@pytest.mark.parametrize(("name", "spoil", "message"), with_variants(CONFIGURATIONS, LIKE_CONFIGURATIONS))
def test_a_configuration_that_cannot_be_staged_is_refused_before_it_is_built(spoiled: Path, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_skeleton(load_config(str(spoiled)), torch.float32)


@pytest.mark.parametrize(("name", "spoil", "message"), with_variants(PROCESSORS, LIKE_PROCESSORS))
def test_a_processor_that_does_not_fit_the_model_is_refused(spoiled: Path, message: str) -> None:
    model = ModelSection(path=str(spoiled))
    with pytest.raises(ModelError, match=message):
        load_encoder(model, DataSection.model_validate({"sources": [{"path": "a"}]}))
