"""The cost of a mixture of experts."""

from pathlib import Path

import torch

from autotune.model_shape import model_shape
from tests.tiny_models import qwen3_vl, qwen3_vl_moe
from trials.job import ModelSection
from trials.model.skeleton import build_skeleton, load_config

EXPERTS, CHOSEN = 5, 2


def test_a_token_costs_the_experts_that_are_chosen_for_it(tmp_path: Path) -> None:
    qwen3_vl_moe.make(tmp_path)
    model = build_skeleton(load_config(str(tmp_path)), torch.float32).model
    all_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    language = sum(p.numel() for name, p in model.named_parameters() if "visual" not in name and "embed" not in name)
    shape = model_shape(ModelSection(path=str(tmp_path), weights="random", dtype="float32"))
    assert round(shape.token_flops + shape.target_flops) == round(2 * (language - all_experts * (1 - CHOSEN / EXPERTS)))


def test_a_token_costs_all_of_a_model_without_experts(tmp_path: Path) -> None:
    qwen3_vl.make(tmp_path)
    model = build_skeleton(load_config(str(tmp_path)), torch.float32).model
    language = sum(p.numel() for name, p in model.named_parameters() if "visual" not in name and "embed" not in name)
    shape = model_shape(ModelSection(path=str(tmp_path), weights="random", dtype="float32"))
    assert shape.token_flops + shape.target_flops == 2 * language
