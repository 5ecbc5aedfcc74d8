"""Mistral 3: what the real processor makes of images, splits inside the tower, and configurations that are refused."""

import importlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.pixtral import image_processing_pil_pixtral

from autotune.model_shape import count_of_job
from tests.tiny_models import TEXT, lighton_ocr, mistral3, pixtral
from tests.values.parameters import parameters
from tests.values.training import plan_of
from trials.data.records.sample import IMAGE, Sample, Turn
from trials.errors import DataError, ModelError
from trials.job import ModelSection, TrainingSection
from trials.model.families import mistral3 as family
from trials.model.family import Images
from trials.model.inputs.chat import measurer
from trials.model.inputs.preprocessing import load_image_processor, load_tokenizer
from trials.model.plain import parity, small_copy
from trials.model.skeleton import build_skeleton, count_parameters, load_config
from trials.model.towers import pixtral_tower
from trials.workload import Part

SIZES = ((60, 130), (7, 7), (300, 50), (1, 1), (84, 84), (90, 400), (13, 27))
"""(height, width)"""
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip
VISUAL: tuple[Part, ...] = ("vision", "projector")
_PARTS = load_image_processor, load_tokenizer


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder; read it, do not change it."""
    folder = tmp_path_factory.mktemp("original")
    mistral3.make(folder)
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def real(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor of transformers. It imports the backend of torchvision, for one function that PIL's has, too."""
    module = "transformers.models.pixtral.image_processing_pixtral"
    monkeypatch.setitem(sys.modules, module, image_processing_pil_pixtral)
    kind = importlib.import_module("transformers.models.pixtral.processing_pixtral").PixtralProcessor
    image_processor, tokenizer = (load(str(folder), trust_remote_code=False) for load in _PARTS)
    return kind(image_processor, tokenizer, patch_size=6, spatial_merge_size=2)


def sample_of(folder: Path, sizes: tuple[tuple[int, int], ...]) -> Sample:
    random = np.random.default_rng(0)
    images = []
    for number, size in enumerate(sizes):
        images.append(folder / f"{number}.png")
        Image.fromarray(random.integers(0, 256, (*size, 3), dtype=np.uint8)).save(images[-1])
    turns = (
        Turn(role="user", text=f"Compare {' with '.join([IMAGE] * len(sizes))}."),
        Turn(role="assistant", text="Both are green."),
    )
    return Sample(turns=turns, images=tuple(images), image_sizes=(None,) * len(sizes))


@pytest.mark.parametrize(
    "sizes",
    parameters({str(sizes): (sizes,) for sizes in (*((size,) for size in SIZES), SIZES, ())}, short=(str(SIZES), "()")),
)
def test_a_sample_is_encoded_as_the_real_processor_does(
    folder: Path, real: Any, tmp_path: Path, sizes: tuple[tuple[int, int], ...]
) -> None:
    sample = sample_of(tmp_path, sizes)
    encoded = family.encoder(str(folder)).encode(sample, pixels=True)
    messages = [{"role": turn.role, "content": turn.text.replace(IMAGE, "[IMG]")} for turn in sample.turns]
    text = real.tokenizer.apply_chat_template(messages, tokenize=False)
    images = [Image.open(str(path)) for path in sample.images]
    expected = real(text=[text], images=[images] if images else None)
    assert encoded.input_ids.tolist() == expected["input_ids"][0].tolist()
    made = measurer(str(folder)).processor(text=[text], images=[images] if images else None, return_tensors="pt")
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], value) for name, value in expected.items())
    if images:
        shown = Images(
            pixels=torch.from_numpy(encoded.pixel_values),
            grids=torch.from_numpy(encoded.grids),
            input_ids=torch.zeros(0),
        )
        inputs = family.model_inputs(load_config(str(folder)), torch.from_numpy(encoded.input_ids), shown)
        assert inputs["image_sizes"].tolist() == expected["image_sizes"].tolist()
        assert torch.equal(inputs["pixel_values"], expected["pixel_values"])


def test_an_image_that_would_vanish_is_an_error_of_the_data(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="refuses an image of 500 x 1 pixels: shrunk to 84 pixels it would have a side"):
        family.encoder(str(folder)).encode(sample_of(tmp_path, ((1, 500),)), pixels=True)


PLANS = {
    "split in the tower": (-1, ["1+0r1,0", "3+4r1,0"]),
    "split in both": ([-1], ["2+0", "2+1r2,1", "0+3r0,1"]),
    "split between the two": (4, ["4+0r4,0", "0+4r0,4"]),
    "split in the tower, a layer unused": (3, ["1+0", "2+4r1,4"]),
    "split in the tower, two layers unused": (-3, ["1+0r1,0", "1+2", "0+2"]),
}
"""vision_feature_layer, and the stages"""


@pytest.mark.parametrize(
    "name", parameters({name: name for name in PLANS}, short=("split in the tower, a layer unused",))
)
def test_splits_inside_both_towers_compute_what_transformers_computes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    chosen, stages = PLANS[name]
    mistral3.make(folder, vision_feature_layer=chosen)
    compare(folder, monkeypatch, stages)


def test_layers_that_nothing_runs_count_as_vision_and_take_no_memory(folder: Path) -> None:
    mistral3.make(folder, vision_feature_layer=-3)
    skeleton = build_skeleton(load_config(str(folder)), torch.float32)
    counts = count_of_job(ModelSection(path=str(folder)), TrainingSection())
    assert counts.parts["vision"] == sum(each.numel() for each in skeleton.model.model.vision_tower.parameters())
    assert sum(counts.parts.values()) == skeleton.model.num_parameters()
    assert counts.every == counts.parts["language"] + sum(
        count_parameters(skeleton.model, skeleton.chain.paths_of(part)) for part in VISUAL
    )
    assert counts.every < skeleton.model.num_parameters()


