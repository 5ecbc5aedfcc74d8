"""The images of a profile: of the data's usual size, and at the beginning of the samples of language layers."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from autotune.advice import operations
from autotune.advice.data_sheets import DATA_SHEETS
from autotune.advice.operations import META, SheetProfiler
from autotune.advice.sheet_costs import SheetCosts, allocated_stage
from autotune.model_shape import model_shape
from autotune.search.execution.profiling import design
from tests.contracts.test_families import CPU, TINY, sample_of
from tests.integration.prediction.test_recommend import TRAINED
from tests.values.parameters import parameters
from tests.values.storage import WORKLOAD
from trials import plugins
from trials.data.loader import collate
from trials.job import ModelSection, TrainingSection
from trials.model.attention.samples import PackedSamples
from trials.model.family import join_samples
from trials.tasks.profiling.one_of_each import one_of_each
from trials.tasks.profiling.probes import Probe, images_of, language_probes

SIDE, IMAGES = 16, 4
SHEET = replace(DATA_SHEETS["h100"], memory_bytes_per_second=1e30)
"""Times are those of products alone."""


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2-5-vl", "pixtral"])
def test_a_pack_of_several_images_costs_what_these_cost(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "HOST_SECONDS", 0.0)  # the host takes longer to launch so small layers
    plugins.load(TINY, name).make(tmp_path)
    model, training = ModelSection(path=str(tmp_path), weights="random", dtype="float32"), TrainingSection()
    units, shape = SIDE**2, model_shape(model)
    data = replace(
        WORKLOAD.data,
        samples=10,
        text_only_samples=0,
        vision_units=10 * units,
        most_vision_units=units,
        text_tokens=600,
        longest_text_tokens=90,
    )
    cost = SheetCosts.of(SHEET, model, training, design(data, shape, (), 1, 0.0).sizes).layers["vision"]
    size = IMAGES * units
    fitted = np.array((size, 0, 0, 1)) @ (np.array(cost.forward_seconds) + np.array(cost.backward_seconds))
    fitted *= np.interp(size, cost.curve_sizes, cost.curve)

    stage = allocated_stage(model, training)
    family, config = stage.family, stage.model.config
    images = [family.random_images(config, units) for _ in range(IMAGES)]
    tokens = join_samples(family, config, [(image.input_ids, image.grids) for image in images])
    pixels = images[0].pixels.new_empty((size, *images[0].pixels.shape[1:]), device=META)
    states = family.embed_vision(stage.model, pixels, tokens).detach()
    runner = family.vision_runner(stage.model, states, tokens)
    pack = [
        Probe(
            layer="vision",
            number=number,
            share=share,
            units=size,
            states=states,
            run=partial(runner, stage.model.get_submodule(stage.chain.vision_layers[number]), number),
        )
        for number, share in stage.shares["vision"].items()
    ]
    (timing,) = SheetProfiler(stage, TRAINED, SHEET).timings(pack)
    assert fitted == pytest.approx(timing.forward_seconds + timing.backward_seconds, rel=0.05)


@pytest.mark.parametrize(
    ("units", "image_units", "expected"),
    [(9, 4, (4, 4, 1)), (8, 4, (4, 4)), (3, 4, (3,)), (7, 0, (7,)), (0, 0, (0,))],
)
def test_all_images_but_the_last_have_the_usual_size(units: int, image_units: int, expected: tuple[int, ...]) -> None:
    assert images_of(units, image_units) == expected


NAMES = [name for name in plugins.names(TINY) if not name.startswith("text")]
SHORT = ("gemma3", "paligemma", "qwen2-5-vl")


@pytest.mark.parametrize(
    "name", parameters({name: name for name in NAMES}, short=("gemma3", "paligemma", "qwen2-5-vl"))
)
def test_probes_of_language_layers_attend_as_samples_with_images_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins.load(TINY, name).make(tmp_path)
    stage = one_of_each(ModelSection(path=str(tmp_path), dtype="float32"), TrainingSection(), CPU)
    encoder = stage.family.encoder(str(tmp_path))
    batch = collate([encoder.encode(sample_of(tmp_path, 2), pixels=True)], encoder, pixels=True, padded=False)
    states = torch.randn(1, len(batch.tokens.input_ids), stage.model.config.get_text_config().hidden_size)
    made: list[PackedSamples] = []
    prepare = PackedSamples.__init__

    def note(self: PackedSamples, *given: Any, **options: Any) -> None:
        prepare(self, *given, **options)
        made.append(self)

    monkeypatch.setattr(PackedSamples, "__init__", note)
    stage.language((states,), batch.tokens)
    for length in (8, 64):  # below and above the tokens of most images
        probe = language_probes(stage, (2, length), CPU, shows=True)[0]
        probe.run(probe.states)
    expected, *found = (each.has_blocks for each in made)
    assert found == [expected] * 2
