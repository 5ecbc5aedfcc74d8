"""Tokens that are kept when lengths are measured are those that a sample has when it is encoded anew."""

import json
import multiprocessing
import os
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests import tiny_models
from tests.values.data import write_records
from tests.values.parameters import examples, parameters
from trials import plugins
from trials.data import cache
from trials.data.epoch import PackPart
from trials.data.index import DatasetIndex
from trials.data.indexing import IndexReport, build_index
from trials.data.loader import PackDataset, encode
from trials.data.records import file_chunk
from trials.data.records.sample import Encoded, Encoder
from trials.job import DataSection, ModelSection, Source
from trials.model.inputs.chat import ChatMeasurer
from trials.model.inputs.encoders import load_encoder
from trials.sharing.share import ALONE

FAMILIES = [name for name in plugins.names(plugins.Plugins(tiny_models.__name__)) if name != "mistral3-inner-features"]
FILMED = ("glm4v", "qwen2-vl", "qwen2-5-vl", "qwen3-vl", "llava-onevision", "llava-next-video")
ASKED, SAID = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": " A red circle.\n\nBoth. "}
SHOWN = {"role": "user", "content": "<image>\nWhat is it?<image>"}
PICTURES = {"images": ["a.png", "b.png"]}
TEXT_FORMS: dict[str, list[dict[str, Any]]] = {
    "messages": [
        {"messages": [ASKED, SAID]},
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                ASKED,
                SAID,
                ASKED,
                {**SAID, "loss": False},
                ASKED,
                SAID,
            ]
        },
    ],
    "conversations": [
        {"conversations": [{"from": "human", "value": "First?"}, {"from": "gpt", "value": "\u00e4 \U0001f600"}]}
    ],
    "prompt": [{"prompt": "What is it?", "completion": "A circle."}],
}
SHOWN_FORMS: dict[str, list[dict[str, Any]]] = {
    "messages": [{"messages": [SHOWN, SAID], **PICTURES}, {"messages": [ASKED, SAID, SHOWN, SAID], **PICTURES}],
    "conversations": [
        {"image": "a.png", "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "One."}]}
    ],
    "cauldron": [
        {"images": ["a.png"], "texts": [{"user": "What?", "assistant": "One."}, {"user": "And?", "assistant": "Two."}]}
    ],
}
FILMED_FORMS = {
    "filmed": [{"messages": [{"role": "user", "content": "<video> Look."}, SAID], "videos": [["a.png", "a.png"]]}]
}


@pytest.fixture(scope="module")
def encoder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Encoder]:
    made: dict[str, Encoder] = {}

    def encoder(name: str) -> Encoder:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            plugins.load(plugins.Plugins(tiny_models.__name__), name).make(folder)
            made[name] = load_encoder(
                ModelSection(path=str(folder)), DataSection(sources=(Source(path=Path("a.jsonl")),))
            )
        return made[name]

    return encoder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with two images and a file of records in three chunks."""
    for name, size in (("a", (40, 90)), ("b", (54, 54))):
        Image.new("RGB", size, (200, 10, 10)).save(tmp_path / f"{name}.png")
    write_records(tmp_path / "a.jsonl", *({"messages": [{**ASKED, "content": f"Number {n}?"}, SAID]} for n in range(6)))
    return tmp_path


def indexed(folder: Path, encoder: Encoder, name: str = "a.jsonl") -> tuple[DatasetIndex, IndexReport]:
    section = DataSection(sources=(Source(path=Path(name)),))
    return build_index(section, encoder, folder, cache=folder / "cache", workers=1)


def index_of(folder: Path, encoder: Encoder, name: str = "a.jsonl") -> DatasetIndex:
    return indexed(folder, encoder, name)[0]


def same(one: Encoded, other: Encoded) -> bool:
    """Whether two encoded samples are equal to the bit, types included."""
    fields = ("input_ids", "labels", "positions", "pixel_values", "grids")
    pairs = [(getattr(one, name), getattr(other, name)) for name in fields]
    return all(
        first is second or (first.dtype == second.dtype and np.array_equal(first, second)) for first, second in pairs
    )


@contextmanager
def nothing_written() -> Iterator[None]:
    """Fail where a conversation is written and tokenised."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChatMeasurer, "_tokenised", None)
        yield


