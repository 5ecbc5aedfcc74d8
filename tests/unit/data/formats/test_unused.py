"""Every key, turn and picture of a record is used, refused or named."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from tests.programs.measurers import Words
from tests.values.data import file_of, record, write_records
from trials.data import formats
from trials.data.indexing import build_index
from trials.data.lengths import MOST_UNUSED, measure
from trials.data.records import conversation
from trials.data.records.placement import LOST_VIDEO, placed
from trials.data.records.record import RecordError
from trials.data.records.sample import BadLine, Measured, Sample
from trials.data.records.watched import IDENTITY, Watched
from trials.errors import DataError
from trials.job import DataSection

PNG = "iVBORw0KGgoAAAA="
ASKED, ANSWERED = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
PARTS = [
    {"type": "image", "image": {"path": "a.png"}},
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "b.png"}},
    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}},
    {"type": "video", "video": {"video": "a.mp4", "fps": 2}},
    {"type": "text", "text": "q"},
]
RECORDS: dict[str, dict[str, Any]] = {
    "internvl": record("<image>q", "a", "q", "a", image="a.png"),
    "llava": record("<image>q", "a", image="a.png"),
    "qwen": record("<image><image>q", "a", images=["a.png", {"path": "b.png"}]),
    "messages": {"messages": [{"role": "user", "content": PARTS}, ANSWERED], "images": [{"path": "c.png"}]},
    "prompt-completion": {"prompt": [ASKED, ANSWERED, ASKED], "completion": [ANSWERED], "images": ["a.png"]},
    "swift": {"query": "q", "response": "a", "history": [{"query": "q", "response": "a"}], "images": ["a.png"]},
    "llama-factory": {"instruction": "<image>q", "output": "a", "history": [["q", "a"]], "images": ["a.png"]},
    "cauldron": {"texts": [{"user": "q", "assistant": "a"}], "images": [{"path": "a.png", "bytes": None}]},
    "lengths": {"vit_num": 3, "token_num": 9, "image_flags": 3},
}
TURNS = ("conversations", "messages", "prompt", "completion", "history", "texts")
VALUES = st.one_of(
    st.booleans(), st.integers(), st.text(min_size=1, max_size=9), st.lists(st.integers(), min_size=1, max_size=2)
)
NAMES = (
    "picture",
    "img",
    "loss_masks",
    "train_detail",
    "mask",
    "labels",
    "max_pixels",
    "sample_ratio",
    "cache_control",
)


def read(name: str, line: dict[str, Any]) -> Sample | Measured | str:
    """What is read from a record, or why it is bad."""
    try:
        return formats.load(name).read(line, file_of(Path("/data/a.jsonl"), format=name))
    except RecordError as error:
        return str(error)


def unused(**changes: Any) -> tuple[str, ...]:
    found = read("internvl", {**RECORDS["internvl"], **changes})
    assert isinstance(found, Sample), found
    return found.unused


def objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield every object of a record."""
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from objects(each)


# --- all of a record ---


@given(st.sampled_from(sorted(RECORDS)), st.integers(0, 99), st.one_of(st.sampled_from(NAMES), st.text()), VALUES)
@example("messages", 16, "max_pixels", 1)
def test_an_unknown_key_at_any_level_is_named_or_refused(name: str, number: int, key: str, value: object) -> None:
    line = copy.deepcopy(RECORDS[name])
    before = read(name, line)
    assert not isinstance(before, str), before
    assert before.unused == ()
    holders = [holder for holder in objects(line) if key not in holder and key not in IDENTITY]
    if holders:
        holders[number % len(holders)][key] = value
        after = read(name, line)
        # An image may have options of its own.
        options = after.image_options if isinstance(after, Sample) else ()
        is_option = isinstance(before, Sample) and options != before.image_options
        assert isinstance(after, str) or after.unused or is_option, line


@pytest.mark.parametrize("name", sorted(set(RECORDS) - {"lengths"}))
def test_one_more_turn_or_picture_is_in_the_sample_or_refused(name: str) -> None:
    before = read(name, RECORDS[name])
    lists = [key for key, value in RECORDS[name].items() if isinstance(value, list)]
    assert lists
    for key in lists:
        line = copy.deepcopy(RECORDS[name])
        line[key].append(copy.deepcopy(line[key][-1]))
        after = read(name, line)
        assert isinstance(before, Sample)
        if isinstance(after, Sample):
            grown = (len(after.turns) - len(before.turns)) if key in TURNS else len(after.images) - len(before.images)
            assert grown >= 1, (key, after)


