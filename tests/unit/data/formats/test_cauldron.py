"""Tables of questions about images, as The Cauldron and FineVision publish them."""

from pathlib import Path
from typing import Any

import pytest

from trials.data import formats
from trials.data.records.sample import BadLine, Measured, Sample
from trials.job import Source


def found_in(rows: list[dict[str, Any]], folder: Path) -> list[Sample | Measured | BadLine]:
    """What is read from a table of these rows."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(rows).to_parquet(folder / "train-00000-of-00001.parquet")
    source = Source.model_validate({"path": "train-00000-of-00001.parquet"})
    (file,) = formats.resolve(source, folder)
    return [found for chunk in formats.chunks(file) for _, found in formats.records(file, chunk)]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def test_images_stand_before_the_first_of_several_questions(tmp_path: Path) -> None:
    texts = [{"user": f"q{n}", "assistant": f"a{n}", "source": "ai2d"} for n in (1, 2)]
    pictures = [{"bytes": b"one", "path": None}, {"bytes": b"two", "path": "b.png"}]
    both, none = found_in([{"images": pictures, "texts": texts}, {"images": [], "texts": texts[:1]}], tmp_path)
    assert isinstance(both, Sample)
    assert [turn.text for turn in both.turns] == ["<image><image>q1", "a1", "q2", "a2"]
    assert [turn.role for turn in both.turns] == ["user", "assistant"] * 2
    assert both.images == (b"one", b"two")
    assert isinstance(none, Sample)
    assert ([turn.text for turn in none.turns], none.images) == (["q1", "a1"], ())


def test_a_row_without_an_answer_is_bad(tmp_path: Path) -> None:
    texts = [[{"user": "q", "assistant": "a"}], [{"user": "q", "assistant": None}], []]
    _, unanswered, empty = found_in([{"images": [], "texts": each, "source": "x"} for each in texts], tmp_path)
    assert isinstance(unanswered, BadLine)
    assert "the answer of pair 1 of `texts` is not a text but null" in unanswered.reason
    assert isinstance(empty, BadLine)
    assert "no question under user; it has images, texts, source" in empty.reason
