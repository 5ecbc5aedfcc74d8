"""Towers whose layers differ: each kind is profiled, and together the layers cost what the tower does."""

from pathlib import Path

import pytest
import torch

from tests.contracts.test_families import TINY
from tests.integration.prediction.test_recommend import TRAINED
from trials import plugins
from trials.engine.memory import SavedTensorMeter
from trials.job import ModelSection, TrainingSection
from trials.model.cut import Cut
from trials.model.family import join_samples
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import draw_buffers, draw_weights
from trials.stage import Recomputed, Tower
from trials.tasks.profiling.layer_profile import Profiler
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.profiling.probes import probes
from trials.tasks.request import ProbeSizes

CPU = torch.device("cpu")
UNITS = 3


def profiled(name: str, folder: Path) -> OneOfEach:
    plugins.load(TINY, name).make(folder)
    return one_of_each(ModelSection(path=str(folder), dtype="float32"), TrainingSection(), CPU)


@pytest.mark.parametrize(
    ("name", "tower", "shares"),
    [
        ("got-ocr2", "vision", {0: 2 / 3, 1: 1 / 3}),
        ("qwen2-5-vl", "vision", {0: 0.75, 2: 0.25}),  # equal modules: the tower decides by numbers
        ("gemma3", "language", {0: 0.75, 2: 0.25}),
        ("internvl", "vision", {0: 1.0}),
    ],
)
def test_a_layer_of_each_kind_stands_for_its_share(
    name: str, tower: Tower, shares: dict[int, float], tmp_path: Path
) -> None:
    stage = profiled(name, tmp_path)
    assert stage.shares[tower] == pytest.approx(shares)
    sizes = ProbeSizes(unit_counts=(UNITS,), sample_shapes=((2, 16),))
    probed = [(each.number, each.share) for each in probes(stage, sizes, CPU) if each.layer == tower]
    assert probed == list(stage.shares[tower].items())


def test_layers_with_windows_and_without_keep_together_what_the_tower_keeps(tmp_path: Path) -> None:
    stage = profiled("got-ocr2", tmp_path)
    probed = tuple(probes(stage, ProbeSizes(unit_counts=(UNITS,)), CPU))
    timings = Profiler(stage, TRAINED, CPU, repeats=1).timings(probed)
    (vision,) = (timing for timing in timings if timing.layer == "vision")

    skeleton = build_skeleton(load_config(str(tmp_path)), torch.float32)
    layers = len(skeleton.chain.vision_layers)
    levels = (Recomputed(vision=0, language=0),)
    cut = Cut(vision=range(layers), language=(), embeds=True, projects=False, heads=False, levels=levels)
    tower = StageModule(skeleton, cut)
    draw_weights(tower.model, tower.paths, 0, CPU)
    draw_buffers(tower.model, tower.chain.buffers, CPU)
    images = tower.family.random_images(tower.model.config, UNITS)
    tokens = join_samples(tower.family, tower.model.config, [(images.input_ids, images.grids)])
    states = tower.family.embed_vision(tower.model, images.pixels, tokens).detach().requires_grad_()
    meter = SavedTensorMeter(list(tower.parameters()), 0, 1 << 62)
    with meter.watch():
        _output = tower.vision((states,), tokens)
        assert layers * vision.kept_bytes + vision.shared_bytes == pytest.approx(meter.live_bytes, abs=layers)
