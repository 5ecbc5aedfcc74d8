"""The optimizer's groups hold every parameter of a stage once, in every family."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.values.parameters import parameters
from trials import plugins
from trials.engine.optimizer import build_optimizer, scale_learning_rates
from trials.job import PARTS, TrainingSection
from trials.model.cut import Cut
from trials.model.paths import parameters_at
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.trained import choose_trained
from trials.stage import Recomputed
from trials.workload import Part

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
TOWERS = {"visual", "vision_model", "vision_tower", "vision_encoder"}
IN_TOWERS = {"merger", "deepstack_merger_list", "downsample"}
"""What merges patches or projects: it is of the projector, though inside of the tower's module."""
LANGUAGE = {"language_model", "text_model", "lm_head"}
TRAINING = TrainingSection.model_validate(
    {"learning_rate": 3.0, "learning_rates": {"vision": 1.0, "projector": 2.0}, "weight_decay": 0.5}
)


@pytest.fixture(
    scope="module",
    params=parameters(
        {name: name for name in plugins.names(TINY)},
        short=("internvl", "qwen2-5-vl", "qwen3-vl", "gemma3", "text-experts"),
    ),
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    model: Path = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(model)
    return str(model)


def stage_of(folder: str, *, whole: bool) -> StageModule:
    """The whole model, or its last stage with one language layer."""
    skeleton = build_skeleton(load_config(folder), torch.float32)
    vision, language = len(skeleton.chain.vision_layers), len(skeleton.chain.language_layers)
    stage = StageModule(
        skeleton,
        Cut(
            vision=range(0 if whole else vision, vision),
            language=range(0 if whole else language - 1, language),
            levels=(Recomputed(vision=0, language=0),),
            embeds=whole,
            projects=whole,
            heads=True,
        ),
    )
    stage.tie()
    return stage


def test_every_parameter_has_the_rate_of_its_part_and_the_decay_of_its_form(folder: str) -> None:
    stage = stage_of(folder, whole=True)
    groups = build_optimizer(stage, TRAINING).param_groups
    rates = {parameter: group["lr"] for group in groups for parameter in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(rates)
    assert set(rates) == set(stage.parameters())
    assert all(group["params"] for group in groups)
    chain = stage.chain
    for rate, paths in (
        (1, chain.paths_of("vision")),
        (2, chain.paths_of("projector")),
        (3, chain.paths_of("language")),
    ):
        found = {rates[parameter] for path in paths for _, parameter in parameters_at(stage.model, path)}
        assert found <= {rate}
        assert found or not paths
    for group in groups:
        assert {parameter.ndim > 1 for parameter in group["params"]} == {group["weight_decay"] > 0}


def test_a_part_that_does_not_train_is_all_of_its_modules(folder: str) -> None:
    parts: tuple[Part, ...] = ("vision", "projector")
    for part in parts:
        skeleton = build_skeleton(load_config(folder), torch.float32)
        if not skeleton.chain.vision_layers:
            return
        choose_trained(skeleton, TrainingSection(freeze=tuple(each for each in PARTS if each != part)))
        used = {id(each) for path in skeleton.chain.parts for _, each in parameters_at(skeleton.model, path)}
        trained = {name for name, each in skeleton.model.named_parameters() if each.requires_grad}
        named = {
            name
            for name, each in skeleton.model.named_parameters()
            if id(each) in used and not LANGUAGE & set(name.split(".")) and is_of_tower(name) == (part == "vision")
        }
        assert trained == named


def is_of_tower(name: str) -> bool:
    modules = set(name.split("."))
    return bool(TOWERS & modules) and not IN_TOWERS & modules


def test_a_stage_has_only_groups_of_its_own_parameters(folder: str) -> None:
    stage = stage_of(folder, whole=False)
    groups = build_optimizer(stage, TRAINING).param_groups
    assert sorted((group["lr"], group["weight_decay"]) for group in groups) == [(3, 0), (3, 0.5)]


@pytest.mark.parametrize("folder", ["internvl"], indirect=True)
def test_a_factor_scales_the_configured_rates(folder: str) -> None:
    optimizer = build_optimizer(stage_of(folder, whole=True), TRAINING)
    before = [group["lr"] for group in optimizer.param_groups]
    for factor in (0.0, 0.5):
        scale_learning_rates(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [rate * factor for rate in before]
