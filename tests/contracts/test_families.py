"""What every model family promises, each shown on a tiny model of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from transformers import PretrainedConfig

from autotune.model_shape import model_shape
from tests.values.parameters import parameters
from trials import plugins
from trials.data.loader import collate
from trials.data.records.images import image_size
from trials.data.records.sample import IGNORED, IMAGE, NO_GRIDS, Encoder, Lengths, Sample, Turn
from trials.data.tokens import PackTokens, pack
from trials.job import ModelSection, TrainingSection
from trials.model.conversion import stored_form
from trials.model.cut import Cut
from trials.model.family import FAMILIES, Family, Images, join_samples, load_family
from trials.model.features import join_text
from trials.model.paths import parameters_at
from trials.model.plain.parity import check_parity
from trials.model.shrunk import VOCABULARY, shrunk
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.weights import WeightFiles, draw_buffers, draw_weights, read_weights
from trials.sharing.group import SharingGroup
from trials.stage import Recomputed
from trials.tasks.profiling import slow_calls
from trials.tasks.profiling.layer_profile import quick_slow_calls
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.profiling.probes import probes
from trials.tasks.request import ProbeSizes

CPU = torch.device("cpu")
UNITS = 3
OVERLAPPING = {"got_ocr2": {("projector", "convolution")}}
"""Convolutions whose kernels overlap, so that they are no product of patches, by model type."""


TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
"""Modules that write folders with a tiny model's configuration, tokenizer and processor; a family may have several."""


SHORT = ("gemma3", "internvl", "qwen2-5-vl", "qwen3-vl-moe", "text")
"""Families that between them have tiles, windows, any resolution, inner features, experts, blocks of image tokens, and
text alone."""


def families(*short: str) -> list[Any]:
    return parameters({name: name for name in plugins.names(TINY)}, short=short)


every_family = pytest.mark.parametrize("folder", plugins.names(TINY), indirect=True, scope="module")


@pytest.fixture(scope="module", params=families(*SHORT))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model: Path = tmp_path_factory.mktemp(request.param)
    plugins.load(TINY, request.param).make(model)
    return model


@pytest.fixture(scope="module")
def config(folder: Path) -> PretrainedConfig:
    return load_config(str(folder))


@pytest.fixture(scope="module")
def family(config: PretrainedConfig) -> Family:
    return load_family(config)


@pytest.fixture(scope="module")
def skeleton(config: PretrainedConfig) -> Skeleton:
    return build_skeleton(config, torch.float32)


@pytest.fixture(scope="module")
def encoder(family: Family, folder: Path) -> Encoder:
    return family.encoder(str(folder))


@pytest.fixture(scope="module")
def stage(config: PretrainedConfig) -> StageModule:
    """The whole model on one stage, with weights."""
    skeleton = build_skeleton(config, torch.float32)
    vision, language = (range(len(layers)) for layers in (skeleton.chain.vision_layers, skeleton.chain.language_layers))
    stage = StageModule(
        skeleton,
        Cut(
            vision=vision,
            language=language,
            levels=(Recomputed(vision=0, language=0),),
            embeds=True,
            projects=True,
            heads=True,
        ),
    )
    draw_weights(stage.model, stage.paths, 0, CPU)
    draw_buffers(stage.model, stage.chain.buffers, CPU)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in stage.parameters():  # Gemma 3's projection begins with zeros, which would hide the images.
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return stage.eval()


def tokens_of(
    family: Family, config: PretrainedConfig, images: Images, before: Sequence[int] = (), behind: Sequence[int] = ()
) -> PackTokens:
    """A pack of one sample: some text, the images, some text."""
    text = [torch.tensor(ids, dtype=torch.int64) for ids in (before, behind)]
    return join_samples(family, config, [(torch.cat([text[0], images.input_ids, text[1]]), images.grids)])


def states_of(stage: StageModule, pixels: torch.Tensor, tokens: PackTokens) -> tuple[torch.Tensor, ...]:
    """What `image_features` takes, with no vision layer run."""
    states = stage.family.embed_vision(stage.model, pixels, tokens)
    return (states,) * (1 + len(stage.chain.kept))


def joined_text(stage: StageModule, states: Sequence[torch.Tensor], tokens: PackTokens) -> torch.Tensor:
    """The language states [1, T, hidden]."""
    features = stage.family.image_features(stage.model, states, tokens)
    return join_text(stage.model, features, tokens, SharingGroup())[0]


