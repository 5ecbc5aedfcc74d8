"""Packs through transformers' own models: samples are kept apart, or the model is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from autotune import PackCollator, PackSampler, SampleDataset
from autotune.errors import PackError
from autotune.loop import collator
from autotune.loop.collator import check_packing
from autotune.loop.packed_inputs import packed_inputs, stand_in
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import PACKED, job_of
from trials import plugins
from trials.data.loader import collate
from trials.data.records.sample import IGNORED, Sample, Turn
from trials.errors import ModelError
from trials.model.family import Images, load_family, prompt_types
from trials.model.skeleton import load_config

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
MODELS = plugins.names(TINY)
SHORT = ("gemma3", "glm4v", "qwen3-vl-moe", "text-capped", "paligemma")
MIXED = {"gemma3": "the samples of a pack are not kept apart by 'gemma3' with .*, logits by"}
"""Models whose attention inside images does not know of samples, in transformers 5.23."""
WITHOUT_KERNEL = {
    ("text-capped", "sdpa"): "packs cannot be run by 'gemma2' with attention 'sdpa': Gemma2",
    ("got-ocr2", "sdpa"): "packs cannot be run by 'got_ocr2' with attention 'sdpa': GotOcr2",
    ("paligemma", "sdpa"): "packs cannot be run by 'paligemma' with attention 'sdpa': Gemma2",
}
"""Models that transformers runs with explicit scores alone."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small layers wait for each other's threads otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:Sliding Window Attention")
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", parameters({name: name for name in MODELS}, short=SHORT))
def test_a_pack_has_the_results_of_its_samples_or_is_refused(name: str, attention: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    config = load_config(str(tmp_path))
    refusal = MIXED.get(name) or WITHOUT_KERNEL.get((name, attention))
    if not refusal:
        check_packing(config, attention)
        return
    with pytest.raises(ModelError, match=refusal):
        check_packing(config, attention)


@pytest.mark.parametrize("lost", ["position_ids", "use_cache"])
def test_the_check_notices_samples_that_see_each_other(
    lost: str, example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(*arguments: object) -> dict[str, object]:
        return {name: value for name, value in packed_inputs(*arguments).items() if name != lost}  # type: ignore[arg-type]

    monkeypatch.setattr(collator, "packed_inputs", without)
    with pytest.raises(ModelError, match="the samples of a pack are not kept apart by 'internvl' with"):
        check_packing(load_config(str(example / "model")), "sdpa")


def test_an_attention_that_cannot_be_run_is_refused(example: Path) -> None:
    with pytest.raises(ModelError, match="packs cannot be run by 'internvl' with attention 'flash_attention_2': "):
        check_packing(load_config(str(example / "model")), "flash_attention_2")


@pytest.mark.parametrize(
    "name",
    parameters(
        {name: name for name in MODELS if not name.startswith("text")},
        short=("internvl", "llava-next", "qwen3-vl", "paligemma"),
    ),
)
def test_blank_images_run_through_a_model_in_a_pack_without_images(name: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    config = load_config(str(tmp_path))
    before = torch.get_rng_state()
    blank = stand_in(config)
    assert torch.equal(torch.get_rng_state(), before)
    assert blank is not None
    assert (blank.labels == IGNORED).all()
    family = load_family(config)
    encoder = family.encoder(str(tmp_path))
    turns = (Turn(role="user", text="First."), Turn(role="assistant", text="Second."))
    text = encoder.encode(Sample(turns=turns, images=(), image_sizes=()), pixels=True)
    batch = packed_inputs(config, collate([text, blank], encoder, pixels=True, padded=False))
    model = family.AUTO_MODEL.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        found = model(**batch).logits[0, : len(text.input_ids)]
        types = prompt_types(torch.from_numpy(text.positions))
        expected = model(**family.model_inputs(config, torch.from_numpy(text.input_ids), None) | types).logits[0]
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_frequencies_of_the_longest_sample_are_refused_where_one_is_beyond_the_context(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(example / "model", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    document = json.loads(file.read_text())
    document["text_config"]["rope_parameters"] |= {"rope_type": "dynamic", "factor": 2.0}  # as of InternVL3
    samples = SampleDataset(job_of(example, tmp_path / "output", model={"path": str(tmp_path / "model")}))
    longest = int(samples.index.text_tokens.max())
    for context in (longest, longest - 1):
        document["text_config"]["max_position_embeddings"] = context
        file.write_text(json.dumps(document))
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(load_config(str(tmp_path / "model")))
        if context == longest:
            PackCollator(samples, model)
            continue
        with pytest.raises(ModelError, match=f"not kept apart by 'internvl' .* and data.max_tokens: {context}, or"):
            PackCollator(samples, model)


# --- the collator, with a real model and data ---


@pytest.fixture(scope="module")
def model(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("saved")
    return saved_model(shallow, folder / "model").eval(), folder / "model"


@pytest.fixture(scope="module")
def samples(
    shallow: Path, model: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory
) -> SampleDataset:
    folder = tmp_path_factory.mktemp("job")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        settings = {"path": str(model[1]), "weights": "pretrained"}
        return SampleDataset(job_of(shallow, folder / "output", model=settings))


def test_logits_and_loss_of_packs_are_those_of_the_samples_alone(
    model: tuple[PreTrainedModel, Path], samples: SampleDataset
) -> None:
    network, _ = model
    collator, inputs_of = PackCollator(samples, network), load_family(network.config).model_inputs
    shown = set()
    for pack in [*PackSampler(samples, PACKED), []]:
        members = [samples[number] for number in pack]
        with torch.no_grad():
            found = network(**collator(members), num_items_in_batch=10)
        loss, first = 0.0, 0
        for member in members:
            ids, pixels, last = torch.from_numpy(member.input_ids), member.pixel_values, first + len(member.input_ids)
            images = None
            if pixels is not None:
                images = Images(pixels=torch.from_numpy(pixels), grids=torch.from_numpy(member.grids), input_ids=ids)
            labels = torch.from_numpy(member.labels)[None]
            with torch.no_grad():
                alone = network(**inputs_of(network.config, ids, images), labels=labels, num_items_in_batch=10)
            assert torch.allclose(found.logits[0, first:last], alone.logits[0], rtol=1e-4, atol=1e-5)
            loss, first = loss + float(alone.loss), last
        assert float(found.loss) == pytest.approx(loss, rel=1e-5)
        shown.add(sum(member.pixel_values is not None for member in members) if members else None)
    assert {None, 0, 2} <= shown


def test_every_parameter_has_a_gradient_in_a_pack_without_images(
    model: tuple[PreTrainedModel, Path], samples: SampleDataset
) -> None:
    network, _ = model
    texts = [number for number, sample in enumerate(samples) if sample.pixel_values is None][:2]
    network(**PackCollator(samples, network)([samples[number] for number in texts])).loss.backward()
    lacking = [name for name, parameter in network.named_parameters() if parameter.grad is None]
    vision = sum(float(p.grad.abs().sum()) for p in network.model.vision_tower.parameters() if p.grad is not None)
    network.zero_grad()
    assert (lacking, vision) == ([], 0.0)


def test_another_model_than_the_jobs_is_refused(samples: SampleDataset, example: Path) -> None:
    config = load_config(str(example / "model"))
    with torch.device("meta"):
        other = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(PackError, match=r"the model is a 'internvl' with 8 layers and .* samples are encoded for"):
        PackCollator(samples, other)
    with pytest.raises(PackError, match="the model must be one of transformers, not Linear; give it before"):
        PackCollator(samples, torch.nn.Linear(1, 1))
