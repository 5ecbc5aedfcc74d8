import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.values.data import file_of, record, write_records
from trials.data import formats
from trials.data.formats import AnnotationFile
from trials.data.records.sample import IMAGE, BadLine, Lengths, Measured, Sample
from trials.errors import DataError
from trials.job import Source

TEXT = record("What is it?", "A circle.")
TURN = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A circle."}
PIXELS = base64.b64encode(b"pixels").decode()
FAULTS: list[tuple[object, str]] = [
    (b"{", "not JSON"),
    (b'{"id": ' + b"9" * 5000 + b"}", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"id": "\xff"}', "not UTF-8"),
    (b"[1]", "is a JSON list, not an object"),
    ({"id": 1}, "`conversations` is missing; the record has id"),
    ({"\ud800": 1, **dict.fromkeys(map(str, range(1000)))}, "the record has \\ud800, 0, 1, 2, 3, 4, 5, 6, 7, 8"),
    ({"conversations": "hello"}, "`conversations` is not a list"),
    ({"conversations": []}, "`conversations` is empty"),
    ({"conversations": ["hello"]}, "turn 1 is not an object"),
    ({"conversations": [{"from": "gpt", "text": "a"}]}, "it has `text`, rename that to `value`"),
    ({"conversations": [{"from": "gpt"}]}, "turn 1 has no text under `value`"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, "turn 1 has no text under `value`"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, "turn 1 is from 'robot'; expected human, gpt or system"),
    ({"conversations": [{"from": ["gpt"], "value": "a"}]}, "turn 1 is from"),
    (b'{"conversations": [{"from": "gpt", "value": "\\ud800"}]}', "half of a surrogate pair"),
    (record("a", "b", system=["Be brief."]), "`system` is not a text"),
    (record("a", "b", image=[None]), "`image` is neither a file name nor an image"),
    (record("a", "b", image=[{"bytes": None, "path": None}]), "`image` is neither a file name nor an image"),
    (record("a", "b", image=7), "`image` is 7"),
    (record("a", "b", image=["a.png", None]), "neither a file name nor an image"),
    (record("a", "b", image=["a.png", ""]), "neither a file name nor an image"),
    (record("a", "b", image=["\ud800.png"]), "neither a file name nor an image"),
    (record("a", "b", image="a\0.png"), "null character"),
    (record("a", "b", image="https://host/a.png"), "which is not fetched; download it and name the file"),
    (record("a", "b", image="s3://bucket/a.png"), "which is not fetched"),
    (record("a", "b", image="data:image/png;base64,"), "without content"),
    (record("a", "b", image="data:image/png;base64,%"), "cannot be decoded"),
    (record("a", "b", image={"image": {"image": {"image": {"image": "a.png"}}}}), "neither a file name nor an image"),
    (record("a", "b", image="a.png", images=["b.png"]), "images are given under `image` and `images`; keep one"),
    (record("<image>a", "b"), "1 <image> but the record names 0 images"),
    (record("<image><image>a", "b", image="a.png"), "2 <image> but the record names 1 image"),
    (record("a", "b", image=["a.png", "b.png"]), "0 <image> but the record names 2 images"),
    (record("a", "b", audio="a.wav"), "`audio` is not supported; remove it, or leave the record out"),
    (record("a", "b", tools="[]"), "`tools` is not supported; describe them in the system turn"),
    (record("a", "b", rejected_response="c"), "`rejected_response` is not supported"),
]
MESSAGE_FAULTS: list[tuple[object, str]] = [
    ([{"role": "user", "content": None}], "turn 1 has no text under `content`"),
    ([{"role": "user", "value": "a"}], "it has `value`, rename that to `content`"),
    ([{"role": "critic", "content": "a"}], "expected user, tool, observation"),
    ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "`tool_calls`, which is not supported"),
    ([TURN, {**ANSWER, "reasoning_content": "Hm."}], "turn 2 has `reasoning_content` as well as its text"),
    ([{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}], "part 1 of turn 1 is 'audio'"),
    ([{"role": "user", "content": ["a"]}], "part 1 of turn 1 is 'a'; expected a text, an image or a video"),
    ([{"role": "user", "content": [{"type": "text", "text": None}]}], "part 1 of turn 1 is not a text but null"),
    ([{"role": "user", "content": [{"type": "image"}]}], "1 <image> but the record names 0 images"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://h/a"}}]}], "is not fetched"),
    ([TURN, {"role": "assistant", "content": [{"type": "image", "path": "a.png"}]}], "turn 2 contains an image"),
]


