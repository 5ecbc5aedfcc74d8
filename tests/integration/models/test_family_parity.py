"""Stages of every family compute what transformers computes from its own processor's inputs, sample by sample."""

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel

from tests.values.parameters import parameters
from trials import plugins
from trials.data.loader import MicroBatch, collate
from trials.data.records.images import image_pixels
from trials.data.records.sample import IMAGE, VIDEO, Encoded, Encoder, Lengths, Sample, Turn, Video
from trials.data.tokens import pack
from trials.errors import DataError
from trials.model.cut import cut
from trials.model.ends.head_loss import targets_of
from trials.model.family import Family, load_family, prompt_types
from trials.model.inputs.chat_encoder import ChatEncoder
from trials.model.paths import parameters_at
from trials.model.skeleton import build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import draw_buffers, draw_weights
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
CPU = torch.device("cpu")
SHAPES = {"wide": (30, 150), "tall": (120, 25), "square": (42, 42), "large": (90, 130), "small": (9, 14)}
PACKS = (
    (("wide", "large"), (), ("square",)),
    ((), ()),  # as a data rank has it that got no image
    (("small",), ("tall", "square", "wide")),
)
"""The images of each sample of each pack."""
FILMS = {"film": (5, 30, 44, None), "clip": (5, 58, 20, 0.7)}
"""(frames, height, width, frames per second) of videos."""
FILMED = ((("film",), ("square", "clip"), (), ("film", "small", "clip")), (("wide", "tall"), ("clip",)))
"""Packs for models that take videos, too."""


