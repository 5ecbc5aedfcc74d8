"""Weights are read by the model's own names from every layout that transformers reads, and refused with a way out."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, PreTrainedModel

from autotune.model_shape import model_shape
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.conversion import find_origins, stored_form
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.weights import WeightFiles, read_weights

PUBLISHED = {
    "lm_head.": "language_model.lm_head.",
    "model.language_model.": "language_model.model.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}
"""Names in memory, and those of OpenGVLab's checkpoints in Hugging Face form."""
SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
MERGED = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, **SMALL}
SPLIT = {"model_type": "hrm_text", **SMALL}
COMPUTED = {"model_type": "gemma3_text", **SMALL}
SINGLE = "model.safetensors"


def as_transformers_saves(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder)


def in_shards(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, max_shard_size="100KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def as_in_memory(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, save_original_format=False)


def as_published(model: PreTrainedModel, folder: Path) -> None:
    tensors = {}
    for name, parameter in model.named_parameters():
        start = next(start for start in PUBLISHED if name.startswith(start))
        tensors[PUBLISHED[start] + name.removeprefix(start)] = parameter.detach()
    # Of versions in which each layer had a buffer of its own; transformers passes over it.
    old = {"language_model.model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file({**tensors, **old}, folder / SINGLE)


def section(folder: Path) -> ModelSection:
    return ModelSection(path=str(folder), dtype="float32")


def skeleton_of(folder: Path) -> Skeleton:
    return build_skeleton(load_config(str(folder)), torch.float32)


def loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model


def check_equal(folder: Path) -> Skeleton:
    """Reads every part, and compares with what `from_pretrained` loads."""
    model_shape(section(folder))
    skeleton, expected = skeleton_of(folder), loaded(folder)
    files = WeightFiles(folder, skeleton)
    read_weights(skeleton.model, skeleton.chain.parts, files, torch.device("cpu"))
    tensors = {**expected.state_dict(), **dict(expected.named_buffers())}
    for part in skeleton.chain.parts:
        module = skeleton.model.get_submodule(part)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            assert torch.equal(tensor, tensors[f"{part}.{name}"]), f"{part}.{name}"
    return skeleton


LAYOUTS = {
    f"{save.__name__}, {'tied' if tied else 'untied'}": (save, tied)
    for save in (as_transformers_saves, in_shards, as_in_memory, as_published)
    for tied in (False, True)
}


@pytest.mark.parametrize(
    ("save", "tied"),
    parameters(LAYOUTS, short=("in_shards, tied", "as_in_memory, untied", "as_published, tied")),
)
def test_weights_are_read_from_every_layout_of_files(
    save: Callable[[PreTrainedModel, Path], None], tied: bool, shallow: Path, tmp_path: Path
) -> None:
    model = saved_model(shallow, tmp_path, tied=tied)
    (tmp_path / SINGLE).unlink()
    save(model, tmp_path)
    check_equal(tmp_path)


@pytest.mark.parametrize(
    "text",
    [MERGED, COMPUTED],
    ids=["experts that are merged", "a buffer that no file holds"],
)
def test_weights_of_other_language_models_are_read_and_saved_as_transformers_does(
    text: dict[str, Any], shallow: Path, tmp_path: Path
) -> None:
    model = saved_model(shallow, tmp_path, text=text)
    skeleton = check_equal(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    own = {name: tensor for name, tensor in model.state_dict().items() if name not in skeleton.tied}
    ours = stored_form(skeleton.model, own)
    assert ours.keys() == stored.keys() != own.keys()
    assert all(torch.equal(ours[name], stored[name]) for name in stored)


def test_tensors_that_transformers_splits_are_split_and_joined_again(shallow: Path, tmp_path: Path) -> None:
    model = saved_model(shallow, tmp_path, text=SPLIT)
    stored, own = load_file(tmp_path / SINGLE), model.state_dict()
    made: dict[str, torch.Tensor] = {}
    for origin in find_origins(model, stored):
        made |= origin.make(model, stored.__getitem__)
    assert made.keys() == own.keys()
    assert len(made) > len(stored)
    assert all(torch.equal(made[name], own[name]) for name in own)
    joined = stored_form(model, own)
    assert joined.keys() == stored.keys()
    assert all(torch.equal(joined[name], stored[name]) for name in stored)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file(tensors, folder / SINGLE)


HEAD, EMBEDDING = "language_model.lm_head.weight", "language_model.model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("tied", "change", "message"),
    [
        (
            False,
            lambda tensors: tensors.pop(HEAD),
            r"1 parameters are missing and 0 are unknown, .* lm_head.weight; a f",
        ),
        (True, lambda tensors: tensors.pop(EMBEDDING), r"2 parameters are missing"),
        (False, lambda tensors: tensors.update({"lm_head.weight": tensors[HEAD] + 1}), r"twice, as .* remove one of"),
    ],
    ids=["missing", "tied and missing", "twice"],
)
def test_weights_that_would_not_be_the_models_own_are_refused(
    tied: bool, change: Callable[[dict[str, torch.Tensor]], object], message: str, shallow: Path, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path, tied=tied)
    edit(tmp_path, change)
    with pytest.raises(ModelError, match=message) as refused:
        model_shape(section(tmp_path))
    assert "save_pretrained" not in str(refused.value)  # that would draw what is missing at random


@pytest.mark.parametrize(
    "change", [lambda embedding: embedding + 1, lambda embedding: embedding.half()], ids=["values", "type"]
)
def test_matrices_that_differ_are_not_tied_whatever_the_configuration_says(
    change: Callable[[torch.Tensor], torch.Tensor], shallow: Path, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path, tied=True)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: change(tensors[EMBEDDING])}))
    assert not check_equal(tmp_path).tied


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
        lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
    ],
    ids=["both names", "the other name"],
)
def test_a_tied_weight_is_read_by_either_of_its_names(
    change: Callable[[dict[str, torch.Tensor]], object], shallow: Path, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path, tied=True)
    edit(tmp_path, change)
    check_equal(tmp_path)


