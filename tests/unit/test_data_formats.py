import json
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data_values import file_of, record, write_records
from trials.data import formats, jsonl
from trials.data.formats import internvl
from trials.data.sample import BadLine, Sample
from trials.errors import DataError

TEXT = record("What is it?", "A circle.")
FAULTS: list[tuple[object, str]] = [
    (b"{", "not JSON"),
    (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"id": "\xff"}', "not UTF-8"),
    (b"[1]", "holds a JSON list"),
    ({"id": 1}, "`conversations` is missing; the record has id"),
    ({"conversations": "hello"}, "`conversations` is not a list"),
    ({"conversations": []}, "`conversations` is empty"),
    ({"conversations": ["hello"]}, "turn 1 is not an object"),
    ({"conversations": [{"from": "gpt", "text": "a"}]}, "it has `text`, rename that to `value`"),
    ({"conversations": [{"from": "gpt"}]}, "turn 1 has no text under `value`"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1 has no text under `value`"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, "turn 1 is from 'robot'; expected human, gpt or system"),
    ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "turn 1 is from"),
    (b'{"conversations": [{"from": "gpt", "value": "\\ud800"}]}', "half of a surrogate pair"),
    (record("a", "b", image=None), "`image` is null"),
    (record("a", "b", image=7), "`image` is 7"),
    (record("a", "b", image=["a.png", None]), "no file name"),
    (record("a", "b", image="a\0.png"), "no file name"),
    (record("<image>a", "b"), "1 <image> but the record names 0 images"),
    (record("<image><image>a", "b", image="a.png"), "2 <image> but the record names 1 images"),
    (record("a", "<image>b", image=["a.png", "b.png"]), "0 <image> but the record names 2 images"),
    (record("a", "b", video="a.mp4"), "`video` is not supported"),
]


def records(path: Path) -> list[Sample | BadLine]:
    return [found for _, found in internvl.records(file_of(path))]


@pytest.mark.parametrize(("line", "reason"), FAULTS)
def test_a_faulty_line_is_reported_with_its_reason(tmp_path: Path, line: object, reason: str) -> None:
    path = write_records(tmp_path / "a.jsonl", TEXT, line, TEXT)
    before, bad, after = records(path)
    assert isinstance(before, Sample)
    assert isinstance(after, Sample)
    assert isinstance(bad, BadLine)
    assert (bad.path, bad.line) == (path, 2)
    assert reason in bad.reason


def test_a_line_above_the_size_limit_is_reported_and_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 200)
    path = write_records(tmp_path / "a.jsonl", record("x" * 1000, "b"), TEXT)
    (_, long), (place, after) = internvl.records(file_of(path))
    assert isinstance(long, BadLine)
    assert "longer than" in long.reason
    assert isinstance(after, Sample)
    assert internvl.read(file_of(path), place) == after


def test_blank_lines_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = json.dumps(TEXT).encode()
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\r\n\r\n  \n" + line)
    found = list(internvl.records(file_of(path)))
    assert [place[1] for place, _ in found] == [1, 4]
    assert all(isinstance(sample, Sample) for _, sample in found)
    assert internvl.recognises(path)