@pytest.fixture(scope="module")
def vision(skeleton: Skeleton) -> tuple[str, ...]:
    """Paths of the vision layers; skips models that take text alone."""
    if not skeleton.chain.vision_layers:
        pytest.skip("the model takes text alone")
    return skeleton.chain.vision_layers


@pytest.fixture(scope="module")
def samples(skeleton: Skeleton, folder: Path) -> tuple[Sample, ...]:
    """Text alone, and where the model takes them, images of different sizes with text around them."""
    return tuple(sample_of(folder, count) for count in (0, 2)[: 2 if skeleton.chain.vision_layers else 1])


def sample_of(folder: Path, count: int) -> Sample:
    images = tuple(folder / f"{width}.png" for width in (60, 130)[:count])
    for path in images:
        Image.new("RGB", (int(path.stem), 70), (90, 140, 30)).save(path)
    turns = (
        Turn(role="system", text="Be brief."),
        Turn(role="user", text=" with ".join(["Compare", *(IMAGE for _ in images)])),
        Turn(role="assistant", text="Both are green."),
    )
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


# --- the module and its configuration ---


def test_every_family_has_a_tiny_model() -> None:
    assert {name for name, _ in plugins.each(FAMILIES)} <= set(plugins.names(TINY))


@every_family
def test_one_family_takes_the_configuration(config: PretrainedConfig, family: Family) -> None:
    assert [each for _, each in plugins.each(FAMILIES) if each.takes(config)] == [family]


def test_another_form_of_the_models_is_none_that_can_be_read(family: Family) -> None:
    assert not {form.replace("_", "-") for form in family.OTHER_FORMS} & set(plugins.names(FAMILIES))
    assert all(family.OTHER_FORMS.values())


@pytest.mark.usefixtures("vision")
def test_more_parameters_of_the_tower_cost_more_operations(config: PretrainedConfig, family: Family) -> None:
    few, many = (family.unit_flops(config, tower=tower, projector=10) for tower in (1_000, 2_000))
    assert 0 < few < many


def test_random_images_have_the_shape_that_the_encoder_gives(
    config: PretrainedConfig, family: Family, encoder: Encoder, skeleton: Skeleton
) -> None:
    for units in (1, UNITS):
        images = family.random_images(config, units)
        assert images.pixels.shape == (units, *encoder.unit_shape)
        assert images.pixels.dtype == torch.float32
        assert (images.input_ids.dtype, images.input_ids.dim()) == (torch.int64, 1)
        assert (images.grids.dtype, images.grids.dim()) == (torch.int64, 2)
        if skeleton.chain.vision_layers:
            assert (images.input_ids == config.image_token_id).any()


def test_a_shrunk_configuration_is_one_of_the_same_family_with_few_tokens(
    config: PretrainedConfig, family: Family, skeleton: Skeleton
) -> None:
    small = shrunk(config)
    family.check(small)
    assert small.get_text_config().vocab_size == VOCABULARY
    assert set(family.random_images(small, 1).input_ids.tolist()) <= set(range(VOCABULARY))
    layers = len(build_skeleton(small, torch.float32).chain.vision_layers)
    assert layers <= len(skeleton.chain.vision_layers)


# --- data ---


@every_family
def test_measured_lengths_are_those_of_the_encoded_sample(encoder: Encoder, samples: tuple[Sample, ...]) -> None:
    for sample in samples:
        encoded = encoder.encode(sample, pixels=True)
        assert (encoded.pixel_values is not None) == bool(sample.images)
        if encoded.pixel_values is not None:
            assert encoded.pixel_values.dtype == np.float32
            assert encoded.pixel_values.shape[1:] == encoder.unit_shape
        measured = measured_lengths(encoder, sample)
        assert measured == Lengths(
            vision_units=0 if encoded.pixel_values is None else len(encoded.pixel_values),
            text_tokens=len(encoded.input_ids),
            target_tokens=int(np.count_nonzero(encoded.labels != IGNORED)),
        )
        assert measured.target_tokens > 0


def measured_lengths(encoder: Encoder, sample: Sample) -> Lengths:
    return encoder.measure(sample, tuple(image_size(image) for image in sample.images)).lengths


