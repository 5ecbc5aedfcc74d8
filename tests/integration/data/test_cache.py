"""Indexing a dataset again uses cached lengths, and measures only what has changed."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.programs.measurers import Words
from tests.values.data import record, write_records
from trials import data
from trials.data import cache
from trials.data.index import COLUMNS, DatasetIndex
from trials.data.indexing import IndexReport, build_index
from trials.data.reading import Reading
from trials.data.records import file_chunk
from trials.errors import NoDecoder
from trials.job import DataSection

RECORDS = 6
PICTURES = (1, 4)
"""Records that show an image, `NUMBER.png`."""


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three chunks of two records each."""
    for number in PICTURES:
        Image.new("RGB", (10, number)).save(tmp_path / f"{number}.png")
    write_records(tmp_path / "a.jsonl", *(a_record(number) for number in range(RECORDS)))
    return tmp_path


def a_record(number: int) -> dict[str, Any]:
    if number in PICTURES:
        return record("<image>What is it?", "word " * number, image=f"{number}.png", width=10, height=number)
    return record("Who?", "word " * (number + 1))


def index_again(folder: Path, measurer: Words | None = None, **changes: Any) -> tuple[DatasetIndex, IndexReport]:
    section = DataSection.model_validate({"sources": [{"path": "a.jsonl"}], **changes})
    return build_index(section, measurer or Words(), folder, cache=folder / "cache", workers=1)


def cached(folder: Path) -> list[Path]:
    return sorted((folder / "cache").iterdir())


def assert_equal(one: DatasetIndex, other: DatasetIndex) -> None:
    assert one.files == other.files
    for name, kind in COLUMNS.items():
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype == kind
        assert np.array_equal(first, second), name


def test_the_second_run_measures_nothing_and_finds_the_same(folder: Path) -> None:
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"conversations": 1}\n')
    first, found = index_again(folder)
    again, known = index_again(folder)
    assert (found.measured, known.measured) == (RECORDS + 1, 0)
    assert_equal(first, again)
    assert (known.records, known.bad_lines, known.wrong_sizes) == (found.records, found.bad_lines, found.wrong_sizes)
    assert known.bad == 1