@given(st.lists(st.sampled_from([json.dumps(TEXT).encode(), b"", b"{", b'{"conversations": []}', b"\xff"]), min_size=1))
def test_a_record_read_again_is_the_one_that_was_streamed(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\r\n".join(content))
    for place, found in internvl.records(file_of(path)):
        assert internvl.read(file_of(path), place) == found


def test_a_single_image_without_placeholder_is_shown_in_the_first_human_turn(tmp_path: Path) -> None:
    conversation = [{"from": "system", "value": "Be brief."}, *record("What?", "A circle.")["conversations"]]
    (sample,) = records(write_records(tmp_path / "a.jsonl", {"image": "a.png", "conversations": conversation}))
    assert isinstance(sample, Sample)
    assert [turn.text for turn in sample.turns] == ["Be brief.", "<image>\nWhat?", "A circle."]
    assert [turn.role for turn in sample.turns] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("stated", "images", "sizes"),
    [
        ({}, [], []),
        ({"image": ""}, [], []),
        ({"image": "a.png", "width": 4, "height": 2}, ["a.png"], [(2, 4)]),
        ({"image": "a.png", "width": "4", "height": 2}, ["a.png"], [None]),
        ({"image": ["a.png", "b.png"], "width_list": [4], "height_list": [2]}, ["a.png", "b.png"], [(2, 4), None]),
        ({"image": ["a.png"], "width_list": 3, "height_list": None}, ["a.png"], [None]),
    ],
)
def test_images_come_with_the_size_that_the_record_states(
    tmp_path: Path, stated: dict[str, Any], images: list[str], sizes: list[Any]
) -> None:
    (sample,) = records(write_records(tmp_path / "a.jsonl", record("<image>" * len(images), "b", **stated)))
    assert isinstance(sample, Sample)
    assert sample.images == tuple(tmp_path / name for name in images)
    assert sample.image_sizes == tuple(sizes)


def test_an_answer_may_spell_the_placeholder(tmp_path: Path) -> None:
    (sample,) = records(write_records(tmp_path / "a.jsonl", record("How are pictures marked?", "With <image>.")))
    assert isinstance(sample, Sample)
    assert not sample.images


def write_meta(folder: Path, **entry: Any) -> Path:
    path = folder / "meta.json"
    path.write_text(json.dumps({"shapes": {"root": "pictures", "annotation": "a.jsonl", **entry}}, indent=1))
    return path


def test_a_meta_file_lists_files_with_their_repeats(tmp_path: Path) -> None:
    meta = write_meta(tmp_path, repeat_time=0.5)
    (listed,) = internvl.files(file_of(meta, repeat=3.0))
    assert listed == file_of(tmp_path / "a.jsonl", images=tmp_path / "pictures", repeat=1.5)
    assert formats.detect(meta) == "internvl"


def test_a_record_file_lists_itself(tmp_path: Path) -> None:
    file = file_of(write_records(tmp_path / "a.jsonl", TEXT))
    assert list(internvl.files(file)) == [file]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"repeat_time": 0}, "`repeat_time` is 0; write a number above 0"),
        ({"repeat_time": True}, "`repeat_time` is True"),
        ({"repeat_time": float("nan")}, "`repeat_time` is nan"),
        ({"annotation": 3}, "`annotation` is 3"),
    ],
)
def test_a_wrong_entry_of_a_meta_file_is_named(tmp_path: Path, entry: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=f'meta.json: "shapes": {message}'):
        list(internvl.files(file_of(write_meta(tmp_path, **entry))))


def test_a_meta_file_that_sets_its_own_tiles_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        list(internvl.files(file_of(write_meta(tmp_path, max_dynamic_patch=6))))
    assert "max_dynamic_patch is ignored" in caplog.text


@pytest.mark.parametrize("content", ["\n", "hello\n", '[{"conversations": []}]', '{"messages": []}\n', "\xff"])
def test_a_file_in_no_known_format_is_refused_with_the_formats(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(DataError, match="is in no format known here; set `format` of this source to one of: internvl"):
        formats.detect(path)


def test_an_empty_file_is_called_empty(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.jsonl is empty; write the dataset again"):
        formats.detect(write_records(tmp_path / "a.jsonl"))


def test_a_file_is_recognised_behind_faulty_lines(tmp_path: Path) -> None:
    assert formats.detect(write_records(tmp_path / "a.jsonl", b"{", {"id": 1}, TEXT)) == "internvl"


def test_an_unknown_format_is_refused_with_the_formats() -> None:
    with pytest.raises(DataError, match="'parquet' is not one of the formats here: internvl, auto"):
        formats.load("parquet")


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.jsonl does not exist; correct its path"):
        formats.detect(tmp_path / "no.jsonl")