def test_keys_are_named_once_with_their_level_and_few_of_them(tmp_path: Path) -> None:
    line = record(
        "q", "a", "q", "a", difficulty=3, source="x", bbox=[1], id=7, idx=3, empty={}, nothing=None, split="x"
    )
    for turn in line["conversations"]:
        turn["emotion"] = "sad"
    found = read("internvl", line)
    assert isinstance(found, Sample)
    assert found.unused == (
        *("the key `bbox`", "the key `emotion` of `conversations`", "the key `split`"),
        *("the metadata `difficulty`", "the metadata `source`"),
    )
    many = unused(**{f"{number}\x1b[2J\ud800": 1 for number in range(30)})
    assert (len(many), many[-1]) == (21, "other keys")
    assert all(each.isprintable() for each in many)
    lines = [record("q", "a", **{f"key{number}": 1}) for number in range(MOST_UNUSED + 50)]
    file = file_of(write_records(tmp_path / "a.jsonl", *lines))
    (chunk,) = formats.chunks(file)
    counts = measure(file, chunk, Words(), None).unused
    assert len(counts) == MOST_UNUSED + 1
    assert counts["other keys"][0] == 50


@pytest.mark.parametrize(
    "key",
    [
        *("task_instruction", "conversation_history", "previous_turns", "question_context", "language_instruction"),
        *("format_instruction", "source_text", "item_text", "num_repeats"),
    ],
)
def test_a_key_of_text_that_was_not_read_is_no_metadata(key: str) -> None:
    assert unused(**{key: "Be brief."}) == (f"the key `{key}`",)


@pytest.mark.parametrize(
    ("key", "value"), [("text_source", "x"), ("question_id", "q"), ("num_images", 2), ("num_turns", 3), ("topics", "x")]
)
def test_a_key_that_describes_text_is_metadata(key: str, value: object) -> None:
    assert unused(**{key: value}) == (f"the metadata `{key}`",)


@pytest.mark.parametrize(
    "key",
    [
        *("start_time", "end_index", "page_index", "page_number", "num_frames", "frame_number", "crop_size"),
        *("resized_width", "resize_height", "duration_level", "sample_fps"),
    ],
)
def test_a_key_that_would_change_what_is_shown_is_no_metadata(key: str) -> None:
    assert unused(**{key: 3}) == (f"the key `{key}`",)


@pytest.mark.parametrize("key", ["time", "timestamp", "event_time"])
def test_a_time_describes_a_record_unless_it_may_be_one_of_a_video(key: str) -> None:
    assert unused(**{key: [3, 5]}) == (f"the metadata `{key}`",)
    filmed = read("internvl", record("<video>q", "a", video="a.mp4", **{key: [3, 5]}))
    assert isinstance(filmed, Sample), filmed
    assert filmed.unused == (f"the key `{key}`",)


def test_metadata_is_one_line_and_no_surprise(tmp_path: Path) -> None:
    lines = [record("q", "a", source="x", split="train", question_id=4), record("q", "a", emotion="sad")]
    write_records(tmp_path / "a.jsonl", *lines)
    data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}]})
    _, report = build_index(data, Words(), tmp_path)
    assert [each.what for each in report.surprises] == ["the key `emotion`"]
    assert report.metadata == f"the metadata `question_id`, `source`, `split`, the first is {tmp_path}/a.jsonl:1"
    assert report.unused_lines() == (
        f"the key `emotion`, in 1 record, the first is {tmp_path}/a.jsonl:2",
        report.metadata,
    )


@pytest.mark.parametrize("name", ["messages", "prompt-completion", "swift", "internvl"])
def test_a_sample_that_lacks_what_its_record_gives_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file = file_of(write_records(tmp_path / "a.jsonl", b"{", RECORDS[name]), format=name)
    (chunk,) = formats.chunks(file)
    assert [type(found) for _, found in formats.records(file, chunk)] == [BadLine, Sample]
    monkeypatch.setattr(conversation, "placed", lambda said, *others: placed(said[:-1], *others))
    with pytest.raises(DataError, match=r"a.jsonl:2: turns: \d are given, \d are in the sample; this is a fault of"):
        list(formats.records(file, chunk))


