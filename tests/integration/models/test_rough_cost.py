from pathlib import Path

import pytest
import transformers

from autotune.model_shape import model_shape
from autotune.packing.rough_cost import rough_weights
from trials.data.pack_cost import cost_weights
from trials.errors import ModelError
from trials.job import ModelSection
from trials.model.skeleton import load_config


def test_it_is_near_the_cost_of_a_model_that_can_be_trained_here(example: Path) -> None:
    exact = cost_weights(model_shape(ModelSection(path=str(example / "model"), weights="random")))
    rough = rough_weights(load_config(str(example / "model")))
    assert rough.unit == pytest.approx(exact.unit, rel=0.05)
    assert rough.token == pytest.approx(exact.token, rel=0.001)
    assert rough.square == exact.square
    assert rough.target == pytest.approx(exact.target, rel=0.05)


def test_llava_costs_what_its_published_shape_says() -> None:
    found = rough_weights(transformers.AutoConfig.for_model("llava"))
    tower, projector, tokens = 24 * (4 * 1024**2 + 2 * 1024 * 4096), 1024 * 4096 + 4096**2, (336 // 14) ** 2
    assert found.unit == pytest.approx(2 * (tower + projector) * tokens + 4 * 24 * tokens**2 * 1024, rel=0.01)
    language = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert found.token == pytest.approx(2 * language, rel=0.001)
    assert found.target == 2 * 32_000 * 4096


def test_a_merged_patch_is_a_unit_where_the_tower_takes_any_resolution() -> None:
    config = transformers.AutoConfig.for_model("qwen2_5_vl")
    of_patch = rough_weights(config).unit / 4
    assert config.vision_config.spatial_merge_size == 2
    config.vision_config.depth *= 2
    assert 1.5 * of_patch < rough_weights(config).unit / 4 < 2 * of_patch


def test_another_kind_of_model_is_refused() -> None:
    with pytest.raises(ModelError, match=r"the cost of model type 'bert' cannot be estimated: .*; use another model"):
        rough_weights(transformers.AutoConfig.for_model("bert"))
