"""Files that hold no records, or none in a known format: archives, other texts and other encodings."""

import json
import shutil
from pathlib import Path

import pytest

from tests.values.data import file_of, record, write_records
from trials.data import formats
from trials.data.containers import recognise
from trials.errors import DataError


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("tar", "a tar archive, as of WebDataset"),
        ("zip", "a zip archive"),
        ("gztar", "a gzip file"),
        ("bztar", "a bzip2 file"),
        ("xztar", "an xz file"),
    ],
)
def test_an_archive_is_refused_with_what_it_is(tmp_path: Path, kind: str, name: str) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (records / "0.json").write_text("{}")
    archive = Path(shutil.make_archive(str(tmp_path / "shard-000"), kind, records))
    with pytest.raises(DataError, match=rf"shard-000.* is {name}, which.*extract it"):
        recognise(archive)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_a_pointer_of_git_lfs_is_refused_with_what_it_is(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4512398720\n")
    with pytest.raises(DataError, match=rf"{name} is a pointer of Git LFS.* `git lfs pull` in"):
        recognise(path)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_text_of_another_encoding_is_refused_with_what_it_is(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_text('[{"messages": []}]', encoding=encoding)
    with pytest.raises(DataError, match=f"is text in {encoding}; write it in UTF-8, as by `iconv -f {encoding} -t"):
        recognise(path)


@pytest.mark.parametrize("content", [b"hello\n", b"\xff", b'{\n"a": 1\n}', b"{'a': 1}\n"])
def test_a_file_that_is_no_json_is_refused_with_how_to_write_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"its first record: .*; write one JSON object on each line, or a list of them"):
        formats.detect(path, "json-lines")


def test_of_many_keys_of_a_record_the_first_are_named(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", {f"sample {number}": {} for number in range(99)})
    with pytest.raises(DataError, match=r"has sample 0, .*, sample 9, more\); set"):
        formats.detect(path, "json-lines")


def test_records_of_a_list_on_one_line_are_told_apart_by_their_columns(tmp_path: Path) -> None:
    talk = record("What is it?", "A circle.")
    path = tmp_path / "a.json"
    content = json.dumps([talk, {"conversations": []}, talk])
    path.write_text(content)
    file = file_of(path, container="json-list")
    found = [each for chunk in formats.chunks(file) for _, each in formats.records(file, chunk)]
    column = content.index('{"conversations": []}') + 1
    assert str(found[1]) == f"{path}:1:{column}: `conversations` is empty"
