"""Tables as containers: Parquet, Arrow and folders that `save_to_disk` wrote."""

import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.values.data import file_of, lines, read_all, values
from trials.data import containers, formats
from trials.data.containers import table
from trials.data.records.file_chunk import Chunk
from trials.data.records.record import RecordError
from trials.errors import DataError


@pytest.fixture
def datasets(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The package, keeping its copies out of the user's own cache."""
    package = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    return package


@pytest.fixture
def dataset(datasets: Any) -> Any:
    """Ten rows with images and conversations."""
    features = datasets.Features(
        {
            "messages": [{"role": datasets.Value("string"), "content": datasets.Value("string")}],
            "image": datasets.Image(),
        }
    )
    rows = {
        "messages": [[{"role": "user", "content": str(number)}] for number in range(10)],
        "image": [{"bytes": b"not decoded", "path": None}, {"bytes": b"x", "path": "a.png"}, *[None] * 8],
    }
    return datasets.Dataset.from_dict(rows, features=features)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "folder", "unnamed"])
def test_tables_are_read_row_by_row_without_decoding_images(tmp_path: Path, dataset: Any, kind: str) -> None:
    path = tmp_path / f"a[1].{kind}"
    if kind == "folder":
        dataset.save_to_disk(path)
    elif kind == "arrow":
        dataset.save_to_disk(tmp_path / "saved")
        next((tmp_path / "saved").glob("*.arrow")).rename(path)
    else:
        dataset.to_parquet(path)
    assert containers.recognise(path) == "table"
    found = read_all(path)
    assert values(found)[0] == {
        "messages": [{"role": "user", "content": "0"}],
        "image": {"bytes": b"not decoded", "path": None},
    }
    assert values(found)[9] == {"messages": [{"role": "user", "content": "9"}]}
    assert lines(found) == list(range(1, 11))
    assert [table.read(path, place) for place, _ in found] == values(found)
    with pytest.raises(RecordError, match="the table has 10 rows"):
        table.read(path, (10, 11))


def test_chunks_of_a_table_follow_the_size_of_its_rows(
    tmp_path: Path, dataset: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.parquet"
    dataset.to_parquet(path)
    monkeypatch.setattr(table, "CHUNK_BYTES", 100)
    parts = list(table.chunks(path))
    assert len(parts) > 1
    assert [part.line for part in parts] == [part.start + 1 for part in parts]
    digests = [table.digest(path, part) for part in parts]
    assert len(set(digests)) == len(parts)
    assert digests[0] == table.digest(path, Chunk(start=0, end=parts[0].end, line=1))


def test_a_table_that_has_changed_is_read_again(tmp_path: Path, dataset: Any) -> None:
    path = tmp_path / "a.parquet"
    dataset.to_parquet(path)
    assert len(read_all(path)) == 10
    dataset.select(range(4)).to_parquet(path)
    assert len(read_all(path)) == 4


def test_another_table_with_the_time_of_the_one_before_is_read(tmp_path: Path, dataset: Any) -> None:
    path = tmp_path / "a.parquet"
    dataset.select(range(4)).to_parquet(path)
    assert len(read_all(path)) == 4
    changed = path.stat().st_mtime_ns
    dataset.to_parquet(path)
    os.utime(path, ns=(changed, changed))  # as `cp -p` and `rsync -a` do
    assert len(read_all(path)) == 10


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.parquet", b""),
        ("a.parquet", b"PAR1 and no more"),
        ("a.arrow", b"ARROW1 and no more"),
        ("a.json", b"PAR1 as well"),
    ],
)
@pytest.mark.usefixtures("datasets")
def test_a_damaged_table_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"cannot be read as a table: .*; write it again"):
        read_all(path)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_cache_that_cannot_be_written_is_named_and_not_the_table(
    tmp_path: Path, dataset: Any, is_full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "a.parquet", tmp_path / ("cache" if is_full else "file/cache")
    dataset.to_parquet(path)
    (tmp_path / "file").touch()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", cache)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if is_full:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(
            DataError, match=f"cannot write {cache} .*; make it writable, free .* set HF_HOME to another"
        ):
            read_all(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_folder_of_splits_asks_for_one(tmp_path: Path, datasets: Any, dataset: Any) -> None:
    datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(tmp_path / "both")
    with pytest.raises(DataError, match="name the folder of one of them: test, train"):
        read_all(tmp_path / "both")
    did_not = r"a folder that `save_to_disk` did not write; name a file .*\(files in it: "
    with pytest.raises(DataError, match=did_not + r"none\)"):
        read_all(tmp_path)
    for name in "dabc":
        (tmp_path / f"{name}.jsonl").touch()
    with pytest.raises(DataError, match=did_not + r"a.jsonl, b.jsonl, c.jsonl, more\)"):
        read_all(tmp_path)
    assert len(read_all(tmp_path / "both" / "train")) == 10


def test_tables_without_their_package_name_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"run pip install datasets$"):
        read_all(path)


@pytest.mark.usefixtures("datasets")
def test_nulls_of_a_table_are_nothing(tmp_path: Path) -> None:
    import datasets  # noqa: PLC0415 - after the fixture, which skips without it

    text = {"type": "text", "text": "q", "image": None}
    shown = {"type": "image", "text": None, "image": {"bytes": b"x", "path": None}}
    rows = [
        {
            "messages": [{"role": "user", "content": [*parts, text], "loss": None}, answer],
            "images": images,
            "meta": None,
        }
        for parts, images in (([shown], None), ([], []), ([], [None]))
        for answer in [{"role": "assistant", "content": [{**text, "text": "a"}], "loss": False}]
    ]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    file = file_of(tmp_path / "a.parquet", format="messages", container="table")
    found = [each for chunk in formats.chunks(file) for _, each in formats.records(file, chunk)]
    assert [getattr(each, "images", str(each)) for each in found[:2]] == [(b"x",), ()]
    assert [getattr(each, "unused", None) for each in found] == [(), (), None]
    assert "`images` is neither a file name nor an image" in str(found[2])