def file_at(path: Path, **changes: Any) -> AnnotationFile:
    """The one file of a source, its format found out."""
    (file,) = formats.resolve(Source.model_validate({"path": path.name, **changes}), path.parent)
    return file


def everything(file: AnnotationFile) -> Iterator[tuple[formats.Place, Sample | Measured | BadLine]]:
    for chunk in formats.chunks(file):
        yield from formats.records(file, chunk)


def samples(path: Path, **changes: Any) -> list[Sample | Measured | BadLine]:
    return [found for _, found in everything(file_at(path, **changes))]


def only_sample(path: Path, **changes: Any) -> Sample:
    (found,) = samples(path, **changes)
    assert isinstance(found, Sample), found
    return found


def said(sample: Sample) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in sample.turns]


# --- faults ---


@pytest.mark.parametrize(("line", "reason"), FAULTS)
def test_a_faulty_line_is_reported_with_its_reason(tmp_path: Path, line: object, reason: str) -> None:
    path = write_records(tmp_path / "a.jsonl", TEXT, line, TEXT)
    before, bad, after = samples(path)
    assert isinstance(before, Sample)
    assert isinstance(after, Sample)
    assert isinstance(bad, BadLine)
    assert (bad.path, bad.place[1]) == (path, 2)
    assert reason in bad.reason
    assert bad.reason.isprintable()
    assert str(bad).encode()


@pytest.mark.parametrize(("messages", "reason"), MESSAGE_FAULTS)
def test_a_faulty_message_is_reported_with_its_reason(tmp_path: Path, messages: object, reason: str) -> None:
    path = write_records(tmp_path / "a.jsonl", {"messages": messages})
    (bad,) = samples(path, format="messages")
    assert isinstance(bad, BadLine)
    assert reason in bad.reason


@given(st.lists(st.sampled_from([json.dumps(TEXT).encode(), b"", b"{", b'{"conversations": []}', b"\xff"]), min_size=1))
def test_a_record_read_again_is_the_one_that_was_streamed(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(b"\r\n".join(content))
    for place, found in everything(file_of(path)):
        assert formats.read(file_of(path), place) == found


# --- from and value: InternVL, LLaVA, Qwen-VL ---


def test_a_single_image_without_placeholder_is_shown_in_the_first_user_turn(tmp_path: Path) -> None:
    conversation = [{"from": "system", "value": "Be brief."}, *record("What?", "A circle.")["conversations"]]
    found = only_sample(write_records(tmp_path / "a.jsonl", {"image": "a.png", "conversations": conversation}))
    assert said(found) == [("system", "Be brief."), ("user", "<image>\nWhat?"), ("assistant", "A circle.")]


@pytest.mark.parametrize(
    ("stated", "images", "sizes"),
    [
        ({}, [], []),
        ({"image": ""}, [], []),
        ({"image": []}, [], []),
        ({"image": None}, [], []),
        ({"image": {"bytes": None, "path": None}}, [], []),
        ({"image": "a.png", "width": 4, "height": 2}, ["a.png"], [(2, 4)]),
        ({"image": "a.png", "width": "4", "height": 2}, ["a.png"], [None]),
        ({"image": ["a.png", "b.png"], "width_list": [4], "height_list": [2]}, ["a.png", "b.png"], [(2, 4), None]),
        ({"image": ["a.png"], "width_list": 3, "height_list": None}, ["a.png"], [None]),
        ({"images": ["../a.png", "/b.png"]}, ["../a.png", "/b.png"], [None, None]),
    ],
)
def test_images_come_with_the_size_that_the_record_states(
    tmp_path: Path, stated: dict[str, Any], images: list[str], sizes: list[Any]
) -> None:
    found = only_sample(write_records(tmp_path / "a.jsonl", record("<image>" * len(images), "b", **stated)))
    assert found.images == tuple(tmp_path / name for name in images)
    assert found.image_sizes == tuple(sizes)


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (f"data:image/png;base64,{PIXELS}", b"pixels"),
        ("data:,pixels%00", b"pixels\0"),
        ({"bytes": None, "path": "a.png"}, Path("photos/a.png")),
        ({"image_url": {"url": "a.png"}}, Path("photos/a.png")),
        ("file:///a%20b.png", Path("/a b.png")),
        ("C:\\a.png", Path("photos/C:\\a.png")),
    ],
)
def test_an_image_may_be_named_or_given_whole(tmp_path: Path, image: object, expected: Path | bytes) -> None:
    path = write_records(tmp_path / "a.jsonl", record("a", "b", images=[image]))
    (tmp_path / "photos").mkdir()
    (found,) = only_sample(path, images="photos").images
    assert found == (tmp_path / expected if isinstance(expected, Path) else expected)


