"""Prompts of PaliGemma: inputs, loss and gradients are those of transformers' own processor with a suffix."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoImageProcessor, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.paligemma.processing_paligemma import EXTRA_TOKENS, PaliGemmaProcessor

from autotune.loop.packed_inputs import packed_inputs
from tests.integration.models.test_family_parity import Case, check, parted, plain_model, plans
from tests.tiny_models.tiles import paligemma
from tests.values.parameters import parameters
from trials.data.loader import collate
from trials.data.records.images import image_pixels
from trials.data.records.sample import IGNORED, IMAGE, Encoded, Encoder, Sample, Turn
from trials.data.tokens import pack, unpack
from trials.errors import DataError
from trials.model.family import load_family
from trials.model.plain.differing import difference
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.skeleton import load_config
from trials.tasks.certifying import reference

SIZES = ((40, 90), (28, 28))
"""(height, width)"""
ASKED = {
    "an image before the question": (f"{IMAGE}What is it?", "A red circle."),
    "a line before the question": (f"{IMAGE}\nWhat is it?\nBe brief.\n", "A red circle.\n\nBoth."),
    "two images": (f"{IMAGE}{IMAGE}Compare them", " Both are green. "),
    "text before the last image": (f"Compare {IMAGE} with {IMAGE}: which?", "<loc0001><loc0512><seg003> circle"),
    "an image behind the question": (f"What is in the picture? {IMAGE}", "A circle"),
    "an answer that begins with a line": (f"{IMAGE}What?", "\n A red circle.\n"),
    "an image alone": (IMAGE, "\u00e4 \U0001f600"),
    "text alone": ("What is red?", "\n\nA circle is red."),
}
"""Question and answer"""


def published(folder: Path, kind: str, **settings: Any) -> Path:
    """Write a model as it is published: without a chat template, and with the tokens of lines that Gemma has."""
    paligemma.make_kind(folder, kind, **settings)
    (folder / "chat_template.jinja").unlink()
    return folder


def in_words_of_gemma(folder: Path) -> Path:
    """Replace the tokenizer by one in the form of Gemma's, in which several lines are one token."""
    size = load_config(str(folder)).get_text_config().vocab_size
    known = ["<pad>", "<eos>", "<bos>", "<unk>", "\n", "\n\n", "\n\n\n", "<image>", *EXTRA_TOKENS]
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=known, show_progress=False)
    tokenizer.train_from_iterator([*map(" ".join, ASKED.values())], trainer)
    named = {"pad_token": "<pad>", "eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    image = {"image_token": "<image>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=image, **named)
    fast.save_pretrained(folder)
    config = load_config(str(folder))
    config.image_token_index = fast.get_vocab()["<image>"]
    config.save_pretrained(folder)
    return folder


FORMS: dict[str, Callable[[Path], Path]] = {
    "Gemma 2": lambda folder: published(folder, "gemma2"),
    "Gemma 2, its words": lambda folder: in_words_of_gemma(published(folder, "gemma2", attn_logit_softcapping=5.0)),
    "Gemma": lambda folder: in_words_of_gemma(published(folder, "gemma", num_key_value_heads=1)),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of small layers wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=parameters({name: name for name in FORMS}, short=("Gemma 2, its words",)))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = FORMS[request.param](tmp_path_factory.mktemp("model"))
    for number, size in enumerate(SIZES):
        noise = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(made / f"{number}.png")
    return made


@pytest.fixture(scope="module")
def original(folder: Path) -> Any:
    """transformers' own processor, with the image processor that needs no torchvision."""
    return PaliGemmaProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"), AutoTokenizer.from_pretrained(folder)
    )


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return encoder_of(folder)


def encoder_of(folder: Path, max_tokens: int | None = None) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder), max_tokens=max_tokens)


def sample_of(folder: Path, question: str, answer: str, **answered: Any) -> Sample:
    images = tuple(folder / f"{number}.png" for number in range(question.count(IMAGE)))
    turns = (Turn(role="user", text=question), Turn(role="assistant", text=answer, **answered))
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def made_by(original: Any, sample: Sample) -> dict[str, torch.Tensor]:
    """What transformers' own processor makes of prompt and suffix.

    It refuses text alone, of which the tokens are those that it makes of the prompt's text.
    """
    prompt, answer = (turn.text for turn in sample.turns)
    if not sample.images:
        text = f"{original.tokenizer.bos_token}{prompt}\n"
        end = original.tokenizer.eos_token
        given = original.tokenizer([text], text_pair=[f"{answer}{end}"], return_token_type_ids=True)
        return {name: torch.tensor(given[name]) for name in ("input_ids", "token_type_ids")}
    pictures = [Image.fromarray(image_pixels(image)) for image in sample.images]
    made = original(images=pictures, text=[prompt], suffix=[answer], return_tensors="np")
    return {name: torch.from_numpy(value) for name, value in made.items()}


@pytest.mark.parametrize("name", ASKED)
def test_tokens_labels_and_pixels_are_those_of_the_processor_with_a_suffix(
    name: str, folder: Path, encoder: Encoder, original: Any
) -> None:
    sample = sample_of(folder, *ASKED[name])
    encoded, made = encoder.encode(sample, pixels=True), made_by(original, sample)
    ids, types = made["input_ids"][0], made["token_type_ids"][0]
    assert encoded.input_ids.tolist() == ids.tolist()
    assert encoded.labels.tolist() == torch.where(types == 1, ids, IGNORED).tolist()
    assert encoded.positions.tolist() == [list(range(1, len(ids) + 1)), types.tolist()]
    if sample.images:
        assert encoded.labels.tolist() == made["labels"][0].tolist()
        assert encoded.pixel_values is not None
        assert np.array_equal(encoded.pixel_values, made["pixel_values"])
    lengths = encoder.measure(sample, SIZES[: len(sample.images)]).lengths
    assert (lengths.text_tokens, lengths.target_tokens) == (len(ids), int(types.sum()))
    plain = PlainInputs(str(folder), load_config(str(folder)), trust_remote_code=False)
    assert difference(encoded, plain.expected(sample), None) is None
    assert pickle.loads(pickle.dumps(encoder)).digest == encoder.digest


