"""Answers without a character, of which a model would learn to say nothing."""

from pathlib import Path

import pytest

from tests.values.data import write_records
from trials.data import formats
from trials.data.records.sample import BadLine, Measured, Sample
from trials.job import Source

TURN = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}


def _read(path: Path) -> list[Sample | Measured | BadLine]:
    (file,) = formats.resolve(Source(path=path), path.parent)
    return [found for chunk in formats.chunks(file) for _, found in formats.records(file, chunk)]


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [TURN, {**ANSWER, "content": ""}]},
        {"messages": [TURN, {**ANSWER, "content": []}]},
        {"messages": [TURN, {**ANSWER, "content": " \n\u00a0"}]},
        {"messages": [TURN, {**ANSWER, "content": ""}, TURN, ANSWER]},
        {"instruction": "a", "output": ""},
        {"prompt": "a", "completion": " "},
    ],
)
def test_an_empty_answer_that_counts_is_a_fault(tmp_path: Path, given: object) -> None:
    (bad,) = _read(write_records(tmp_path / "a.jsonl", given))
    assert isinstance(bad, BadLine)
    assert bad.reason.startswith("the assistant turn, 2 of all, is empty, so that the model would learn to end")


def test_an_empty_answer_that_does_not_count_is_none(tmp_path: Path) -> None:
    quiet = {**ANSWER, "content": "", "loss": False}
    (found,) = _read(write_records(tmp_path / "a.jsonl", {"messages": [TURN, quiet, TURN, ANSWER]}))
    assert isinstance(found, Sample)
    assert len(found.turns) == 4
