"""Files without an end, and images whose pixels fill the memory, are refused before they are read."""

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.values.data import record, write_records
from trials.data import formats
from trials.data.records.images import MOST_PIXELS, image_pixels, image_size
from trials.errors import DataError
from trials.job import Source

pytestmark = pytest.mark.timeout(30)  # a reader of a pipe would wait for ever


def endless(path: Path, kind: str) -> Path:
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    return path


ENDLESS = pytest.mark.parametrize(("kind", "called"), [("pipe", "a named pipe"), ("device", "a device")])


@ENDLESS
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "mixture.yaml", "train.csv", "train.parquet"])
def test_annotations_and_mixtures_without_an_end_are_refused(tmp_path: Path, kind: str, called: str, name: str) -> None:
    path = endless(tmp_path / name, kind)
    with pytest.raises(DataError, match=f"cannot be opened .it is {called}, not a regular file"):
        formats.resolve(Source(path=path), tmp_path)


@ENDLESS
def test_a_mixture_that_lists_a_file_without_an_end_is_refused(tmp_path: Path, kind: str, called: str) -> None:
    endless(tmp_path / "train.jsonl", kind)
    (tmp_path / "mixture.json").write_text('{"a": {"annotation": "train.jsonl", "root": "", "repeat_time": 1}}')
    with pytest.raises(DataError, match=f"train.jsonl cannot be opened .it is {called}"):
        formats.resolve(Source(path=tmp_path / "mixture.json"), tmp_path)


@ENDLESS
def test_a_table_with_a_file_without_an_end_is_refused(tmp_path: Path, kind: str, called: str) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([record("What?", "A box.")]).save_to_disk(tmp_path / "table")
    (tmp_path / "table" / "dataset_info.json").unlink()
    endless(tmp_path / "table" / "dataset_info.json", kind)
    with pytest.raises(DataError, match=f"cannot be read as a table: it is {called}"):
        formats.resolve(Source(path=tmp_path / "table"), tmp_path)


@ENDLESS
@pytest.mark.parametrize("read", [image_size, image_pixels])
def test_an_image_without_an_end_is_refused(
    tmp_path: Path, kind: str, called: str, read: Callable[[Path], object]
) -> None:
    path = endless(tmp_path / "a.png", kind)
    with pytest.raises(DataError, match=f"a.png .*it is {called}, not a regular file"):
        read(path)


def test_a_link_to_a_regular_file_is_followed(tmp_path: Path) -> None:
    write_records(tmp_path / "real.jsonl", record("What?", "A box."))
    (tmp_path / "train.jsonl").symlink_to("real.jsonl")
    (file,) = formats.resolve(Source(path=tmp_path / "train.jsonl"), tmp_path)
    assert file.path.name == "real.jsonl"


def png(width: int, height: int) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("limit", [89_478_485, None], ids=["Pillow's limit", "without Pillow's limit"])
@pytest.mark.parametrize("read", [image_size, image_pixels])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(
    monkeypatch: pytest.MonkeyPatch, limit: int | None, read: Callable[[bytes], object]
) -> None:
    monkeypatch.setattr("PIL.Image.MAX_IMAGE_PIXELS", limit)
    with pytest.raises(DataError, match=f"has more than {MOST_PIXELS} pixels; scale it down"):
        read(png(MOST_PIXELS // 1000 + 1, 1000))
    assert image_size(png(MOST_PIXELS // 1000, 1000)) == (1000, MOST_PIXELS // 1000)


def test_an_image_file_of_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png(10, 10))
    os.truncate(path, (1 << 30) + 1)
    with pytest.raises(DataError, match="has no readable header: it has more than 1024 MiB"):
        image_size(path)