def test_a_prompt_is_told_from_its_answer_behind_every_cut(folder: Path, encoder: Encoder) -> None:
    sample = sample_of(folder, *ASKED["two images"])
    whole = encoder.encode(sample, pixels=True)
    answer = int(whole.positions[1].argmax())
    for kept in (answer + 2, answer, answer - 2):
        cut = encoder_of(folder, kept).encode(sample, pixels=True)
        assert cut.positions.tolist() == whole.positions[:, :kept].tolist()
    with pytest.raises(DataError, match="its images end at token 32 of"):
        encoder_of(folder, 31).encode(sample, pixels=True)


def test_what_is_not_learnt_belongs_to_the_prompt(folder: Path, encoder: Encoder) -> None:
    sample = sample_of(folder, *ASKED["an image before the question"], is_learnt=False)
    encoded = encoder.encode(sample, pixels=True)
    assert (encoded.labels == IGNORED).all()
    assert not encoded.positions[1].any()


def test_a_pack_shows_each_stage_where_prompts_end(folder: Path, encoder: Encoder) -> None:
    encoded = [encoder.encode(sample_of(folder, *ASKED[name]), pixels=True) for name in ("two images", "text alone")]
    batch = collate(encoded, encoder, pixels=True, padded=True)
    assert batch.pixel_values is not None
    _, tokens = unpack(*pack((batch.pixel_values,), batch.tokens))
    long, short = tokens.positions[1].split(tokens.lengths)
    assert long.tolist() == encoded[0].positions[1].tolist()
    # Pad tokens are no prompt.
    assert short.tolist() == [*encoded[1].positions[1].tolist(), *[1] * (len(short) - len(encoded[1].labels))]


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (("user", "assistant", "user", "assistant"), "it has 4 turns, the first of the user, but PaliGemma takes one"),
        (("system", "user", "assistant"), "it has 3 turns, the first of the system, .*; make a record of each answer"),
    ],
)
def test_a_conversation_that_the_processor_cannot_write_is_refused(
    roles: tuple[Any, ...], message: str, folder: Path, encoder: Encoder
) -> None:
    turns = tuple(Turn(role=role, text="What?") for role in roles)
    with pytest.raises(DataError, match=f"the model's chat template refuses the conversation: {message}"):
        encoder.encode(Sample(turns=turns, images=(), image_sizes=()), pixels=False)


# --- loss and gradients ---

PACKS = (
    ("an image before the question", "text alone", "two images"),
    ("text alone", "text alone"),
    ("text before the last image", "an answer that begins with a line", "an image behind the question"),
)


class Prompted(Case):
    """Samples as transformers' own processor makes them."""

    @property
    def original(self) -> Any:
        images = AutoImageProcessor.from_pretrained(self.folder, backend="pil")
        return PaliGemmaProcessor(images, AutoTokenizer.from_pretrained(self.folder))

    def inputs(self, sample: Sample, encoded: Encoded) -> dict[str, Any]:
        made = made_by(self.original, sample)
        assert made["input_ids"][0].tolist() == encoded.input_ids.tolist()
        return {name: value for name, value in made.items() if name != "labels"}


@pytest.fixture(scope="module")
def case(folder: Path, encoder: Encoder) -> Case:
    config = load_config(str(folder))
    family = load_family(config)
    packs = tuple(tuple(sample_of(folder, *ASKED[name]) for name in names) for names in PACKS)
    return Prompted(folder, config, family, encoder, plain_model(config, family), packs)


@pytest.mark.parametrize("name", parameters({name: name for name in plans(3, 4)}, short=("inside the vision tower",)))
def test_stages_give_the_loss_and_gradients_of_the_processors_inputs(name: str, case: Case) -> None:
    padded, stages = plans(*case.layers)[name]
    check(case, stages, padded=padded)


@pytest.mark.long
@pytest.mark.parametrize("again", ["none", "all"])
def test_stages_of_one_layer_each_give_the_same(again: str, case: Case) -> None:
    check(case, parted(case.layers, range(1, sum(case.layers)), again), padded=False)


@pytest.mark.parametrize("name", ["an image before the question", "text alone"])
def test_transformers_own_model_is_told_where_prompts_end(name: str, case: Case, original: Any) -> None:
    sample = sample_of(case.folder, *ASKED[name])
    encoded, made = case.encoder.encode(sample, pixels=True), made_by(original, sample)
    labels = torch.from_numpy(encoded.labels)[None]
    with torch.no_grad():
        expected = case.model(**{**made, "labels": labels}).loss
        of_certificate = reference._mean_loss(case.model, case.family, encoded)
        shown = [encoded, encoded] if sample.images else [encoded]
        batch = collate(shown, case.encoder, pixels=True, padded=False)
        batch = batch if sample.images else replace(batch, pixel_values=None)
        of_pack = case.model(**packed_inputs(case.config, batch)).loss
    torch.testing.assert_close(of_certificate, expected)
    torch.testing.assert_close(of_pack, expected)