def test_without_pixels_the_tokens_and_labels_are_the_same(encoder: Encoder, samples: tuple[Sample, ...]) -> None:
    for sample in samples:
        with_pixels, without = (encoder.encode(sample, pixels=pixels) for pixels in (True, False))
        assert without.pixel_values is None
        assert np.array_equal(with_pixels.input_ids, without.input_ids)
        assert np.array_equal(with_pixels.labels, without.labels)


def test_a_blank_sample_has_the_lengths_of_the_one_that_it_replaces(
    config: PretrainedConfig, family: Family, encoder: Encoder, stage: StageModule, samples: tuple[Sample, ...]
) -> None:
    for sample in samples:
        encoded, lengths = encoder.encode(sample, pixels=True), measured_lengths(encoder, sample)
        blank = encoder.blank(lengths, pixels=True)
        assert len(blank.input_ids) == lengths.text_tokens
        assert (blank.labels == IGNORED).all()
        assert (blank.pixel_values is None) == (encoded.pixel_values is None)
        if blank.pixel_values is not None and encoded.pixel_values is not None:
            assert blank.pixel_values.shape == encoded.pixel_values.shape
            tokens = join_samples(family, config, [(torch.from_numpy(blank.input_ids), torch.from_numpy(blank.grids))])
            # As many features as image tokens, so that those of the samples behind it find theirs.
            joined_text(stage, states_of(stage, torch.from_numpy(blank.pixel_values), tokens), tokens)


def test_equal_settings_have_equal_digests_and_another_limit_has_another(family: Family, folder: Path) -> None:
    first, again, cut = (family.encoder(str(folder), max_tokens=limit) for limit in (None, None, 100))
    assert first.digest == again.digest != cut.digest
    assert (first.max_tokens, cut.max_tokens) == (None, 100)


# --- the model ---


@every_family
def test_every_parameter_belongs_to_exactly_one_part_of_the_chain(skeleton: Skeleton) -> None:
    claimed = [
        name
        for path in (*skeleton.chain.parts, *skeleton.chain.unused)
        for name, _ in parameters_at(skeleton.model, path)
    ]
    assert sorted(claimed) == sorted(name for name, _ in skeleton.model.named_parameters(remove_duplicate=False))
    assert len(skeleton.chain.language_layers) == skeleton.model.config.get_text_config().num_hidden_layers


def test_vision_layers_keep_the_shape_of_the_states(
    config: PretrainedConfig, family: Family, stage: StageModule, vision: tuple[str, ...]
) -> None:
    images = family.random_images(config, UNITS)
    tokens = tokens_of(family, config, images)
    states = family.embed_vision(stage.model, images.pixels, tokens)
    run = family.vision_runner(stage.model, states, tokens)
    for number, path in enumerate(vision):
        after = run(stage.model.get_submodule(path), number, states)
        assert (after.shape, after.dtype) == (states.shape, states.dtype)
        states = after


@pytest.mark.usefixtures("vision")
def test_image_tokens_take_the_features_and_other_tokens_their_embedding(
    config: PretrainedConfig, family: Family, stage: StageModule
) -> None:
    images = family.random_images(config, UNITS)
    tokens = tokens_of(family, config, images, before=[1, 2], behind=[0])
    ids = tokens.input_ids
    states = family.embed_vision(stage.model, images.pixels, tokens).detach().requires_grad_()
    joined = joined_text(stage, (states,) * (1 + len(stage.chain.kept)), tokens)
    embedded = stage.model.get_input_embeddings()(ids)
    # Marks between tiles are features, too, in models that have a setting for them.
    marks = getattr(config, "visual_indicator_token_ids", ())
    is_image = torch.isin(ids, torch.tensor([config.image_token_id, *marks]))
    assert joined.shape == (1, len(ids), config.get_text_config().hidden_size)
    assert torch.equal(joined[0, ~is_image], embedded[~is_image])
    joined[0, is_image].square().sum().backward()
    assert states.grad is not None
    assert (states.grad.flatten(1).norm(dim=1) > 0).all()  # every unit is shown