def test_unknown_weights_are_refused_until_they_are_left_out_as_the_message_says(shallow: Path, tmp_path: Path) -> None:
    saved_model(shallow, tmp_path / "saved")
    edit(tmp_path / "saved", lambda tensors: tensors.update({"vision_tower.extra": torch.ones(2)}))
    with pytest.raises(
        ModelError, match=r"0 parameters are missing and 1 are unknown, .* vision_tower.extra; .* leave"
    ):
        model_shape(section(tmp_path / "saved"))
    loaded(tmp_path / "saved").save_pretrained(tmp_path / "again")
    model_shape(section(tmp_path / "again"))


@pytest.mark.parametrize("part", ["up_proj", "down_proj"])
def test_an_expert_that_is_missing_is_refused(part: str, shallow: Path, tmp_path: Path) -> None:
    saved_model(shallow, tmp_path, text=MERGED)
    edit(tmp_path, lambda tensors: tensors.pop(f"language_model.model.layers.1.mlp.experts.2.{part}.weight"))
    with pytest.raises(ModelError, match=r"experts.(gate_up_proj cannot be made of 7|down_proj has shape \(3, )"):
        model_shape(section(tmp_path))


def test_an_index_that_names_a_weight_that_no_file_holds_is_refused(shallow: Path, tmp_path: Path) -> None:
    in_shards(saved_model(shallow, tmp_path), tmp_path)
    (tmp_path / SINGLE).unlink(missing_ok=True)
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["gone"] = document["weight_map"][HEAD]
    index.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"does not hold gone, as model.safetensors.index.json says"):
        model_shape(section(tmp_path))


def test_a_tensor_is_read_from_its_own_file_alone(shallow: Path, tmp_path: Path) -> None:
    model = saved_model(shallow, tmp_path)
    (tmp_path / SINGLE).unlink()
    in_shards(model, tmp_path)
    files = WeightFiles(tmp_path, skeleton_of(tmp_path))
    kept = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"][HEAD]
    for path in tmp_path.glob("model-*.safetensors"):
        if path.name != kept:
            shutil.move(path, f"{path}.gone")
    assert torch.equal(files.read("lm_head.weight"), model.state_dict()["lm_head.weight"])
