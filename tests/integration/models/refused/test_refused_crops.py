"""Configurations and processors of the LLaVA models that cannot be followed are refused with the reason."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from autotune.model_shape import model_shape
from tests.values.hostile_models import Spoil, config, settings, without
from tests.values.parameters import parameters
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.family import load_family
from trials.model.skeleton import build_skeleton, load_config

CONFIGURATIONS: dict[str, tuple[str, Spoil, str]] = {
    "state 0": (
        "llava",
        config(vision_feature_layer=0),
        r"vision_feature_layer is 0 but the vision model has 4 layers",
    ),
    "no such layer": (
        "llava",
        config(vision_feature_layer=-5),
        r"is -5 but .* numbered 1 to 4 or -4 to -1; correct it",
    ),
    "one of several": ("llava-siglip", config(vision_feature_layer=[-2, 9]), r"vision_feature_layer is \[-2, 9\] but"),
    "no states": ("llava-siglip", config(vision_feature_layer=[]), r"vision_feature_layer is \[\] but the vision mod"),
    "another norm": ("llava", config(vision_config__tie_last_hidden_states=True), r"tie_last_hidden_states is true"),
    "two sides": ("llava", config(vision_config__image_size=[28, 28]), r"image_size \[28, 28\] cannot be cut into pat"),
    "large patch": (
        "llava",
        config(vision_config__patch_size=29),
        r"image_size 28 cannot be cut .* patch_size 29; cor",
    ),
    "huge tile": ("llava", config(vision_config__image_size=20_000), r"cannot be cut .* to whole numbers up to 4480"),
    "many patches": (
        "llava-next",
        config(vision_config__image_size=4_480, vision_config__patch_size=1),
        r"have 4480 patches of patch_size 1 in a row, more than the 256 that are taken",
    ),
    "channels": ("llava", config(vision_config__num_channels=1), r"num_channels is 1, but images have 3"),
    "no feature": (
        "llava",
        config(vision_config__patch_size=28, vision_config__model_type="siglip_vision_model"),
        "a tile has one patch, which is left out as the first token of the tower; correct patch_size",
    ),
    "image token": ("llava-next", config(image_token_index=10**6), r"image_token_index is 1000000 but the language mo"),
    "class token": (
        "llava-next",
        config(vision_feature_select_strategy="full"),
        r"a crop of 4 x 4 patches has 17 feat",
    ),
    "lost patch": (
        "llava-onevision",
        config(vision_feature_select_strategy="default"),
        r"4 x 4 patches has 15 features",
    ),
    "no resolutions": ("llava-next", config(image_grid_pinpoints=[]), r"must be a list of 1 to 400 resolutions; corr"),
    "many resolutions": ("llava-next", config(image_grid_pinpoints=[[28, 28]] * 401), r"must be a list of 1 to 400"),
    "a number": (
        "llava-next",
        config(image_grid_pinpoints=[28]),
        r"28 in image_grid_pinpoints is no \(height, width\)",
    ),
    "uneven": ("llava-next", config(image_grid_pinpoints=[[28, 30]]), r"in multiples of image_size 28; correct it in"),
    "none": ("llava-next", config(image_grid_pinpoints=[[0, 28]]), r"\[0, 28\] in image_grid_pinpoints is no \(height"),
    "many crops": ("llava-next", config(image_grid_pinpoints=[[28 * 401, 28]]), r"into more than 400 crops of 28"),
    "learned pooling": ("llava-next-video", config(spatial_pool_mode="conv"), "spatial_pool_mode is 'conv', but fr"),
    "no pooling": ("llava-next-video", config(spatial_pool_stride=0), "spatial_pool_stride is 0, but a frame has 4 pa"),
    "aspect": ("llava-onevision", config(vision_aspect_ratio="square"), r"vision_aspect_ratio is 'square', which must"),
    "no crops": ("llava-onevision", config(vision_aspect_ratio="anyres_max_0"), r"such as anyres_max_9; correct it in"),
    "long": (
        "llava-onevision",
        config(image_grid_pinpoints=[[30, 390]]),
        r"longer than the 360 pixels that can be scal",
    ),
}
PROCESSORS: dict[str, tuple[str, Spoil, str]] = {
    "tile": (
        "llava",
        settings("preprocessor_config.json", crop_size={"height": 27, "width": 28}),
        r"makes tiles of \(3, 27, 28\) numbers, .* but the model takes \(3, 28, 28\); correct `size` and `crop_size`",
    ),
    "huge tile": (
        "llava",
        settings("preprocessor_config.json", crop_size={"height": 10**9, "width": 28}),
        r"crop_size of the image processor is .*1000000000.*; correct it in preprocessor_config.json",
    ),
    "deviation": (
        "llava-siglip",
        settings("preprocessor_config.json", image_std=[0, 0, 0]),
        r"numbers of which none is 0",
    ),
    "patches": ("llava", settings("processor_config.json", patch_size=14), r"7 x 5 pixels as 4 tokens but the model m"),
    "class token": (
        "llava",
        settings("processor_config.json", num_additional_image_tokens=0),
        r"as 15 tokens but the m",
    ),
    "resolutions": (
        "llava-next",
        settings("preprocessor_config.json", image_grid_pinpoints=[[28, 28]]),
        r"of the image processor are \[\[28, 28\]\] but those of the model are \[\[28, 56\]",
    ),
    "features": (
        "llava-onevision",
        settings("processor_config.json", num_image_tokens=25),
        r"tokens but the model make",
    ),
    "aspect": (
        "llava-onevision",
        settings("processor_config.json", vision_aspect_ratio="anyres_max_9"),
        r"but the model",
    ),
    "no settings": (
        "llava",
        without("processor_config.json"),
        r"does not say how many tokens an image has: processor_config.json is not there, or lacks patch_size, "
        r"vision_feature_select_strategy; .*: by config.json, patch_size is 7, vision_feature_select_strategy is defa",
    ),
    "no number": (
        "llava-onevision",
        settings("processor_config.json", num_image_tokens=None),
        r"processor_config.json is not there, or lacks num_image_tokens; take that of the published model, or write it",
    ),
}
LIKE_OTHERS = {
    *("no such layer", "one of several", "huge tile", "image token", "lost patch", "many resolutions", "none"),
    *("channels", "deviation", "features", "no number"),
}
"""Further values and families of checks that other cases show, too"""


@pytest.mark.parametrize(
    ("name", "spoil", "message"), parameters(CONFIGURATIONS, short=CONFIGURATIONS.keys() - LIKE_OTHERS)
)
def test_a_configuration_that_cannot_be_followed_is_refused(
    name: str, spoil: Spoil, message: str, tiny: Callable[[str], Path]
) -> None:
    folder = tiny(name)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        model_shape(ModelSection(path=str(folder), weights="random"))
    with pytest.raises(ModelError):
        load_family(load_config(str(folder))).encoder(str(folder))


@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
@pytest.mark.parametrize(("name", "spoil", "message"), parameters(PROCESSORS, short=PROCESSORS.keys() - LIKE_OTHERS))
def test_a_processor_that_disagrees_with_the_model_is_refused(
    name: str, spoil: Spoil, message: str, tiny: Callable[[str], Path]
) -> None:
    folder = tiny(name)
    spoil(folder)
    with pytest.raises(ModelError, match=message):
        load_family(load_config(str(folder))).encoder(str(folder))


def test_weights_that_nothing_runs_are_wanted_too(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llava")
    AutoModelForImageTextToText.from_config(load_config(str(folder))).save_pretrained(folder)
    section = ModelSection(path=str(folder), weights="pretrained")
    assert model_shape(section).vision_layers == 3
    file = folder / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if ".layers.3.mlp.fc1" not in name}
    save_file(kept, file)
    with pytest.raises(
        ModelError,
        match=r"2 parameters are missing .*layers.3.mlp.fc1.bias",
    ):
        model_shape(section)


def test_layers_that_nothing_runs_are_in_no_part_of_the_chain(made: Callable[[str], Path]) -> None:
    chain = build_skeleton(load_config(str(made("llava-siglip"))), torch.float32).chain
    tower = "model.vision_tower"
    assert chain.vision_layers == tuple(f"{tower}.encoder.layers.{number}" for number in range(4))
    assert chain.kept == (0, 2)
    layers = (f"{tower}.encoder.layers.4", f"{tower}.encoder.layers.5")
    assert chain.unused == (*layers, f"{tower}.post_layernorm", f"{tower}.head")