def test_the_unit_of_a_pack_without_images_changes_nothing(
    family: Family, encoder: Encoder, stage: StageModule
) -> None:
    batch = collate([], encoder, pixels=True, padded=False)
    assert batch.pixel_values is not None
    states = states_of(stage, batch.pixel_values, batch.tokens)
    joined = joined_text(stage, states, batch.tokens)
    assert torch.equal(joined[0], stage.model.get_input_embeddings()(batch.tokens.input_ids))


def test_a_sample_of_a_pack_sees_nothing_of_the_others(config: PretrainedConfig, stage: StageModule) -> None:
    torch.manual_seed(0)
    lengths = (5, 3)
    states = torch.randn(1, sum(lengths), config.get_text_config().hidden_size)
    samples = [(torch.zeros(length, dtype=torch.int64), torch.from_numpy(NO_GRIDS)) for length in lengths]

    def run(states: torch.Tensor, *samples: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return stage.language((states,), join_samples(stage.family, config, samples))[0]

    with torch.no_grad():
        packed = run(states, *samples)
        alone = [run(part, each) for part, each in zip(states.split(lengths, dim=1), samples, strict=True)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1))


@every_family
def test_stages_compute_what_transformers_computes(folder: Path) -> None:
    check_parity(ModelSection(path=str(folder), weights="random", dtype="float32"))


def test_a_model_is_described_with_the_layers_of_its_chain(folder: Path, skeleton: Skeleton) -> None:
    shape = model_shape(ModelSection(path=str(folder), weights="random", dtype="float32"))
    chain = skeleton.chain
    assert (shape.vision_layers, shape.language_layers) == (len(chain.vision_layers), len(chain.language_layers))
    assert (shape.unit_flops > 0) == bool(chain.vision_layers)
    assert min(shape.token_flops, shape.target_flops, shape.square_flops) > 0


@pytest.fixture(scope="module")
def profiled(folder: Path) -> OneOfEach:
    return one_of_each(ModelSection(path=str(folder), weights="random", dtype="float32"), TrainingSection(), CPU)


@pytest.mark.usefixtures("vision")
def test_the_probe_of_the_projector_runs_all_of_it(profiled: OneOfEach) -> None:
    sizes = ProbeSizes(unit_counts=(UNITS,))
    probe = next(each for each in probes(profiled, sizes, CPU) if each.layer == "projector")
    projector = [p for path in profiled.chain.projector[:-1] for _, p in parameters_at(profiled.model, path)]
    with torch.no_grad():
        for parameter in projector:  # Gemma 3's begins with zeros, which would hide what is before
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    gradients = torch.autograd.grad(probe.run(probe.states).sum(), projector)
    assert all(gradient.any() for gradient in gradients)


def test_one_layer_of_each_kind_runs_as_a_whole_model(
    config: PretrainedConfig, family: Family, profiled: OneOfEach
) -> None:
    images = family.random_images(config, UNITS)
    tokens = tokens_of(family, config, images, behind=[0])
    logits = profiled.head(profiled(pack((images.pixels,), tokens))[0])
    assert logits.shape == (len(tokens.input_ids), config.get_text_config().vocab_size)


def test_weights_are_read_and_saved_as_transformers_does(
    config: PretrainedConfig, family: Family, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    expected = family.AUTO_MODEL.from_config(config, dtype=torch.float32)
    expected.save_pretrained(tmp_path)
    skeleton = build_skeleton(config, torch.float32)
    files = WeightFiles(tmp_path, skeleton)
    files.check()
    read_weights(skeleton.model, (*skeleton.chain.parts, *skeleton.chain.unused), files, CPU)
    wanted = expected.state_dict()
    assert all(torch.equal(parameter, wanted[name]) for name, parameter in skeleton.model.named_parameters())
    kept = {name: value for name, value in skeleton.model.state_dict().items() if name not in skeleton.tied}
    save_file(stored_form(skeleton.model, kept), tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, report = family.AUTO_MODEL.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    found = again.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("folder", families("got-ocr2", "qwen2-5-vl"), indirect=True, scope="module")
def test_no_layer_has_calls_with_a_faster_way(
    config: PretrainedConfig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_calls, "_CLEARLY_FASTER", 0.0)  # whatever the times
    settings = ModelSection(path=str(folder), weights="random", dtype="float32")
    found = {(layer, cause) for layer, cause, *_ in quick_slow_calls(settings, TrainingSection(), CPU, has_images=True)}
    assert found == OVERLAPPING.get(config.model_type, set())
