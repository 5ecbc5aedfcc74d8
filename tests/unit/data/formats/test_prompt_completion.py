"""TRL's prompts with their completions, and turns that the loss does not count."""

from pathlib import Path
from typing import Any

import pytest

from tests.values.data import record, write_records
from trials.data import formats
from trials.data.records.sample import BadLine, Measured, Sample
from trials.job import Source

ASKED, ANSWERED = (
    {"role": role, "content": text} for role, text in (("user", "What is it?"), ("assistant", "A circle."))
)
BRIEF = {"role": "system", "content": "Be brief."}


def read(folder: Path, line: object) -> Sample | Measured | BadLine:
    """The sample of a record, whose format is found out."""
    path = write_records(folder / "a.jsonl", line)
    (file,) = formats.resolve(Source(path=Path("a.jsonl")), path.parent)
    ((_, found),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    return found


def said(found: Sample | Measured | BadLine) -> list[tuple[str, str, bool]]:
    assert isinstance(found, Sample), found
    return [(turn.role, turn.text, turn.is_learnt) for turn in found.turns if turn.role != "system"]


def test_a_prompt_and_a_completion_are_a_question_and_its_answer(tmp_path: Path) -> None:
    found = read(tmp_path, {"prompt": "What is it?", "completion": "A circle.", "image": "a.png"})
    assert said(found) == [("user", "<image>What is it?", True), ("assistant", "A circle.", True)]


def test_answers_of_a_prompt_are_not_learnt(tmp_path: Path) -> None:
    line = {"prompt": [BRIEF, ASKED, ANSWERED, ASKED], "completion": [ANSWERED], "images": ["a.png", "b.png"]}
    found = read(tmp_path, line)
    assert isinstance(found, Sample)
    assert found.images == (tmp_path / "a.png", tmp_path / "b.png")
    assert found.turns[0].role == "system"
    assert said(found) == [
        ("user", "<image><image>What is it?", False),
        ("assistant", "A circle.", False),
        ("user", "What is it?", False),
        ("assistant", "A circle.", True),
    ]


def test_messages_of_a_prompt_may_have_parts(tmp_path: Path) -> None:
    content = [{"type": "image", "text": None}, {"type": "text", "text": "What is it?"}]
    line = {"prompt": [{"role": "user", "content": content}], "completion": [ANSWERED], "images": ["a.png"]}
    assert said(read(tmp_path, line))[0] == ("user", "<image>What is it?", False)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"completion": [ANSWERED, ASKED, ANSWERED]}, "`completion` to be one answer to it; write a record for each"),
        ({"completion": [ASKED]}, "`completion` to be one answer"),
        ({"completion": []}, "`completion` to be one answer"),
        ({"prompt": [ASKED, ANSWERED]}, "`prompt` has to end with a question"),
        ({"prompt": []}, "`prompt` has to end with a question"),
        ({"prompt": ["What is it?", ASKED]}, "turn 1 is not an object"),
        ({"prompt": "What is it?"}, "have to be two texts, or two lists of messages"),
        ({"label": False}, "`label` says whether the completion is liked"),
        ({"rejected": [ANSWERED]}, "`rejected` is not supported"),
        ({"tools": ["a"]}, "`tools` is not supported"),
        ({"completion": [{"role": "assistant", "content": None}]}, "turn 2 has no text under `content`"),
    ],
)
def test_a_completion_that_is_not_one_answer_is_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    found = read(tmp_path, {"prompt": [ASKED], "completion": [ANSWERED], **changes})
    assert isinstance(found, BadLine)
    assert reason in found.reason


@pytest.mark.parametrize(("key", "value"), [("loss", False), ("weight", 0), ("train", False)])
def test_a_turn_may_say_that_the_loss_does_not_count_it(tmp_path: Path, key: str, value: object) -> None:
    line = record("a", "b", "c", "d")
    line["conversations"][1][key] = value
    line["conversations"][3][key] = None
    assert [is_learnt for _, _, is_learnt in said(read(tmp_path, line))] == [True, False, True, True]
