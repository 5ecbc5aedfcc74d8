"""The bytes that predictions charge for a stage's states, and those that the stage gives to the next one."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autotune.advice.data_sheets import DATA_SHEETS
from autotune.advice.sheet_costs import SheetCosts
from autotune.prediction.predictor import Predictor
from tests.contracts.test_families import CPU, TINY, tokens_of
from tests.values.data import index_of
from tests.values.search import epoch_of
from trials import plugins
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.data.tokens import pack
from trials.job import ModelSection, TrainingSection
from trials.model.cut import cut
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import draw_buffers, draw_weights
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage
from trials.tasks.request import ProbeSizes

UNITS, TEXT = 6, 5
SIZES = ProbeSizes(unit_counts=(4, 8, 16), sample_shapes=((1, 16), (2, 16), (1, 64)), image_units=4)
BYTES = LinkCost(latency_seconds=0.0, seconds_per_byte=1.0)
"""Seconds of a link are the bytes that it carries."""


@pytest.fixture(scope="module", params=["qwen3-vl", "llava-siglip"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSection:
    folder = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(folder)
    return ModelSection(path=str(folder), weights="random", dtype="float32")


@pytest.fixture(scope="module")
def costs(model: ModelSection) -> LayerCosts:
    found = SheetCosts.of(DATA_SHEETS["h100"], model, TrainingSection(), SIZES).layers
    return replace(found, link=BYTES, communications=())


def test_each_stage_is_charged_the_bytes_that_it_sends(model: ModelSection, costs: LayerCosts) -> None:
    assert costs.kept_states
    chain = build_skeleton(load_config(model.path), torch.float32).chain
    vision, language = len(chain.vision_layers), len(chain.language_layers)
    plans = [plan_of(vision, language, boundary) for boundary in range(1, vision + language)]
    several = Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=vision + language, data=1, zero=0),
        stages=(*(Stage(vision=1, language=0),) * vision, *(Stage(vision=0, language=1),) * language),
    )
    sent = {plan: bytes_sent(model, plan) for plan in (*plans, several)}
    tokens = sent[several][1]
    predictor = Predictor(costs, epoch_of(index_of([(UNITS, tokens)]), 1), 4)
    for plan, (found, _) in sent.items():
        charged = predictor.times.plan_seconds(plan, predictor.sizes(plan.packing, plan.layout))
        assert charged.sends[0].tolist() == pytest.approx(found), plan.stages
        assert charged.returns[0].tolist() == pytest.approx(found), plan.stages
    # Several plans at once share the stages that are alike.
    alone = [Predictor(costs, epoch_of(index_of([(UNITS, tokens)]), 1), 4).epoch_seconds(plan) for plan in plans]
    assert predictor.plans_epoch_seconds(plans) == pytest.approx(alone, rel=1e-12)


def plan_of(vision: int, language: int, boundary: int) -> Plan:
    """Return two stages, of which the first has as many layers of the chain."""
    seen = min(boundary, vision)
    first = Stage(vision=seen, language=boundary - seen)
    return Plan(
        packing=Padded(samples=1),
        layout=Layout(pipeline=2, data=1, zero=0),
        stages=(first, Stage(vision=vision - seen, language=language - first.language)),
    )


def bytes_sent(model: ModelSection, plan: Plan) -> tuple[list[int], int]:
    """Return the bytes that each stage but the last gives to the next one for a pack, and the tokens of the pack."""
    config, sent = load_config(model.path), list[int]()
    state: Any = None
    for part in cut(plan):
        skeleton = build_skeleton(config, torch.float32)
        stage = StageModule(skeleton, part)
        draw_weights(stage.model, stage.paths, 0, CPU)
        draw_buffers(stage.model, stage.chain.buffers, CPU)
        if state is None:
            images = stage.family.random_images(config, UNITS)
            tokens = tokens_of(stage.family, config, images, behind=[0] * TEXT)
            state = pack((images.pixels,), tokens)
        state = stage(state)
        if not part.heads:
            sent.append(state[0].numel() * state[0].element_size())
    return sent, len(tokens.input_ids)