def test_a_key_that_is_given_twice_makes_a_record_bad(tmp_path: Path) -> None:
    line = json.dumps(record("q", "a", image="a.png")).encode()
    path = write_records(tmp_path / "a.jsonl", line, line[:-1] + b', "image": "b.png"}')
    (chunk,) = formats.chunks(file_of(path))
    _, (_, bad) = formats.records(file_of(path), chunk)
    assert isinstance(bad, BadLine)
    assert bad.reason == '"image" is given twice, and one of them would be lost; keep one'


def test_what_another_format_would_read_is_named() -> None:
    found = read("prompt-completion", {"prompt": "q", "completion": "a", "messages": [ASKED, ANSWERED]})
    assert isinstance(found, Sample), found
    assert (len(found.turns), found.unused) == (2, ("the key `messages`",))
    found = read("swift", {"messages": [ASKED, ANSWERED], "query": "q", "response": "a"})
    assert isinstance(found, Sample), found
    assert found.unused == ("the key `query`", "the key `response`")


def test_an_object_knows_what_was_looked_at_of_it() -> None:
    watched = Watched({"a": {"b": 1, "c": [{"d": 1, "e": ""}]}, "f": 1})
    assert "f" in watched
    assert list(watched) == ["a", "f"]
    assert watched.unused() == ("the key `a`", "the key `f`")
    assert watched["a"].get("c")[0].get("none") is None
    assert watched.unused() == ("the key `b` of `a`", "the key `d` of `c` of `a`", "the key `f`")


# --- images and videos ---


@pytest.mark.parametrize("mark", ["<image>", "<video>"])
def test_a_placeholder_outside_of_questions_is_refused_where_a_record_has_what_it_stands_for(mark: str) -> None:
    media = {"image": "a.png"} if mark == "<image>" else {"video": "a.mp4"}
    for line in (record("q", f"a {mark}"), record(f"{mark}q", f"a {mark}"), record("q", "a", system=mark)):
        reason = str(read("qwen", {**line, **media}))
        assert "of all, holds " + mark + ", but only turns of the user show images and videos" in reason
    found = read("qwen", record("q", f"a {mark}"))
    assert isinstance(found, Sample), found
    assert found.unused == (f"the text {mark}, read as text",)


@pytest.mark.parametrize(
    "mark",
    [
        *("<|image_pad|>", "<IMG_CONTEXT>", "[IMG]", "<image_0>", "<image1>", "<image 2>", "<|image_1|>"),
        *("<img>b.png</img>", "<image_placeholder>", "<|video_pad|>", "<start_of_image>"),
        *("<Image>", "<VIDEO>"),
    ],
)
def test_placeholders_of_other_programs_are_refused_where_they_would_place_an_image(mark: str) -> None:
    assert "which places nothing here; write <image>" in str(read("internvl", record(f"{mark}q", "a", image="a.png")))
    for line in (record(f"{mark}q", "a"), record(f"<image>{mark}q", "a", image="a.png")):
        found = read("internvl", line)
        assert isinstance(found, Sample), found
        assert found.unused == (f"the text {'<img>...</img>' if '</img>' in mark else mark}, read as text",)


def test_a_mark_of_another_program_in_an_answer_is_named_and_refuses_nothing() -> None:
    found = read("internvl", record("q", "<Image>", image="a.png"))
    assert isinstance(found, Sample), found
    assert found.unused == ("the text <Image>, read as text",)


@pytest.mark.parametrize("videos", [{}, {"videos": []}, {"videos": None}])
def test_a_question_that_has_lost_its_video_is_told_from_text(videos: dict[str, Any]) -> None:
    found = read("qwen", record("<video>q", "a", **videos))
    assert isinstance(found, Sample), found
    assert found.unused == (LOST_VIDEO,)
    assert found.turns[0].text == "<video>q"
    found = read("qwen", record("q", "a <video>", **videos))
    assert isinstance(found, Sample), found
    assert found.unused == ("the text <video>, read as text",)


