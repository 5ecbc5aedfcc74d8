"""Adapters that do not fit the model are refused before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.model_shape import model_shape
from tests.contracts.test_families import TINY
from trials import plugins
from trials.data.pack_cost import cost_weights
from trials.errors import ModelError
from trials.job import ModelSection, TrainingSection
from trials.model.skeleton import build_skeleton, load_config
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_weights


def section(folder: Path) -> ModelSection:
    return ModelSection(path=str(folder), weights="random", dtype="bfloat16")


def training(**settings: Any) -> TrainingSection:
    if "lora" in settings:
        settings["lora"] = {"rank": 8, **settings["lora"]}
    return TrainingSection.model_validate(settings)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            {"targets": ["q_proj", "query_key_value"]},
            "training.lora.targets: query_key_value is no module of language; known there: q_proj, k_proj, v_proj, "
            "o_proj, gate_proj, up_proj, down_proj",
        ),
        (
            {"targets": ["layers.0.self_attn.q_proj"]},
            "training.lora.targets: layers.0.self_attn.q_proj leaves 1 of the 2 layers",
        ),
        ({"targets": ["_proj"]}, "training.lora.targets: _proj is no module of language"),
        ({"targets": ["input_layernorm"]}, "training.lora.targets: input_layernorm is no linear layer of language"),
        ({"targets": ["lm_head"]}, "training.lora.targets: lm_head is no module of language"),
        ({"targets": ["gate_proj"], "parts": ["vision"]}, "training.lora.targets: gate_proj is no module of vision"),
    ],
)
def test_targets_that_are_no_linear_layer_of_the_parts_are_refused_with_those_that_are(
    lora: dict[str, Any], message: str, shallow: Path
) -> None:
    with pytest.raises(ModelError) as raised:
        model_shape(section(shallow / "model"), training(lora=lora))
    assert str(raised.value).startswith(message)


def test_a_projector_with_a_weight_outside_modules_cannot_be_saved_with_an_adapter(tmp_path: Path) -> None:
    plugins.load(TINY, "llava-next").make(tmp_path)
    with pytest.raises(ModelError, match=r"train_projector: model\.image_newline is a weight outside modules"):
        model_shape(section(tmp_path), training(lora={"train_projector": True}))
    assert model_shape(section(tmp_path), training(lora={"parts": ["projector"]})).trained == (
        "projector with LoRA of rank 8 on all linear layers"
    )


@pytest.mark.parametrize("freeze", [["language"], ["vision", "language"]])
def test_a_freeze_that_leaves_nothing_to_train_is_refused(freeze: list[str], tmp_path: Path) -> None:
    plugins.load(TINY, "text").make(tmp_path)
    with pytest.raises(ModelError, match=r"leaves nothing of the model to train; remove a part"):
        model_shape(section(tmp_path), training(freeze=freeze))


def test_what_trains_is_part_of_the_models_key_and_of_the_cost_of_packs(shallow: Path) -> None:
    whole = model_shape(section(shallow / "model"))
    settings = [
        training(),
        training(freeze=["vision"]),
        training(freeze=["vision", "projector"]),
        training(lora={}),
        training(lora={"rank": 16}),
        training(lora={"targets": ["q_proj"]}),
        training(lora={"train_projector": True}),
        training(compile=True),
        training(compile=True, freeze=["vision"]),
    ]
    shapes = [model_shape(section(shallow / "model"), each) for each in settings]
    assert shapes[0] == whole
    assert whole.trained is None
    assert len({shape.fingerprint for shape in shapes}) == len(shapes)
    assert {shape.parameters for shape in shapes} == {whole.parameters}
    assert shapes[1].trained == "projector; language"
    assert shapes[6].trained == "projector; language with LoRA of rank 8 on all linear layers"
    assert (shapes[7].trained, shapes[7].compiler) == (None, "inductor")
    assert (shapes[8].trained, shapes[8].compiler) == ("projector; language", "inductor")
    usual, frozen, lora = (cost_weights(shapes[number]) for number in (0, 1, 3))
    # Of three passes a frozen tower has one, and layers that only hand a gradient on have two.
    assert (usual.unit, usual.token, usual.target) == (whole.unit_flops, whole.token_flops, whole.target_flops)
    assert (frozen.unit, frozen.token, frozen.target) == pytest.approx((usual.unit / 3, usual.token, usual.target))
    assert (lora.unit, lora.token) == pytest.approx((usual.unit / 3, usual.token * 2 / 3))
    assert lora.target == pytest.approx(usual.target * 2 / 3)


def test_adapters_are_drawn_alike_whatever_else_a_stage_holds_and_leave_the_models_weights(example: Path) -> None:
    lora = training(lora={"rank": 2})
    path = str(example / "model")
    drawn = []
    for count in (1, 3):
        skeleton = build_skeleton(load_config(path), torch.float32)
        choose_trained(skeleton, lora)
        paths = skeleton.chain.language_layers[3 - count : 3]
        draw_weights(skeleton.model, paths, 7, torch.device("cpu"))
        draw_trained(skeleton.model, paths, lora)
        drawn.append(dict(skeleton.model.get_submodule(paths[-1]).named_parameters()))
    assert drawn[0].keys() == drawn[1].keys()
    assert all(torch.equal(drawn[0][name], drawn[1][name]) for name in drawn[0])
    plain = build_skeleton(load_config(path), torch.float32)
    draw_weights(plain.model, plain.chain.language_layers[2:3], 7, torch.device("cpu"))
    for name, parameter in plain.model.get_submodule(plain.chain.language_layers[2]).named_parameters():
        module, _, kind = name.rpartition(".")
        own = f"{module}.base_layer.{kind}"
        assert torch.equal(drawn[0][own if own in drawn[0] else name], parameter)
    adapters = {name: tensor for name, tensor in drawn[0].items() if "lora_" in name}
    assert all(("lora_A" in name) == bool(tensor.any()) for name, tensor in adapters.items())
    assert all(tensor.requires_grad == (name in adapters) for name, tensor in drawn[0].items())
