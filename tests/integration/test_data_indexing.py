import importlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data_values import record, write_records
from tests.integration.conftest import GENERATOR
from tests.training_values import prepared_of
from trials.data import indexing
from trials.data.index import DatasetIndex
from trials.data.indexing import IndexReport, Reading, build_index
from trials.data.sample import Encoder
from trials.errors import DataError
from trials.job import DataSection, Source
from trials.model.families import internvl

GOOD = record("What is it?", "A circle.")
PICTURE = record("<image>What is it?", "A circle.", image="a.png")


@pytest.fixture(scope="module")
def encoder(example: Path) -> Encoder:
    return internvl.encoder(str(example / "model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the picture that PICTURE shows."""
    Image.new("RGB", (120, 60)).save(tmp_path / "a.png")
    return tmp_path


def index_lines(folder: Path, encoder: Encoder, *lines: object, **changes: object) -> tuple[DatasetIndex, IndexReport]:
    write_records(folder / "a.jsonl", *lines)
    data = DataSection.model_validate({"sources": [{"path": "a.jsonl"}], **changes})
    return build_index(data, encoder, folder)


def test_the_example_is_indexed_without_a_fault(example: Path, encoder: Encoder) -> None:
    told: list[Reading] = []
    data = DataSection(sources=(Source(path=Path("data/train.jsonl")),))
    index, report = build_index(data, encoder, example, told.append)
    assert (len(index), report.records, report.bad, report.wrong_sizes) == (48, 48, 0, 0)
    assert told[-1] == Reading(records=48, share=1.0)
    assert index.record.tolist() == list(range(48))
    assert {0, 1, 3, 5} <= set(index.vision_units.tolist())
    assert (index.target_tokens > 0).all()
    assert (index.target_tokens < index.text_tokens).all()


def test_the_generator_makes_nothing_twice_and_repairs_what_is_missing(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(GENERATOR.parent)
    generate = importlib.import_module("generate").generate
    assert generate(tmp_path, 3)
    assert not generate(tmp_path, 3)
    shutil.rmtree(tmp_path / "data")
    assert generate(tmp_path, 3)
    assert generate(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data", "model"]
    lines = (example / "data" / "train.jsonl").read_text().splitlines()[:2]
    assert (tmp_path / "data" / "train.jsonl").read_text().splitlines() == lines


def test_the_generator_replaces_only_what_it_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(GENERATOR.parent)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("of somebody")
    with pytest.raises(SystemExit, match="model was not made by this script and is not replaced"):
        importlib.import_module("generate").generate(tmp_path, 3)
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "config.json"]


def test_an_index_reads_each_sample_again(example: Path, encoder: Encoder) -> None:
    data = DataSection(sources=(Source(path=Path("data/train.jsonl")),))
    index, _ = build_index(data, encoder, example)
    lines = (example / "data" / "train.jsonl").read_text().splitlines()
    for row in (0, 47, 20):
        said = [turn["value"] for turn in json.loads(lines[row])["conversations"]]
        assert [turn.text for turn in index.sample(row).turns] == said


def damaged_png(folder: Path) -> bytes:
    return (folder / "a.png").read_bytes()[:20]


def empty_gif(folder: Path) -> bytes:
    return b"GIF89a" + bytes(7) + b";"


@pytest.mark.parametrize("content", [damaged_png, empty_gif, lambda folder: b""])
def test_an_image_without_a_usable_header_is_reported(
    folder: Path, encoder: Encoder, content: Callable[[Path], bytes]
) -> None:
    (folder / "b.png").write_bytes(content(folder))
    _, report = index_lines(folder, encoder, GOOD, {**PICTURE, "image": "b.png"})
    assert [line.line for line in report.bad_lines] == [2]
    assert "b.png has no readable header" in report.bad_lines[0].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**PICTURE, "image": "no.png"}, "no.png does not exist"),
        ({**PICTURE, "image": "x" * 300}, "has no readable header"),
        (record("Only a question"), "no target tokens"),
        ({"conversations": []}, "`conversations` is empty"),
    ],
)
def test_a_bad_line_is_skipped_and_listed_or_ends_indexing_as_the_job_says(
    folder: Path, encoder: Encoder, line: object, reason: str
) -> None:
    index, report = index_lines(folder, encoder, GOOD, line, PICTURE)
    assert (index.line.tolist(), index.record.tolist(), report.records, report.bad) == ([1, 3], [0, 2], 3, 1)
    assert (report.bad_lines[0].line, reason in report.bad_lines[0].reason) == (2, True)
    with pytest.raises(DataError, match=rf"a\.jsonl:2: .*{reason}.*; correct the line, or set data.on_error to skip"):
        index_lines(folder, encoder, GOOD, line, PICTURE, on_error="fail")


def test_bad_lines_are_listed_up_to_a_bound_and_counted_in_full(
    folder: Path, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "LISTED", 3)
    _, report = index_lines(folder, encoder, GOOD, *[b"{"] * 5)
    assert (len(report.bad_lines), report.bad) == (3, 5)


def test_the_image_file_tells_its_size_where_the_record_is_wrong(folder: Path, encoder: Encoder) -> None:
    lines = [{**PICTURE, **size} for size in ({}, {"width": 120, "height": 60}, {"width": 60, "height": 60})]
    index, report = index_lines(folder, encoder, *lines)
    assert index.vision_units.tolist() == [3, 3, 3]
    assert report.wrong_sizes == 1