def test_an_answer_may_spell_the_placeholder(tmp_path: Path) -> None:
    found = only_sample(write_records(tmp_path / "a.jsonl", record("How are pictures marked?", "With <image>.")))
    assert not found.images


# --- messages ---


def test_parts_of_a_message_are_joined_in_their_order(tmp_path: Path) -> None:
    parts = [
        {"type": "text", "text": "Is "},
        {"type": "image"},
        {"type": "text", "text": " like "},
        {"type": "image_url", "image_url": {"url": f"data:;base64,{PIXELS}"}},
        {"type": "text", "text": " or <image>?"},
        {"type": "image", "base64": PIXELS, "text": None},
    ]
    line = {"messages": [{"role": "user", "content": parts}, ANSWER], "images": ["a.png", {"path": "b.png"}]}
    found = only_sample(write_records(tmp_path / "a.jsonl", line))
    assert said(found)[0] == ("user", f"Is {IMAGE} like {IMAGE} or {IMAGE}?{IMAGE}")
    assert found.images == (tmp_path / "a.png", b"pixels", tmp_path / "b.png", b"pixels")


def test_images_that_no_message_places_are_shown_first(tmp_path: Path) -> None:
    line = {"messages": [{"role": "system", "content": "Be brief."}, TURN, ANSWER], "images": ["a.png", "b.png"]}
    found = only_sample(write_records(tmp_path / "a.jsonl", line))
    assert said(found)[1] == ("user", "<image><image>What is it?")


def test_tools_answer_as_users_and_are_called_as_by_the_assistant(tmp_path: Path) -> None:
    roles = ["developer", "user", "tool_call", "tool", "function_call", "observation", "assistant"]
    line = {"messages": [{"role": role, "content": role} for role in roles]}
    found = only_sample(write_records(tmp_path / "a.jsonl", line))
    assert [turn.role for turn in found.turns] == ["system", *("user", "assistant") * 3]
    (unused,) = found.unused
    assert unused.startswith("the form of calls and results of tools")


# --- ms-swift ---


@pytest.mark.parametrize(
    "line",
    [
        {"system": "Be brief.", "query": "q2", "response": "r2", "history": [["q1", "r1"]]},
        {"system": "Be brief.", "conversation": [{"human": f"q{n}", "assistant": f"r{n}"} for n in (1, 2)]},
        {
            "conversations": [
                {"role": "system", "content": "Be brief."},
                *({"role": role, "content": f"{role[0]}{n}"} for n in (1, 2) for role in ("query", "response")),
            ]
        },
    ],
)
def test_ms_swift_writes_conversations_in_several_ways(tmp_path: Path, line: dict[str, Any]) -> None:
    for turn in line.get("conversations", ()):
        turn["role"] = {"query": "user", "response": "assistant"}.get(turn["role"], turn["role"])
    path = write_records(tmp_path / "a.jsonl", line)
    assert file_at(path).format == "swift"
    assert said(only_sample(path)) == [
        ("system", "Be brief."),
        ("user", "q1"),
        ("assistant", "r1"),
        ("user", "q2"),
        ("assistant", "r2"),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({"query": "q"}, "`messages` is missing"),
        ({"query": "q", "response": 3}, "`messages` is missing"),
        ({"query": 3, "response": "r"}, "the question of the record is not a text but 3"),
        ({"query": "q", "response": "r", "history": "x"}, "`history` is not a list"),
        ({"query": "q", "response": "r", "history": [["q"]]}, "pair 1 of `history` has no question under query"),
        (
            {"conversation": [{"human": "q", "assistant": "r"}, {"human": "q"}]},
            "the answer of pair 2 of `conversation`",
        ),
    ],
)
def test_a_faulty_pair_is_reported_with_its_reason(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    (bad,) = samples(write_records(tmp_path / "a.jsonl", line), format="swift")
    assert isinstance(bad, BadLine)
    assert reason in bad.reason


# --- LLaMA-Factory without a dataset_info.json ---


def test_an_instruction_and_its_input_are_one_question(tmp_path: Path) -> None:
    line = {"instruction": "Add.", "input": "1 2", "output": "3", "history": [["a", "b"]], "system": "Be brief."}
    path = write_records(tmp_path / "a.jsonl", line)
    assert file_at(path).format == "llama-factory"
    assert said(only_sample(path)) == [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "b"),
        ("user", "Add.\n1 2"),
        ("assistant", "3"),
    ]