@dataclass(frozen=True)
class Case:
    """A tiny model with weights, and samples for it."""

    folder: Path
    config: PretrainedConfig
    family: Family
    encoder: Encoder
    model: PreTrainedModel
    packs: tuple[tuple[Sample, ...], ...]

    @cached_property
    def layers(self) -> tuple[int, int]:
        chain = build_skeleton(self.config, torch.float32).chain
        return len(chain.vision_layers), len(chain.language_layers)

    @cached_property
    def names(self) -> set[str]:
        """The parameters that are trained."""
        skeleton = build_skeleton(self.config, torch.float32)
        return {
            skeleton.tied.get(name, name)
            for path in skeleton.chain.parts
            for name, _ in parameters_at(skeleton.model, path)
        }

    @property
    def image_token(self) -> int:
        return int(getattr(self.config, "image_token_id", -1))

    @cached_property
    def reference(self) -> dict[str, torch.Tensor]:
        """Gradients of the sum of all targets' losses, by parameter, and the `loss` itself."""
        total = torch.zeros(())
        for sample, encoded in zip(chain(*self.packs), chain(*self.encoded), strict=True):
            logits = self.model(**self.inputs(sample, encoded)).logits[0]
            loss = cross_entropy(logits[:-1], torch.from_numpy(encoded.labels)[1:], reduction="sum")
            loss.backward()
            total += loss.detach()
        return {"loss": total} | {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    @cached_property
    def encoded(self) -> list[list[Encoded]]:
        return [[self.encoder.encode(sample, pixels=True) for sample in samples] for samples in self.packs]

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def inputs(self, sample: Sample, encoded: Encoded) -> dict[str, Any]:
        """What the model's own processor makes of the sample."""
        assert isinstance(self.encoder, ChatEncoder)
        processor = self.encoder.measurer.processor
        pictures = [Image.fromarray(image_pixels(image)) for image in sample.images]
        if sample.videos:
            if self.config.model_type.startswith("glm4v"):
                return filmed_inputs_of_glm(self.config, sample, encoded)
            made = dict(processor.image_processor([pictures], return_tensors="pt")) if pictures else {}
            return made | filmed_inputs(self.config, sample, encoded)
        text = self.encoder.measurer.template.rendered(sample.turns)
        # InternVL's training divides the tiles of an image among the images of a sample.
        is_divided = self.config.model_type == "internvl" and pictures
        shared = {"max_patches": max(1, processor.image_processor.max_patches // len(pictures))} if is_divided else {}
        if not self.layers[0]:
            made = processor.tokenizer(text=[text], return_tensors="pt")
        else:
            # As one sample's: LLaVA-OneVision takes the images of a plain list as those of one sample each.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy, of how GLM's processor reads a tensor
                made = processor(images=[pictures] if pictures else None, text=[text], return_tensors="pt", **shared)
        assert made["input_ids"][0].tolist() == encoded.input_ids.tolist()
        return dict(made) | prompt_types(torch.from_numpy(encoded.positions))


def filmed_inputs(config: PretrainedConfig, sample: Sample, encoded: Encoded) -> dict[str, Any]:
    """Ids and videos as transformers' processors give them; the model itself computes the positions of the tokens."""
    ids, marks = torch.from_numpy(encoded.input_ids), re.findall(f"{IMAGE}|{VIDEO}", sample.turns[0].text)
    assert encoded.pixel_values is not None
    grids = torch.from_numpy(encoded.grids)
    in_patches = config.model_type.startswith("qwen")
    units = [int(grid.prod()) // 4 if in_patches else int(grid[0]) for grid in grids]
    parts = zip(torch.from_numpy(encoded.pixel_values).split(units), marks, strict=True)
    videos = [part for part, mark in parts if mark == VIDEO]
    if not in_patches:
        return {"input_ids": ids[None], "pixel_values_videos": torch.stack(videos)}
    made = {
        "input_ids": ids[None],
        "pixel_values_videos": torch.cat(videos).flatten(0, 1),
        "video_grid_thw": grids[torch.tensor([mark == VIDEO for mark in marks])],
        "mm_token_type_ids": ((ids == config.image_token_id) + 2 * (ids == config.video_token_id)).int()[None],
    }
    if config.model_type == "qwen2_5_vl":
        made["second_per_grid_ts"] = torch.tensor([2 / (video.fps or 2.0) for video in sample.videos])
    return made


def filmed_inputs_of_glm(config: PretrainedConfig, sample: Sample, encoded: Encoded) -> dict[str, Any]:
    """The same for GLM, whose tokens of videos are those of images."""
    ids, grids = torch.from_numpy(encoded.input_ids), torch.from_numpy(encoded.grids)
    assert encoded.pixel_values is not None
    pixels, shown = torch.from_numpy(encoded.pixel_values).flatten(0, 1), (ids == config.image_token_id).int()[None]
    if not sample.images:
        videos = {"pixel_values_videos": pixels, "video_grid_thw": grids, "mm_token_type_ids": 2 * shown}
        return {"input_ids": ids[None], **videos}
    # transformers' model refuses both in one sample, so that each layer of frames is given as an image.
    layers = torch.tensor([(1, *size) for frames, *size in grids.tolist() for _ in range(frames)])
    return {"input_ids": ids[None], "pixel_values": pixels, "image_grid_thw": layers, "mm_token_type_ids": shown}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small layers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHORT = ("qwen2-5-vl", "qwen3-vl-moe", "gemma3", "llava-onevision")
"""Families that between them have windows, inner features, experts, blocks of image tokens, crops and videos."""


def families(*short: str) -> list[Any]:
    return parameters({name: name for name in plugins.names(TINY)}, short=short)


@pytest.fixture(scope="module", params=families(*SHORT))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder: Path = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(folder)
    config = load_config(str(folder))
    family = load_family(config)
    for name, (height, width) in SHAPES.items():
        noise = np.random.default_rng(len(name)).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{name}.png")
    for name, (frames, height, width, _) in FILMS.items():
        (folder / name).mkdir()
        noise = np.random.default_rng(frames).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)
        for number, frame in enumerate(noise):
            Image.fromarray(frame).save(folder / name / f"{number}.png")
    encoder = family.encoder(str(folder))
    shows = bool(build_skeleton(config, torch.float32).chain.vision_layers)
    wanted = PACKS if encoder.no_videos else PACKS + FILMED
    packs = tuple(tuple(sample_of(folder, names, shows=shows) for names in samples) for samples in wanted)
    return Case(folder, config, family, encoder, plain_model(config, family), packs)


def test_videos_are_those_of_the_families_that_take_them(case: Case) -> None:
    kinds = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava_onevision", "llava_next_video")
    takes = case.config.model_type.startswith(kinds)
    assert (case.encoder.no_videos is None) == takes
    if not takes:
        sample = sample_of(case.folder, ("film",), shows=True)
        of_images, of_text = "is not supported for this model; give the frames", "takes text alone; take the record out"
        reason = of_images if case.encoder.takes_images else of_text
        with pytest.raises(DataError, match=f"shows a video, .*{reason}"):
            case.encoder.encode(sample, pixels=True)


def sample_of(folder: Path, names: Sequence[str], *, shows: bool) -> Sample:
    """A conversation about images and videos; without them where it `shows` none."""
    shown = names if shows else ()
    marks = "".join(VIDEO if name in FILMS else IMAGE for name in shown)
    text = f"Compare {marks} with a circle" if names else "What is red?"
    turns = (
        Turn(role="user", text=text),
        Turn(role="assistant", text=f"It is {', '.join(names) or 'nothing'}."),
        Turn(role="user", text="Why?"),
        Turn(role="assistant", text="So it is."),
    )
    images = tuple(folder / f"{name}.png" for name in shown if name not in FILMS)
    videos = tuple(Video(source=folder / name, fps=FILMS[name][3]) for name in shown if name in FILMS)
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images), videos=videos)


def plain_model(config: PretrainedConfig, family: Family) -> PreTrainedModel:
    """transformers' own model, with weights that let attention and norms show."""
    model: PreTrainedModel = family.AUTO_MODEL.from_config(config, dtype=torch.float32, attn_implementation="eager")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() < 2 else 1.5 / parameter[0].numel() ** 0.5
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=scale)
    model.train()
    return model