def test_sources_keep_their_order_formats_and_repeats(folder: Path, encoder: Encoder) -> None:
    write_records(folder / "b.jsonl", GOOD, GOOD)
    (folder / "pictures").mkdir()
    (folder / "a.png").rename(folder / "pictures" / "a.png")
    sources = [{"path": "b.jsonl", "repeat": 0.5}, {"path": "a.jsonl", "images": "pictures", "format": "internvl"}]
    index, report = index_lines(folder, encoder, PICTURE, sources=sources)
    assert (index.file.tolist(), index.line.tolist(), report.bad) == ([0, 0, 1], [1, 2, 1], 0)
    assert index.record.tolist() == [0, 1, 2]
    assert index.repeats.tolist() == [0.5, 0.5, 1.0]


def test_jobs_with_other_data_leave_each_others_index_alone(example: Path, tmp_path: Path) -> None:
    """Ranks read theirs at every trial, while another agent of the same database prepares its own."""
    whole = prepared_of(example, tmp_path)
    first_ten = {"path": str(example / "data" / "train.jsonl"), "sampling": "first:10"}
    half = prepared_of(example, tmp_path, data={"sources": [first_ten]})
    assert len(DatasetIndex.load(whole.index_file)) == len(whole.index) > 10
    assert len(DatasetIndex.load(half.index_file)) == len(half.index) == 10
    assert prepared_of(example, tmp_path).index_file == whole.index_file


def test_a_dataset_without_a_usable_sample_is_refused_with_its_first_fault(folder: Path, encoder: Encoder) -> None:
    with pytest.raises(DataError, match=r"no sample of .* of 1 records; the first fault is .*a\.jsonl:1: no target"):
        index_lines(folder, encoder, record("Only a question"))


def test_a_missing_file_of_a_meta_file_ends_indexing_before_it_begins(folder: Path, encoder: Encoder) -> None:
    write_records(folder / "a.jsonl", GOOD)
    meta = {"one": {"annotation": "a.jsonl"}, "two": {"annotation": "no.jsonl"}}
    (folder / "meta.json").write_text(json.dumps(meta))
    told: list[Reading] = []
    with pytest.raises(DataError, match=r"no\.jsonl does not exist"):
        build_index(DataSection(sources=(Source(path=Path("meta.json")),)), encoder, folder, told.append)
    assert not told


# --- cutting ---


def test_samples_are_cut_while_they_are_measured(folder: Path, example: Path) -> None:
    long = record("<image>What is it?", "A circle. " * 40, image="a.png")
    lines = (long, GOOD, record("Why? " * 60, "So."), record("<image>" * 20, "Many.", image=["a.png"] * 20))
    limit = 120
    index, report = index_lines(folder, internvl.encoder(str(example / "model"), max_tokens=limit), *lines)
    assert index.line.tolist() == [1, 2]
    assert index.text_tokens.tolist() == [
        limit,
        index_lines(folder, internvl.encoder(str(example / "model")), GOOD)[0].text_tokens[0],
    ]
    assert [line.reason for line in report.bad_lines] == [
        f"no target token in the first {limit} that it is cut to; raise data.max_tokens",
        report.bad_lines[1].reason,
    ]
    assert f"behind the {limit} that a sample is cut to; raise data.max_tokens" in report.bad_lines[1].reason


# --- lengths in place of conversations ---


def index_lengths(folder: Path, *lines: object, **changes: object) -> tuple[DatasetIndex, IndexReport]:
    (folder / "lengths.json").write_text(json.dumps(lines))
    data = DataSection.model_validate({"sources": [{"path": "lengths.json"}], **changes})
    return build_index(data, None, folder)


def test_files_of_lengths_need_no_model(folder: Path) -> None:
    cached = [{"vit_num": 3, "token_num": 70, "image_flags": 3}, {"vit_num": 1, "token_num": 9, "image_flags": 0}]
    index, report = index_lengths(folder, *cached, {"vit_num": -1, "token_num": 9})
    assert (index.vision_units.tolist(), index.text_tokens.tolist(), report.bad) == ([3, 0], [70, 9], 1)
    cut, _ = index_lengths(folder, *cached, oversize="truncate", max_tokens=50)
    assert cut.text_tokens.tolist() == [50, 9]
    with pytest.raises(DataError, match=r"lengths\.json:1: lengths alone, without a conversation to train on"):
        index.sample(0)


def test_a_conversation_without_a_model_has_no_lengths(folder: Path) -> None:
    write_records(folder / "a.jsonl", GOOD)
    with pytest.raises(DataError, match=r"a\.jsonl:1: a conversation has lengths for one model only; give a job file"):
        build_index(DataSection(sources=(Source(path=Path("a.jsonl")),)), None, folder)


# --- sampling ---


@pytest.mark.parametrize(
    ("sampling", "lines", "repeat"),
    [
        ("first:2", [1, 3], 3.0),
        ("end:50%", [4, 5], 3.0),
        ("random:1", [1, 3, 4, 5], 0.75),
        ("random:9", [1, 3, 4, 5], 3.0),
        ("all", [1, 3, 4, 5], 3.0),
    ],
)
def test_sampling_counts_usable_samples(
    folder: Path, encoder: Encoder, sampling: str, lines: list[int], repeat: float
) -> None:
    source = {"path": "a.jsonl", "sampling": sampling, "repeat": 3.0}
    index, report = index_lines(folder, encoder, GOOD, b"{}", GOOD, GOOD, GOOD, sources=[source])
    assert (index.line.tolist(), report.records, report.bad) == (lines, 5, 1)
    assert index.repeats.tolist() == [repeat] * len(lines)
    assert index.record.tolist() == [line - 1 for line in lines]


def test_the_example_has_samples_of_every_kind(example: Path) -> None:
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()]
    images = Counter(type(record.get("image")).__name__ for record in records)
    assert images["NoneType"] > 0
    assert images["list"] > 0
    assert images["str"] > 0.6 * len(records)
    assert np.std([len(str(record)) for record in records]) > 100
