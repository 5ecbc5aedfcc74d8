"""Token ids and labels of every family are those of transformers' own processor, and each fault in them is named."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.machines.planted.faults import INPUT_FAULTS
from tests.tiny_models import text
from tests.tiny_models.tiles import llava
from tests.values.parameters import parameters
from tests.values.training import prepared_of
from trials import plugins
from trials.data.records.sample import IGNORED, IMAGE, Encoder, Sample, Turn
from trials.errors import DataError
from trials.model.family import load_family
from trials.model.inputs import chat
from trials.model.inputs.answers import find_answers
from trials.model.plain.differing import difference
from trials.model.plain.plain_inputs import PlainInputs
from trials.model.skeleton import load_config

TINY: plugins.Plugins[Any] = plugins.Plugins("tests.tiny_models")
ASKED = Turn(role="user", text="What is it?")
TURNS = (
    ASKED,
    Turn(role="assistant", text="A red circle."),
    Turn(role="user", text="And now?"),
    Turn(role="assistant", text="Nothing.", is_learnt=False),
    Turn(role="user", text="And at the end?"),
    Turn(role="assistant", text=" Two blue squares.\n"),
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ message['content'] }}<|im_end|>"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER_ALONE = "{{ '\\n' + message['content'] }}{% endgeneration %}<|im_end|>"
THINKING = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% if loop.last %}<think>\n\n</think>\n\n{% endif %}{{ message['content'].split('</think>')[-1].strip() }}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Writes no thoughts of earlier answers, and empty ones of the last, as Qwen3's does."""


def encoder_of(folder: Path, max_tokens: int | None = None) -> Encoder:
    return load_family(load_config(str(folder))).encoder(str(folder), max_tokens=max_tokens)


def plain_of(folder: Path) -> PlainInputs:
    return PlainInputs(str(folder), load_config(str(folder)), trust_remote_code=False)


def said(*turns: Turn, images: tuple[Path, ...] = ()) -> Sample:
    return Sample(turns=turns, images=images, image_sizes=(None,) * len(images))


def difference_of(folder: Path, sample: Sample) -> str | None:
    return difference(encoder_of(folder).encode(sample, pixels=False), plain_of(folder).expected(sample), None)


def with_template(folder: Path, template: str) -> Path:
    text.make(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


@pytest.mark.parametrize(
    "name",
    parameters({name: name for name in plugins.names(TINY)}, short=("gemma3", "idefics3", "internvl", "paddleocr-vl")),
)
def test_ids_and_labels_are_those_of_the_processor_of_transformers(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    plugins.load(TINY, name).make(folder)
    samples = [said(*TURNS), said(Turn(role="system", text="Be brief."), *TURNS)]
    if getattr(load_config(str(folder)), "vision_config", None) is not None:
        images = tuple(tmp_path / f"{width}.png" for width in (60, 130))
        for path in images:
            Image.new("RGB", (int(path.stem), 70), (90, 140, 30)).save(path)
        both = Turn(role="user", text=f"Compare {IMAGE} with {IMAGE}")
        again = Turn(role="user", text=f"And {IMAGE}?")
        samples += [
            said(both, *TURNS[1:], images=images),
            said(Turn(role="user", text=f"{IMAGE}\nWhat?"), TURNS[1], again, TURNS[5], images=images),
        ]
    encoder, plain = encoder_of(folder), plain_of(folder)
    for sample in samples:
        expected = plain.expected(sample)
        assert expected.is_target is not None
        assert difference(encoder.encode(sample, pixels=False), expected, None) is None


def test_every_fault_in_ids_or_labels_is_named(tmp_path: Path) -> None:
    llava.make(tmp_path)
    encoded, expected = (
        encoder_of(tmp_path).encode(said(*TURNS), pixels=False),
        plain_of(tmp_path).expected(said(*TURNS)),
    )
    assert difference(encoded, expected, None) is None
    for name, fault in INPUT_FAULTS.items():
        found = difference(fault(encoded), expected, None)
        assert found is not None, name
        assert ("token 1 is" if name == "a second beginning" else "the label of token") in found, name


def test_what_a_template_marks_as_generated_is_what_is_learnt(tmp_path: Path) -> None:
    folder = with_template(tmp_path, MARKED)
    expected = plain_of(folder).expected(said(*TURNS))
    assert difference_of(folder, said(*TURNS)) is None
    assert expected.is_target is not None
    shown = plain_of(folder)._tokenizer.decode(expected.input_ids[expected.is_target])
    assert shown == "A red circle.<|im_end|>Two blue squares.\n<|im_end|>"


def test_an_answer_ends_with_its_turn_where_the_marks_end_before(tmp_path: Path) -> None:
    """As in the published templates of LLaVA-OneVision, whose marks also begin with the line feed."""
    marked = MARKED.replace("{{ message['content'] }}<|im_end|>{% endgeneration %}", ANSWER_ALONE)
    folder = with_template(tmp_path, marked.replace("{{ message['role'] }}\n", "{{ message['role'] }} ", 1))
    expected = plain_of(folder).expected(said(*TURNS))
    assert difference_of(folder, said(*TURNS)) is None
    assert expected.is_target is not None
    shown = plain_of(folder)._tokenizer.decode(expected.input_ids[expected.is_target])
    assert shown == "A red circle.<|im_end|>Two blue squares.\n<|im_end|>"


def test_thoughts_that_a_template_leaves_out_are_no_answers(tmp_path: Path) -> None:
    folder = with_template(tmp_path, THINKING)
    thought = Turn(role="assistant", text="<think>It is round.</think>A circle.")
    sample = said(ASKED, thought, *TURNS[2:])
    expected = plain_of(folder).expected(sample)
    assert expected.is_target is not None
    shown = plain_of(folder)._tokenizer.decode(expected.input_ids[expected.is_target])
    assert shown == "A circle.<|im_end|><think>\n\n</think>\n\nTwo blue squares.<|im_end|>"


@pytest.mark.parametrize("name", ["mistral3", "text"])
def test_labels_are_compared_where_a_template_writes_the_date(name: str, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path)
    file = tmp_path / "chat_template.jinja"
    file.write_text("The date is {{ strftime_now('%Y-%m-%d') }}. " + file.read_text())
    assert plain_of(tmp_path).expected(said(*TURNS)).is_target is not None
    assert difference_of(tmp_path, said(*TURNS)) is None


def test_a_sample_that_is_cut_is_compared_up_to_the_cut(tmp_path: Path) -> None:
    text.make(tmp_path)
    cut = encoder_of(tmp_path, 40).encode(said(*TURNS), pixels=False)
    expected = plain_of(tmp_path).expected(said(*TURNS))
    assert len(cut.input_ids) == 40
    assert (cut.labels != IGNORED).any()
    assert difference(cut, expected, 40) is None
    assert "(40 tokens instead of" in str(difference(cut, expected, None))


def test_records_that_differ_end_a_command_before_anything_runs(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_of(example, tmp_path / "right")
    monkeypatch.setattr(chat, "find_answers", lambda *given: list(find_answers(*given))[:1])
    with pytest.raises(
        DataError, match=r"train\.jsonl:\d+: the label of token \d+ is -100 instead of .* by transformers'"
    ):
        prepared_of(example, tmp_path / "wrong")


def test_a_warning_says_that_no_labels_could_be_compared(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared_of(example, tmp_path / "compared")
    assert "labels of no record" not in caplog.text
    monkeypatch.setattr(PlainInputs, "_answer_spans", lambda *given: None)
    prepared_of(example, tmp_path / "uncompared")
    assert "labels of no record" in caplog.text