def batches(case: Case, *, padded: bool, with_blanks: bool = False) -> list[MicroBatch]:
    """The packs; `with_blanks` puts a blank sample of the same lengths before each sample."""
    packs = case.encoded
    if with_blanks:
        packs = [[each for sample in samples for each in (blank_of(case, sample), sample)] for samples in packs]
    return [collate(samples, case.encoder, pixels=True, padded=padded) for samples in packs]


def blank_of(case: Case, encoded: Encoded) -> Encoded:
    units = 0 if encoded.pixel_values is None else len(encoded.pixel_values)
    lengths = Lengths(vision_units=units, text_tokens=len(encoded.input_ids), target_tokens=0)
    return case.encoder.blank(lengths, pixels=True)


def plans(vision: int, language: int) -> dict[str, tuple[bool, tuple[Stage, ...]]]:
    """(padded, stages): splits inside both towers; nothing, some and all recomputed."""
    half, middle = vision // 2, language // 2
    later, last = vision - half, language - middle
    return {
        "one stage": (False, held((vision, language, 0, 0))),
        "inside the vision tower": (False, held((half, 0, half // 2, 0), (later, language, min(1, later), 1))),
        "inside both towers, all recomputed, padded": (
            True,
            held((half, 0, half, 0), (later, middle, later, middle), (0, last, 0, last)),
        ),
        "behind the first language layer, padded": (True, held((vision, 1, 0, 0), (0, language - 1, 0, 0))),
    }


def held(*counts: tuple[int, int, int, int]) -> tuple[Stage, ...]:
    """Stages with (vision, language) layers and those recomputed, without the stages that would hold none."""
    return tuple(
        Stage(vision=vision, language=language, recompute_vision=of_vision, recompute_language=of_language)
        for vision, language, of_vision, of_language in counts
        if vision + language
    )


@pytest.mark.parametrize(
    "name",
    parameters(
        {name: name for name in plans(4, 4)},
        short=("inside both towers, all recomputed, padded",),
    ),
)
def test_stages_give_the_loss_and_gradients_of_the_samples_one_by_one(name: str, case: Case) -> None:
    padded, stages = plans(*case.layers)[name]
    check(case, stages, padded=padded)


@pytest.mark.long
@pytest.mark.parametrize("again", ["none", "some", "all"])
def test_two_stages_give_the_same_wherever_they_part(again: str, case: Case) -> None:
    for boundary in range(1, sum(case.layers)):
        check(case, parted(case.layers, [boundary], again), padded=False)


@pytest.mark.long
@pytest.mark.parametrize("again", ["none", "all"])
def test_stages_of_one_layer_each_give_the_same(again: str, case: Case) -> None:
    check(case, parted(case.layers, range(1, sum(case.layers)), again), padded=True)


def parted(layers: tuple[int, int], boundaries: Sequence[int], again: str) -> tuple[Stage, ...]:
    """Stages that part behind these numbers of layers, counted through both towers."""
    stages = []
    for start, end in pairwise([0, *boundaries, sum(layers)]):
        vision = max(0, min(end, layers[0]) - start)
        language = end - start - vision
        recomputed = [{"none": 0, "some": count // 2, "all": count}[again] for count in (vision, language)]
        stages.append(
            Stage(vision=vision, language=language, recompute_vision=recomputed[0], recompute_language=recomputed[1])
        )
    return tuple(stages)


def check(case: Case, stages: tuple[Stage, ...], *, padded: bool) -> None:
    """Compare the packs' loss and gradients under a plan with those of the samples one by one."""
    plan = Plan(packing=Padded(samples=1), layout=Layout(pipeline=len(stages), data=1, zero=0), stages=stages)
    compare(gradients_of(case, plan, batches(case, padded=padded)), case.reference)


@pytest.mark.parametrize("case", families("qwen2-5-vl", "gemma3"), indirect=True, scope="module")
def test_a_blank_sample_changes_nothing_for_the_samples_behind_it(case: Case) -> None:
    found = gradients_of(case, one_stage(case), batches(case, padded=False, with_blanks=True))
    compare(found, case.reference)


@pytest.mark.parametrize("case", families("qwen3-vl-moe"), indirect=True, scope="module")
def test_a_pack_without_images_has_a_gradient_for_every_parameter(case: Case) -> None:
    # Data ranks that add up their gradients must have the same ones.
    text = [batch for batch in batches(case, padded=False) if not (batch.tokens.input_ids == case.image_token).any()]
    assert text
    assert gradients_of(case, one_stage(case), text).keys() - {"loss"} == case.names


def one_stage(case: Case) -> Plan:
    vision, language = case.layers
    stages = (Stage(vision=vision, language=language),)
    return Plan(packing=Padded(samples=1), layout=Layout(pipeline=1, data=1, zero=0), stages=stages)


def gradients_of(case: Case, plan: Plan, packs: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Gradients by parameter, and the `loss`, of packs that go through the stages of a plan."""
    modules = [stage_of(case, plan, number) for number in range(len(plan.stages))]
    loss = torch.zeros(())
    for batch in packs:
        assert batch.pixel_values is not None
        state: Any = pack((batch.pixel_values,), batch.tokens)
        for module in modules:
            state = module(state)
        part = modules[-1].loss(state, targets_of(batch.labels, torch.ones(())))
        part.backward()
        loss += part.detach()
    found: dict[str, torch.Tensor] = {"loss": loss}
    for module in modules:
        for key, parameter in module.model.named_parameters():
            if parameter.grad is not None:
                name_of = module.tied.get(key, key)
                found[name_of] = found.get(name_of, torch.zeros(())) + parameter.grad
    return found


def stage_of(case: Case, plan: Plan, number: int) -> StageModule:
    stage = StageModule(build_skeleton(case.config, torch.float32), cut(plan)[number])
    draw_weights(stage.model, stage.paths, 0, CPU)
    draw_buffers(stage.model, stage.chain.buffers, CPU)
    with torch.no_grad():
        for path in stage.paths:
            for name, parameter in parameters_at(stage.model, path):
                parameter.copy_(case.weights[name])
    stage.tie()
    return stage.train()


def compare(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    every = torch.stack([torch.linalg.vector_norm(each) for each in expected.values()]).norm()
    assert {name for name, each in expected.items() if each.any()} <= found.keys()
    for name, value in expected.items():
        difference = torch.linalg.vector_norm(found.get(name, torch.zeros(())) - value)
        assert difference <= 1e-4 * torch.linalg.vector_norm(value) + 1e-6 * every, name


def test_patches_and_grids_are_those_of_the_models_own_processor(case: Case) -> None:
    for sample in (sample for samples in case.packs for sample in samples if sample.images):
        if sample.videos:
            continue
        encoded = case.encoder.encode(sample, pixels=True)
        made = case.inputs(sample, encoded)
        if "image_grid_thw" in made and encoded.pixel_values is not None:
            assert np.array_equal(encoded.grids, made["image_grid_thw"])
            assert np.array_equal(encoded.pixel_values.reshape(made["pixel_values"].shape), made["pixel_values"])


def test_a_text_that_spells_the_image_token_is_refused(case: Case) -> None:
    if isinstance(case.encoder, ChatEncoder) and case.layers[0]:
        processor = case.encoder.measurer.processor
        for token in (processor.image_token, getattr(processor, "video_token", None) or processor.image_token):
            turns = (Turn(role="user", text=f"What is {token}?"), Turn(role="assistant", text="A token."))
            with pytest.raises(DataError, match="spells"):
                case.encoder.encode(Sample(turns=turns, images=(), image_sizes=()), pixels=False)
