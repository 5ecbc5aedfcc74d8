"""Loss and gradients of encoded samples, in packs and over stages, are those of transformers' model on each sample."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import PretrainedConfig, PreTrainedModel

from tests.contracts.test_families import TINY
from trials import plugins
from trials.data.loader import collate
from trials.data.records.images import image_size
from trials.data.records.sample import IMAGE, Encoded, Encoder, Sample, Turn
from trials.data.tokens import pack
from trials.model import parity
from trials.model.cut import cut
from trials.model.family import Family, Images, load_family
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule, pack_loss
from trials.plan import Layout, Packed, Plan, Stage

SHAPES = (
    ((40, 90),),
    (),
    ((33, 21), (60, 60)),
    ((130, 40),),
    ((28, 30),),
    ((17, 80), (90, 20), (50, 50)),
)
"""(height, width) of the images of each sample."""
PACKING = Packed(qv=100, qt=10_000, qv_min=0, qt_min=0)
SPLITS = {
    "one stage": False,
    "inside the vision tower": True,
    "behind the projector": True,
    "three stages, everything recomputed": False,
}
"""Of the model over stages, with whether its samples are padded."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """transformers' own model of a tiny configuration, with what it makes of the samples one by one."""

    model: PreTrainedModel
    encoder: Encoder
    encoded: tuple[Encoded, ...]
    blank: Encoded
    """Of the lengths of the first sample."""
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small layers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=plugins.names(TINY))
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(folder)
    config = load_config(str(folder))
    family = load_family(config)
    encoder = family.encoder(str(folder))
    samples = [drawn_sample(folder, number, shapes) for number, shapes in enumerate(SHAPES)]
    encoded = tuple(encoder.encode(sample, pixels=True) for sample in samples)
    first = encoder.measure(samples[0], tuple(image_size(image) for image in samples[0].images))
    model = parity._plain_model(config)
    results = parity._plain_results(model, tuple(given(family, each) for each in encoded))
    return Plain(
        model=model,
        encoder=encoder,
        encoded=encoded,
        blank=encoder.blank(first, pixels=True),
        loss=results.loss,
        gradients=results.gradients,
    )


def drawn_sample(folder: Path, number: int, shapes: Sequence[tuple[int, int]]) -> Sample:
    """A conversation of two exchanges about images of noise."""
    noise = np.random.default_rng(number)
    images = tuple(folder / f"{number}-{place}.png" for place in range(len(shapes)))
    for path, (height, width) in zip(images, shapes, strict=True):
        Image.fromarray(noise.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    turns = (
        Turn(role="user", text=f"{IMAGE * len(images)}What is in the picture {number}?"),
        Turn(role="assistant", text="A red circle."),
        Turn(role="user", text="Sure?"),
        Turn(role="assistant", text="Both are green. " * (number + 1)),
    )
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def given(family: Family, encoded: Encoded) -> parity._Sample:
    """The sample as transformers' model takes it."""
    ids, pixels = torch.from_numpy(encoded.input_ids), encoded.pixel_values
    images = None
    if pixels is not None:
        images = Images(pixels=torch.from_numpy(pixels), grids=torch.from_numpy(encoded.grids), input_ids=ids)
    return parity._Sample(input_ids=ids, labels=torch.from_numpy(encoded.labels), images=images)


def plan_of(config: PretrainedConfig, split: str) -> Plan:
    chain = build_skeleton(config, torch.float32).chain
    vision, language = len(chain.vision_layers), len(chain.language_layers)
    half, rest = vision // 2, vision - vision // 2
    stages = {
        "one stage": [Stage(vision=vision, language=language, recompute_vision=1, recompute_language=language - 1)],
        "inside the vision tower": [Stage(vision=half, language=0), Stage(vision=rest, language=language)],
        "behind the projector": [Stage(vision=vision, language=1), Stage(vision=0, language=language - 1)],
        "three stages, everything recomputed": [
            Stage(vision=1, language=0, recompute_vision=1),
            Stage(vision=vision - 1, language=1, recompute_vision=vision - 1, recompute_language=1),
            Stage(vision=0, language=language - 1, recompute_language=language - 1),
        ],
    }[split]
    return Plan(packing=PACKING, layout=Layout(pipeline=len(stages), data=1, zero=0), stages=tuple(stages))


def staged(
    plain: Plain, split: str, samples: Sequence[Encoded], *, padded: bool
) -> tuple[torch.Tensor, list[StageModule]]:
    """Return the loss of one pack, and the stages with their gradients."""
    plan = plan_of(plain.config, split)
    stages = [parity._stage(plain.config, plan, number, plain.model) for number in range(len(cut(plan)))]
    batch = collate(samples, plain.encoder, pixels=True, padded=padded)
    assert batch.pixel_values is not None
    state = pack((batch.pixel_values,), batch.tokens)
    for stage in stages:
        state = stage(state)
    loss = pack_loss(state, (batch.labels, torch.tensor(1.0)))  # type: ignore[arg-type]  # the last gives logits
    loss.backward()
    return loss.detach(), stages


def gradients_of(stages: Sequence[StageModule]) -> dict[str, torch.Tensor]:
    """The gradients of all stages; those of a tied weight on two of them add up."""
    found: dict[str, torch.Tensor] = {}
    for stage in stages:
        for name, gradient in parity._gradients(stage.model).items():
            original = stage.tied.get(name, name)
            found[original] = found.get(original, 0) + gradient
    return found


def assert_same(plain: Plain, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> None:
    torch.testing.assert_close(loss, plain.loss, rtol=1e-4, atol=0)
    every = torch.stack([gradient.norm() for gradient in plain.gradients.values()]).norm()
    assert gradients.keys() >= plain.gradients.keys()
    for name, found in gradients.items():
        expected = plain.gradients.get(name, torch.zeros(()))
        assert (found - expected).norm() <= 1e-4 * (expected.norm() + 1e-2 * every), name


@pytest.mark.parametrize(("split", "padded"), SPLITS.items(), ids=SPLITS)
def test_a_pack_has_the_loss_and_gradients_of_its_samples(plain: Plain, split: str, padded: bool) -> None:
    loss, stages = staged(plain, split, plain.encoded, padded=padded)
    assert_same(plain, loss, gradients_of(stages))


def test_a_blank_sample_changes_nothing_for_those_around_it(plain: Plain) -> None:
    samples = (plain.encoded[0], plain.blank, *plain.encoded[1:])
    loss, stages = staged(plain, "inside the vision tower", samples, padded=False)
    assert_same(plain, loss, gradients_of(stages))


def test_a_pack_without_images_has_a_gradient_for_every_parameter(plain: Plain) -> None:
    # Ranks that exchange gradients must have the same ones.
    text = [each for each in plain.encoded if each.pixel_values is None]
    _, stages = staged(plain, "inside the vision tower", text, padded=False)
    assert all(parameter.grad is not None for stage in stages for parameter in stage.parameters())