@pytest.mark.parametrize(
    "text",
    [
        pytest.param({"model_type": "mistral", "sliding_window": 4}, marks=pytest.mark.long),
        {"model_type": "ministral3", "rope_parameters": YARN},
        pytest.param({"model_type": "llama"}, marks=pytest.mark.long),
    ],
    ids=lambda text: text["model_type"],
)
def test_every_language_model_that_it_comes_with_is_computed_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, text: dict[str, Any]
) -> None:
    vocabulary = load_config(str(folder)).get_text_config().vocab_size
    mistral3.make(folder, text_config={**TEXT, "head_dim": 16, "vocab_size": vocabulary, **text})
    parity.check_parity(ModelSection(path=str(folder), weights="random"))
    compare(folder, monkeypatch, ["2+0", "2+2", "0+2"])


def compare(folder: Path, monkeypatch: pytest.MonkeyPatch, stages: list[str]) -> None:
    """Compare all layers of the tiny model, split like this, with transformers' own model."""
    monkeypatch.setattr(parity, "shrunk", lambda config: config)
    monkeypatch.setattr(small_copy, "_GAIN", 1.0)  # attention of 8 layers far from uniform amplifies rounding errors
    monkeypatch.setattr(parity, "_plans", lambda _: (plan_of(*stages),))
    parity.check_parity(ModelSection(path=str(folder), weights="random"))


def test_features_of_another_layer_are_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixtral_tower, "layers_used", lambda _: 3)
    with pytest.raises(ModelError, match="differently here than by transformers"):
        compare(folder, monkeypatch, ["3+4"])


def test_pixtral_without_its_first_patch_is_refused(tmp_path: Path) -> None:
    pixtral.make(tmp_path, vision_feature_select_strategy="default")
    with pytest.raises(ModelError, match="'default', which leaves out the first patch of a Pixtral tower; set it to"):
        build_skeleton(load_config(str(tmp_path)), torch.float32)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no such layer": ({"vision_feature_layer": 5}, "vision_feature_layer 5 is not supported; it must be one of the 4"),
    "before all layers": ({"vision_feature_layer": -5}, "vision_feature_layer -5 is not supported"),
    "the embedding": ({"vision_feature_layer": 0}, "vision_feature_layer 0 is not supported"),
    "several layers": ({"vision_feature_layer": [-2, -1]}, r"vision_feature_layer \[-2, -1\] is not supported"),
    "no layer": ({"vision_feature_layer": []}, r"vision_feature_layer \[\] is not supported"),
    "no merge": ({"spatial_merge_size": 0}, "spatial_merge_size is 0; correct it in config.json to 1 to 64"),
    "large merge": ({"spatial_merge_size": 10_000}, "spatial_merge_size is 10000"),
    "image token": ({"image_token_index": 10_000}, "image_token_index is 10000 but the language model has"),
    "heads": ({"vision_config": {"num_attention_heads": 3}}, "has 3 attention heads of head_dim 8 for a hidden_size"),
    "width": ({"vision_config": {"head_dim": 2, "num_attention_heads": 16}}, "with head_dim a multiple of 4"),
    "patches": ({"vision_config": {"patch_size": [7, 7]}}, r"patch_size is \[7, 7\]; correct it in the vision_config"),
    "channels": ({"vision_config": {"num_channels": 1}}, "num_channels is 1, but images have 3"),
    "tower": ({"vision_config": {"model_type": "siglip_vision_model"}}, "'siglip_vision_model' is not supported with"),
    "positions": (
        {"vision_config": {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}},
        "mistral3' cannot be built: .*axial",
    ),
}


AGAIN = {"before all layers", "the embedding", "no layer", "large merge"}
"""Refused with the message of another one"""


@pytest.mark.parametrize("name", parameters({name: name for name in BAD}, short=BAD.keys() - AGAIN))
def test_a_configuration_that_does_not_fit_is_refused_before_it_is_built(
    original: Path, tmp_path: Path, name: str
) -> None:
    changes, message = BAD[name]
    config = json.loads((original / "config.json").read_text())
    vision = config["vision_config"] | changes.get("vision_config", {})
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes, "vision_config": vision}))
    with pytest.raises(ModelError, match=message):
        build_skeleton(load_config(str(tmp_path)), torch.float32)


PROCESSORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "patches": ("processor_config.json", {"patch_size": 14}, r"makes patches of \(size, merged\) \(14, 2\) but"),
    "merged": ("processor_config.json", {"spatial_merge_size": 1}, r"\(6, 1\) but the model takes \(6, 2\)"),
    "no resizing": (
        "preprocessor_config.json",
        {"do_resize": False},
        "do_resize of the image processor is False",
    ),
    "no scale": (
        "preprocessor_config.json",
        {"image_std": [0, 0, 0]},
        "numbers of which none is 0",
    ),
    "tokens": ("processor_config.json", {"image_break_token": "[ROW]"}, r"the tokenizer has no \[ROW\]; take the"),
    "no edge": (
        "preprocessor_config.json",
        {"size": {"longest_edge": 0}},
        "size of the image processor is .*edges in whole numbers",
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_a_processor_that_does_not_fit_is_refused(folder: Path, name: str) -> None:
    file, changes, message = PROCESSORS[name]
    settings = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**settings, **changes}))
    with pytest.raises(ModelError, match=message):
        family.encoder(str(folder))


def test_images_of_lighton_ocr_that_are_no_whole_squares_of_patches_are_refused(tmp_path: Path) -> None:
    lighton_ocr.make(tmp_path)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "patch_size": 6}))
    with pytest.raises(ModelError, match=r"multiples of .*6.*; set patch_size in preprocessor_config.json to 12"):
        family.encoder(str(tmp_path))