# --- OmniBal's length caches ---


def test_length_caches_give_lengths(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps(
            [
                {"vit_num": 5, "token_num": 1341, "image_flags": 5},
                {"vit_num": 1, "token_num": 20, "image_flags": 0},
                {"vit_num": -1, "token_num": 20, "image_flags": 0},
                {"vit_num": 1, "token_num": 2**31, "image_flags": 1},
                {"vit_num": 1, "token_num": True},
            ],
            indent=4,
        )
    )
    file = file_at(path)
    (place, first), (_, text), *bad = everything(file)
    assert first == Measured(lengths=Lengths(vision_units=5, text_tokens=1341, target_tokens=1341))
    assert text == Measured(lengths=Lengths(vision_units=0, text_tokens=20, target_tokens=20))
    assert [fault.reason for _, fault in bad if isinstance(fault, BadLine)] == [
        "`vit_num` is -1; expected a whole number of at least 0",
        "`token_num` is 2147483648; expected a whole number of at least 1",
        "`token_num` is True; expected a whole number of at least 1",
    ]
    again = formats.read(file, place)
    assert isinstance(again, BadLine)
    assert "without a conversation" in again.reason


# --- recognition ---


@pytest.mark.parametrize(
    ("line", "in_lines", "in_list"),
    [
        (TEXT, "internvl", "llava"),
        (record("a", "b", images=["a.png"]), "qwen", "qwen"),
        ({"messages": [TURN, ANSWER]}, "messages", "messages"),
        ({"messages": [TURN, ANSWER], "images": []}, "messages", "messages"),
        ({"query": "a", "response": "b"}, "swift", "swift"),
        ({"instruction": "a", "output": "b"}, "llama-factory", "llama-factory"),
        ({"images": [], "texts": [{"user": "a", "assistant": "b"}]}, "cauldron", "cauldron"),
        ({"vit_num": 1, "token_num": 2, "image_flags": 1}, "lengths", "lengths"),
    ],
)
def test_formats_are_recognised_by_content(tmp_path: Path, line: object, in_lines: str, in_list: str) -> None:
    lines = write_records(tmp_path / "a", b"", b"{", {"id": 1}, line)
    assert (file_at(lines).format, file_at(lines).container) == (in_lines, "json-lines")
    listed = tmp_path / "b"
    listed.write_text(json.dumps([{"id": 1}, line]))
    assert (file_at(listed).format, file_at(listed).container) == (in_list, "json-list")


def test_a_table_of_conversations_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [
        record("<image>a", "b", image={"bytes": b"pixels", "path": "a.png"}),
        record("a", "b", image=None),
        record("a", "b", image={"bytes": None, "path": "a.png"}),
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    assert file_at(tmp_path / "a.parquet").format == "llava"
    found = samples(tmp_path / "a.parquet")
    assert [sample.images for sample in found if isinstance(sample, Sample)] == [
        (b"pixels",),
        (),
        (tmp_path / "a.png",),
    ]


@pytest.mark.parametrize("content", ["\n{}\n", '[{"turns": []}]', '{"messages": []}\n'])
def test_a_file_in_no_known_format_is_refused_with_the_formats(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(
        DataError, match=r"no format known here \(.*\); set `format` of this source to one of: cauldron, internvl"
    ):
        file_at(path)


def test_a_file_in_two_formats_is_refused_with_both(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", {"messages": [TURN], "query": "a", "response": "b"})
    with pytest.raises(
        DataError, match="looks like messages and swift; set `format` of this source to one of: messages"
    ):
        file_at(path)
    assert file_at(path, format="swift").format == "swift"


@pytest.mark.parametrize("content", ["", "\n \n", "[ ]"])
def test_an_empty_file_is_called_empty(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(DataError, match=r"a\.jsonl is empty; write the dataset again"):
        file_at(path)


def test_an_unknown_format_is_refused_with_the_formats(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", TEXT)
    with pytest.raises(
        DataError, match=r"'parquet' is not one of the formats here: cauldron, internvl, lengths, .*, auto"
    ):
        file_at(path, format="parquet")


@pytest.mark.parametrize("name", ["no.jsonl", "no.parquet", "no.yaml", "folder", "a\0b"])
@pytest.mark.parametrize("format_name", ["auto", "llava"])
def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path, name: str, format_name: str) -> None:
    with pytest.raises(DataError, match="correct its path"):
        formats.resolve(Source(path=Path(name), format=format_name), tmp_path)
