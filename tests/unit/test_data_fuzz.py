"""Whatever bytes a user's files hold, readers answer with samples, bad lines, or a DataError."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trials.data import formats
from trials.data.sample import BadLine, Lengths, Sample
from trials.errors import DataError
from trials.job import Source

WORDS = """
conversations messages from value role content human gpt user assistant system image images type text image_url
url bytes path query response history conversation instruction output video width height_list vit_num token_num
image_flags annotation root repeat_time annotation_path token_lengths datasets json_path sampling_strategy
file_name columns tags formatting hf_hub_url
"""
FORMATS = ("auto", "internvl", "lengths", "llama-factory", "messages", "swift")
KEYS = st.sampled_from(WORDS.split())
texts = KEYS | st.sampled_from(["<image>", "a.png", "data:,x", "http://h/a", "\ud800", "\0", ""]) | st.text(max_size=3)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=12
)


def turns(role: str, text: str, sides: list[str]) -> st.SearchStrategy[Any]:
    turn = st.fixed_dictionaries({role: st.sampled_from(sides) | values, text: texts | values})
    return st.lists(turn | values, min_size=1, max_size=4)


records = (
    st.fixed_dictionaries({"conversations": turns("from", "value", ["human", "gpt"])}, optional={"image": values})
    | st.fixed_dictionaries({"messages": turns("role", "content", ["user", "assistant"])}, optional={"images": values})
    | st.fixed_dictionaries({"query": values, "response": values}, optional={"history": values, "system": values})
    | st.dictionaries(KEYS, st.dictionaries(KEYS, values, max_size=3), max_size=3)
    | values
)
many = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def read_all(path: Path, format_name: str) -> None:
    """Reads everything twice, as indexing and training do."""
    with suppress(DataError):
        for file in formats.resolve(Source(path=path, format=format_name), path.parent):
            for chunk in formats.chunks(file):
                assert formats.digest(file, chunk)
                for place, found in formats.records(file, chunk):
                    assert isinstance(found, Sample | Lengths | BadLine)
                    assert not isinstance(found, BadLine) or str(found).encode()
                    assert isinstance(formats.read(file, place), Sample | BadLine)


@many
@given(st.lists(records, max_size=5), st.sampled_from(FORMATS), st.sampled_from([None, 0, 1]), st.booleans())
def test_any_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: list[Any], name: str, indent: int | None, in_lines: bool
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.json"
    lines = "\n".join(json.dumps(value) for value in content)
    path.write_text(lines if in_lines else json.dumps(content, indent=indent))
    read_all(path, name)


@many
@given(
    st.lists(st.binary(max_size=20) | st.sampled_from([b"[", b"]", b"{", b"}", b",", b'"', b"\n", b"\\"])),
    st.sampled_from([".json", ".yaml", ".jsonl"]),
    st.sampled_from(FORMATS),
)
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], suffix: str, name: str
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / f"a{suffix}"
    path.write_bytes(b"".join(parts))
    read_all(path, name)


@many
@given(
    st.lists(records, min_size=1, max_size=4), st.integers(0, 200), st.binary(max_size=3), st.sampled_from([None, 2])
)
def test_damaged_json_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: list[Any], place: int, damage: bytes, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.json"
    whole = json.dumps(content, indent=indent).encode()
    path.write_bytes(whole[:place] + damage + whole[place + len(damage) :])
    read_all(path, "messages")