@pytest.mark.parametrize(
    "name",
    parameters(
        {name: name for name in FAMILIES},
        short=("internvl", "qwen2-5-vl", "qwen3-vl", "llava-onevision", "gemma3", "text"),
    ),
)
def test_kept_tokens_are_those_of_a_sample_encoded_anew(
    name: str, folder: Path, encoder_of: Callable[[str], Encoder]
) -> None:
    encoder = encoder_of(name)
    forms = {f"text-{form}": records for form, records in TEXT_FORMS.items()}
    if encoder.unit_shape != (0,):
        forms |= SHOWN_FORMS
    if name in FILMED:
        forms |= FILMED_FORMS
    for form, records in forms.items():
        write_records(folder / f"{form}.jsonl", *records)
        index = index_of(folder, encoder, f"{form}.jsonl")
        assert len(index) == len(records), form
        for row in range(len(index)):
            for pixels in (False, True):
                anew = encoder.encode(index.sample(row), pixels=pixels)
                with nothing_written():
                    assert same(encode(index, row, encoder, pixels=pixels), anew), (form, row)


@settings(max_examples=examples(15))
@given(
    texts=st.lists(
        st.tuples(st.text(max_size=20), st.text(min_size=1, max_size=20), st.booleans()), min_size=1, max_size=4
    )
)
def test_whatever_a_conversation_says_its_kept_tokens_are_its_own(
    encoder_of: Callable[[str], Encoder], texts: list[tuple[str, str, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    encoder, made = encoder_of("text"), tmp_path_factory.mktemp("said")
    turns = [
        each
        for asked, said, learnt in texts
        for each in ({"role": "user", "content": asked}, {"role": "assistant", "content": f"{said}.", "loss": learnt})
    ]
    write_records(made / "a.jsonl", {"messages": turns}, {"messages": [ASKED, SAID]})
    index = index_of(made, encoder)
    for row in range(len(index)):
        anew = encoder.encode(index.sample(row), pixels=False)
        with nothing_written():
            assert same(encode(index, row, encoder, pixels=False), anew)


def test_the_index_that_ranks_load_has_them(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    index = index_of(folder, encoder_of("text"))
    index.save(folder / "index.npz")
    for loaded in (DatasetIndex.load(folder / "index.npz"), index_of(folder, encoder_of("text"))):
        assert [loaded.sealed(row) for row in range(6)] == [index.sealed(row) for row in range(6)]
    some = index.keep(np.array([1, 4]))
    assert [some.sealed(0), some.sealed(1)] == [index.sealed(1), index.sealed(4)]
    assert all(index.sealed(row) for row in range(6))
    bare = build_index(DataSection(sources=(Source(path=Path("a.jsonl")),)), encoder_of("text"), folder, workers=1)[0]
    assert bare.sealed(0) == b""
    assert bare.content_digest != index.content_digest


def test_tokens_of_a_record_that_has_changed_since_are_not_used(
    folder: Path, encoder_of: Callable[[str], Encoder]
) -> None:
    encoder, index = encoder_of("text"), index_of(folder, encoder_of("text"))
    content = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(content.replace("Number 2", "Number 7"))
    changed = encode(index, 2, encoder, pixels=False)
    assert same(changed, encoder.encode(index.sample(2), pixels=False))
    (folder / "a.jsonl").write_text(content)
    assert not same(changed, encode(index, 2, encoder, pixels=False))


def test_tokens_of_another_model_are_not_used(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    index, other = index_of(folder, encoder_of("text")), encoder_of("qwen2-vl")
    sample = index.sample(0)
    assert same(other.encode(sample, pixels=False, kept=index.sealed(0)), other.encode(sample, pixels=False))


@pytest.mark.parametrize(
    "name", ["processor_config.json", "chat_template.json", "chat_template.jinja", "tokenizer_config.json"]
)
def test_a_chat_template_that_was_edited_is_used_for_all_records(name: str, folder: Path) -> None:
    model = folder / "model"
    plugins.load(plugins.Plugins(tiny_models.__name__), "qwen2-vl").make(model)
    template = (model / "chat_template.jinja").read_text()
    (model / "chat_template.jinja").unlink()
    before = (model / name).read_text() if (model / name).exists() else "{}"

    def stated(text: str) -> Encoder:
        written = text if name.endswith(".jinja") else json.dumps({**json.loads(before), "chat_template": text})
        (model / name).write_text(written)
        return load_encoder(ModelSection(path=str(model)), DataSection(sources=(Source(path=Path("a.jsonl")),)))

    index_of(folder, stated(template))
    edited = stated(template.replace("<|im_start|>", "<|im_start|> "))
    index, report = indexed(folder, edited)
    assert report.measured == 6
    anew = edited.encode(index.sample(0), pixels=False)
    assert index.text_tokens[0] == len(anew.input_ids)
    assert same(encode(index, 0, edited, pixels=False), anew)


def damages(content: bytes) -> Iterator[bytes]:
    yield b""
    yield b"\xff" * len(content)
    yield content[: len(content) // 2]
    for position in range(0, len(content), 31):
        yield content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


def test_damaged_tokens_are_not_believed_and_made_again(
    folder: Path, encoder_of: Callable[[str], Encoder], caplog: pytest.LogCaptureFixture
) -> None:
    encoder, index = encoder_of("text"), index_of(folder, encoder_of("text"))
    (file,) = (folder / "cache").glob("*.tokens")
    content, whole = file.read_bytes(), [encode(index, row, encoder, pixels=False) for row in range(6)]
    for damage in damages(content):
        caplog.clear()
        file.write_bytes(damage)
        assert all(same(encode(index, row, encoder, pixels=False), whole[row]) for row in range(6))
        assert not file.exists()
        assert len([each for each in caplog.messages if "were damaged; they are removed" in each]) == 1
        index_of(folder, encoder)
        assert file.read_bytes() == content


def test_tokens_that_were_deleted_are_made_again(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    encoder, index = encoder_of("text"), index_of(folder, encoder_of("text"))
    shutil.rmtree(folder / "cache")
    assert same(encode(index, 0, encoder, pixels=False), encoder.encode(index.sample(0), pixels=False))
    index_of(folder, encoder)
    assert len(list((folder / "cache").glob("*.tokens"))) == 1


def test_a_replaced_image_leaves_no_tokens_behind(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    encoder = encoder_of("qwen2-vl")
    (folder / "b.png").rename(folder / "hidden.png")
    write_records(folder / "shown.jsonl", TEXT_FORMS["messages"][0], *SHOWN_FORMS["messages"])
    assert len(index_of(folder, encoder, "shown.jsonl")) == 1
    (folder / "hidden.png").rename(folder / "b.png")
    assert len(index_of(folder, encoder, "shown.jsonl")) == 3
    assert len(list((folder / "cache").glob("*.tokens"))) == 1


Disk = namedtuple("Disk", ["total", "used", "free"])


def test_a_disk_without_room_gets_no_tokens_until_it_has_some(
    folder: Path,
    encoder_of: Callable[[str], Encoder],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", 2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(total=1000, used=900, free=100))
    index = index_of(folder, encoder_of("text"))
    (message,) = caplog.messages
    assert "tokens cannot be kept" in message
    assert "too little space left" in message
    assert indexed(folder, encoder_of("text"))[1].measured == 0
    assert index.sealed(0) == b""
    assert not list((folder / "cache").glob("*.tokens"))
    monkeypatch.undo()
    monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", 2)
    assert all(index_of(folder, encoder_of("text")).sealed(row) for row in range(6))


def test_tokens_that_cannot_be_written_cost_a_warning_and_no_lengths(
    folder: Path, encoder_of: Callable[[str], Encoder], caplog: pytest.LogCaptureFixture
) -> None:
    write_records(folder / "a.jsonl", *({"messages": [ASKED, {**SAID, "content": "word " * 999}]} for _ in range(9)))
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # lengths are smaller, tokens larger
    try:
        index = index_of(folder, encoder_of("text"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len([each for each in caplog.messages if "tokens cannot be kept" in each and "File too large" in each]) == 1
    assert (len(index), index.sealed(0)) == (9, b"")
    assert [path.suffix for path in (folder / "cache").iterdir()] == [".npz"]
    assert indexed(folder, encoder_of("text"))[1].measured == 0


def _index_until_killed(folder: Path, encoder: Encoder) -> None:
    def slow(*_: Any, **__: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    cache._encoded = slow  # the tokens are written, the lengths are not
    index_of(folder, encoder)


def test_a_killed_writer_leaves_nothing_that_is_believed(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    encoder = encoder_of("text")
    killed = multiprocessing.get_context("fork").Process(target=_index_until_killed, args=(folder, encoder))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    assert not list((folder / "cache").glob("*.npz"))
    index = index_of(folder, encoder)
    with nothing_written():
        found = [encode(index, row, encoder, pixels=False) for row in range(6)]
    assert all(same(each, encoder.encode(index.sample(row), pixels=False)) for row, each in enumerate(found))


def test_two_writers_at_once_leave_whole_tokens(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    encoder, context = encoder_of("text"), multiprocessing.get_context("fork")
    writers = [context.Process(target=index_of, args=(folder, encoder)) for _ in range(2)]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
    index = index_of(folder, encoder)
    assert len(list((folder / "cache").iterdir())) == 2
    with nothing_written():
        assert len([encode(index, row, encoder, pixels=False) for row in range(6)]) == 6


def test_the_loader_uses_them(folder: Path, encoder_of: Callable[[str], Encoder]) -> None:
    encoder, index = encoder_of("text"), index_of(folder, encoder_of("text"))
    packs = [PackPart(rows=np.arange(6), level=0, share=ALONE)]
    dataset = PackDataset(index, packs, encoder, pixels=True, padded=False)
    with nothing_written():
        assert dataset[0].faults == ()
