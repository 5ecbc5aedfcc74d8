"""Archives that are given as annotation files."""

import shutil
from pathlib import Path

import pytest

from trials.data.containers import recognise
from trials.errors import DataError


@pytest.mark.parametrize(
    ("kind", "name"), [("tar", "tar archive, as of WebDataset"), ("zip", "zip archive"), ("gztar", "gzip file")]
)
def test_an_archive_is_refused_with_what_it_is(tmp_path: Path, kind: str, name: str) -> None:
    records = tmp_path / "records"
    records.mkdir()
    (records / "0.json").write_text("{}")
    archive = Path(shutil.make_archive(str(tmp_path / "shard-000"), kind, records))
    with pytest.raises(DataError, match=rf"shard-000.* is a {name}.*extract it"):
        recognise(archive)


@pytest.mark.parametrize("encoding", ["UTF-16", "UTF-32"])
@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.csv"])
def test_text_of_another_encoding_is_refused_with_what_it_is(tmp_path: Path, encoding: str, name: str) -> None:
    path = tmp_path / name
    path.write_text('[{"messages": []}]', encoding=encoding)
    with pytest.raises(DataError, match=f"is text in {encoding}; write it in UTF-8, as by `iconv -f {encoding} -t"):
        recognise(path)