@pytest.mark.parametrize(
    ("number", "measured"), [(RECORDS, 1), (0, RECORDS + 1)], ids=["at the end", "at the beginning"]
)
def test_a_record_more_is_measured_with_its_chunk(folder: Path, number: int, measured: int) -> None:
    index_again(folder)
    lines = (folder / "a.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join([*lines[:number], lines[0].replace(b"Who", b"How"), *lines[number:]]))
    index, report = index_again(folder)
    last = 2 if number else 0  # whether a chunk ends its file is part of it
    assert (len(index), report.measured) == (RECORDS + 1, measured + last)


def test_lines_and_records_are_counted_from_where_a_known_chunk_stands_now(folder: Path) -> None:
    index_again(folder)
    content = (folder / "a.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"{}\n[]\n" + b"".join(lines[:4]) + content)
    index, report = index_again(folder)
    assert report.measured == 2
    assert index.record.tolist() == list(range(2, 12))
    assert index.line.tolist() == list(range(3, 13))
    assert [line.place[1] for line in report.bad_lines] == [1, 2]
    assert [index.sample(row).turns[-1].text for row in (0, 9)] == ["word ", "word " * 6]


@pytest.mark.parametrize("number", PICTURES)
def test_a_replaced_image_is_measured_with_its_chunk_alone(folder: Path, number: int) -> None:
    before, _ = index_again(folder)
    Image.new("RGB", (10, 30)).save(folder / f"{number}.png")
    after, report = index_again(folder)
    assert report.measured == 2
    assert (before.vision_units[number], after.vision_units[number]) == (10 * number, 300)
    assert report.wrong_sizes == 1
    assert index_again(folder)[1].measured == 0


def test_a_touched_image_is_measured_again(folder: Path) -> None:
    index_again(folder)
    os.utime(folder / "1.png", ns=(0, 12345))
    assert index_again(folder)[1].measured == 2


def test_an_image_that_is_removed_or_added_is_noticed(folder: Path) -> None:
    index_again(folder)
    (folder / "4.png").rename(folder / "hidden.png")
    without, report = index_again(folder)
    assert (len(without), report.measured, report.bad_lines[0].place[1]) == (RECORDS - 1, 2, 5)
    assert index_again(folder)[1].measured == 0
    (folder / "hidden.png").rename(folder / "4.png")
    whole, report = index_again(folder)
    assert (len(whole), report.measured) == (RECORDS, 2)


def test_a_record_that_the_disk_did_not_give_is_tried_again(folder: Path) -> None:
    (folder / "1.png").unlink()
    (folder / "1.png").symlink_to("/proc/self/mem")  # whose first byte is an error of input and output
    (folder / "4.png").write_bytes(b"no image")
    for measured in (RECORDS, 2):
        _, report = index_again(folder)
        assert (report.bad, report.measured) == (2, measured)
    assert "1.png has no readable header: Input/output error" in report.bad_lines[0].reason


def test_a_video_without_its_decoder_ends_reading_and_is_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_records(folder / "a.jsonl", record("Who?", "I."), record("<video>Who?", "I.", video="a.mp4"))
    (folder / "a.mp4").write_bytes(b"no video")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "av", None)
        with pytest.raises(NoDecoder, match="needs the package av"):
            index_again(folder)
    assert "cannot be decoded" in index_again(folder)[1].bad_lines[0].reason
    assert index_again(folder)[1].measured == 0


@pytest.mark.parametrize(
    ("measurer", "source", "measured"),
    [
        (Words("others"), {}, RECORDS),
        (None, {"images": "other"}, RECORDS),
        (None, {"repeat": 3.0}, 0),
        (None, {"sampling": "first:2"}, 0),
    ],
    ids=["model", "images", "repeat", "sampling"],
)
def test_what_lengths_depend_on_decides_what_is_measured(
    folder: Path, measurer: Words | None, source: dict[str, Any], measured: int
) -> None:
    index_again(folder)
    (folder / "other").mkdir()
    _, report = index_again(folder, measurer, sources=[{"path": "a.jsonl", **source}])
    assert report.measured == measured


def test_other_code_measures_again_since_it_may_refuse_what_was_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_again(folder)
    code = folder / "code"
    shutil.copytree(data.__path__[0], code)
    with (code / "records" / "images.py").open("a") as file:
        file.write("_DEEP = ()\n")
    monkeypatch.setattr(data, "__path__", [str(code)])
    assert index_again(folder)[1].measured == RECORDS
    assert index_again(folder)[1].measured == 0


def test_another_decoder_of_videos_measures_again_since_it_may_read_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index_again(folder)
    monkeypatch.setattr(cache, "version", lambda package: f"another {package}")
    assert index_again(folder)[1].measured == RECORDS


def test_equal_content_under_another_name_is_known(folder: Path) -> None:
    index_again(folder)
    (folder / "a.jsonl").rename(folder / "b.jsonl")
    index, report = index_again(folder, sources=[{"path": "b.jsonl"}])
    assert report.measured == 0
    assert index.files[0].path == folder / "b.jsonl"


def damages(content: bytes) -> Iterator[bytes]:
    yield b""
    yield b"junk"
    yield content[:-1]
    yield content[: len(content) // 2]
    yield content + b"more"
    for position in range(0, len(content), 37):
        yield content[:position] + bytes([content[position] ^ 0xFF]) + content[position + 1 :]


def test_a_damaged_cache_is_not_used_and_is_written_again(folder: Path) -> None:
    whole, _ = index_again(folder)
    path = cached(folder)[0]
    content = path.read_bytes()
    noticed = 0
    for damage in damages(content):
        path.write_bytes(damage)
        index, report = index_again(folder)
        assert_equal(index, whole)
        noticed += report.measured // 2
        assert path.read_bytes() == (content if report.measured else damage)
    assert noticed > 15


@pytest.mark.parametrize("killed", [KeyboardInterrupt, OSError("the disk is full")])
def test_what_was_being_written_leaves_nothing_half_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, killed: Any
) -> None:
    def fail(self: Path, target: Path) -> None:
        raise killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", fail)
        if isinstance(killed, OSError):
            index_again(folder)
            assert len(caplog.messages) == 1
        else:
            with pytest.raises(KeyboardInterrupt):
                index_again(folder)
    assert not cached(folder)
    (folder / "cache" / "0123-abc.partial").write_bytes(b"of one that was killed for good")
    assert index_again(folder)[1].measured == RECORDS
    assert index_again(folder)[1].measured == 0


def test_a_cache_is_for_this_user_alone(folder: Path) -> None:
    index_again(folder)
    modes = {path.stat().st_mode & 0o777 for path in cached(folder)}
    assert (modes, (folder / "cache").stat().st_mode & 0o777) == ({0o600}, 0o700)


def test_a_cache_that_cannot_be_written_is_a_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "cache").write_text("a file")
    index, _ = index_again(folder)
    assert len(index) == RECORDS
    (message,) = caplog.messages
    assert message.startswith(f"lengths cannot be kept in {folder}/cache (")
    assert "set XDG_CACHE_HOME to another folder" in message


def test_progress_grows_to_the_end(folder: Path) -> None:
    for known in (False, True):
        readings: list[Reading] = []
        section = DataSection.model_validate({"sources": [{"path": "a.jsonl"}]})
        build_index(section, Words(), folder, readings.append, cache=folder / "cache")
        assert [reading.records for reading in readings] == sorted(reading.records for reading in readings)
        assert readings[-1] == Reading(records=RECORDS, share=1.0)
        shares = [reading.share for reading in readings if reading.share is not None]
        assert shares == sorted(shares)
        assert (readings[0].records, readings[0].share) == (2 if known else 0, None)