def test_parts_that_make_a_placeholder_together_are_refused() -> None:
    parts = [{"type": "text", "text": "<ima"}, {"type": "text", "text": "ge>"}]
    reason = read("messages", {"messages": [{"role": "user", "content": parts}, ANSWERED]})
    assert "parts of turn 1 make <image> or <video> of their texts together" in str(reason)


@pytest.mark.parametrize(
    ("part", "image"),
    [
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, b"\x89PNG\r\n\x1a\n"),
        ({"type": "image", "source": {"type": "url", "url": "file:///b.png"}}, Path("/b.png")),
        ({"type": "input_image", "image_url": "b.png"}, Path("/data/b.png")),
        ({"type": "image", "image": {"bytes": None, "path": None}, "url": {"url": None}}, Path("/data/a.png")),
        ({"type": "image", "index": 0}, Path("/data/a.png")),
    ],
)  # fmt: skip
def test_images_of_other_programs_are_shown(part: dict[str, Any], image: Path | bytes) -> None:
    given = {"images": ["a.png"]} if image == Path("/data/a.png") else {"images": None}
    messages = [{"role": "user", "content": [part, {"type": "input_text", "text": "q"}]}, ANSWERED]
    found = read("messages", {"messages": messages, **given})
    assert isinstance(found, Sample), found
    (shown,) = found.images
    assert (shown[:8] if isinstance(shown, bytes) else shown) == image
    assert (found.turns[0].text, found.unused) == ("<image>q", ())


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "a `source` of type 'file'; expected base64"),
        ({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PNG}}, "0 <image> but the"),
        ({"type": "input_image", "file_id": "f"}, "gives its image under `file_id`, which is not read"),
        ({"type": "image", "image_bytes": PNG}, "gives its image under `image_bytes`, which is not read"),
        ({"type": "image", "inline_data": {"data": PNG}}, "gives its image under `inline_data`, which is not read"),
        ({"inline_data": {"data": PNG}}, "part 1 of turn 1 is None; expected a text"),
        ({"type": "image", "image": "b.png", "image_url": "c.png"}, "under `image` and `image_url`; keep one"),
        ({"type": "video", "video": "b.mp4", "url": "clips/c"}, "under `video` and `url`; keep one"),
        ({"type": "text", "text": "q", "image": "b.png"}, "`image` of `content` of `messages` holds an image"),
        ({"type": "image", "thumbnail": {"data": [f"data:;base64,{PNG}"]}}, "`thumbnail` of `content` of `messages`"),
        ({"type": "image", "index": 1}, "image parts have `index` [1], but images are shown in their order"),
    ],
)
def test_an_image_that_would_not_be_shown_is_refused(part: dict[str, Any], reason: str) -> None:
    line = {"messages": [{"role": "user", "content": [part]}, ANSWERED], "images": ["a.png"]}
    assert reason in str(read("messages", line))


def test_further_pages_of_an_image_are_named(tmp_path: Path) -> None:
    page = Image.new("RGB", (4, 4))
    page.save(tmp_path / "a.tif", save_all=True, append_images=[page])
    page.save(tmp_path / "b.tif")
    write_records(tmp_path / "a.jsonl", *(record("<image>q", "a", image=f"{name}.tif") for name in "ab"))
    data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}]})
    (found,) = build_index(data, Words(), tmp_path)[1].surprises
    assert (found.what, found.records) == ("further pictures of an image, of which the first alone is shown", 1)


def test_an_image_of_a_turn_is_refused() -> None:
    line = {"messages": [{**ASKED, "images": ["b.png"]}, ANSWERED]}
    assert "`images` of `messages` holds an image" in str(read("messages", line))


@pytest.mark.parametrize("key", ["image", "images", "video", "videos", "system", "audio", "tools", "history"])
@pytest.mark.parametrize("value", [None, {"bytes": None, "path": None}, []])
def test_null_is_nothing(key: str, value: object) -> None:
    if key in ("system", "history") and value is not None:
        value = None
    for name, line in (("internvl", record("q", "a")), ("swift", {"query": "q", "response": "a"})):
        assert read(name, {**line, key: value}) == read(name, line)
