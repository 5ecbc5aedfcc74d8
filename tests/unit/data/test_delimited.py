"""CSV and TSV files as containers: no cell moves to another column or is lost."""

import csv
from pathlib import Path
from typing import Any

import pytest

from tests.values.data import lines, read_all, values
from trials.data import containers, formats
from trials.data.containers import delimited
from trials.data.records import file_chunk, record
from trials.data.records.file_chunk import Chunk
from trials.data.records.record import RecordError
from trials.data.records.sample import BadLine, Measured, Sample
from trials.errors import DataError
from trials.job import Source


def _written(path: Path, content: str) -> Path:
    path.write_bytes(content.encode())
    return path


def test_cells_are_texts_with_the_line_where_their_row_begins(tmp_path: Path) -> None:
    content = '\ufeff"instruction",output\r\n"How many,\nand which?",4\r\n\r\nNA,\r\nSay "hi",""""'
    path = _written(tmp_path / "a.csv", content)
    assert containers.recognise(path) == "delimited"
    found = read_all(path)
    assert values(found) == [
        {"instruction": "How many,\nand which?", "output": "4"},
        {"instruction": "NA", "output": ""},
        {"instruction": 'Say "hi"', "output": '"'},
    ]
    assert lines(found) == [2, 5, 6]
    assert [delimited.read(path, place) for place, _ in found] == values(found)
    with pytest.raises(RecordError, match="the file ends before this row"):
        delimited.read(path, (len(content.encode()), 7))


def test_a_tsv_file_is_parted_by_tabs(tmp_path: Path) -> None:
    assert values(read_all(_written(tmp_path / "a.TSV", "a,b\tc\n1,2\t3\n"))) == [{"a,b": "1,2", "c": "3"}]


@pytest.mark.parametrize(
    ("row", "cells"), [("What is 2+2?,4,", 3), ("Hello, how are you?,Fine", 3), ("Ho?", 1), ("a,b,c,d", 4)]
)
def test_a_row_with_another_number_of_cells_cannot_be_used(tmp_path: Path, row: str, cells: int) -> None:
    found = read_all(_written(tmp_path / "a.csv", f"instruction,output\n{row}\nWell?,Yes\n"))
    assert lines(found) == [2, 3]
    assert f"the row has {cells} cell" in values(found)[0]
    assert "and the header 2; put a cell that holds the delimiter between quotes" in values(found)[0]
    assert values(found)[1] == {"instruction": "Well?", "output": "Yes"}


def test_a_file_of_shifted_rows_is_in_no_known_format(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.csv", "instruction,output\n" + "What is 2+2?,4,\n" * 40)
    with pytest.raises(DataError, match=r"its first record: the row has 3 cells .*; correct its rows"):
        formats.resolve(Source(path=str(path)), tmp_path)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('a,b\n1,2\n3,"4\n5,6\n7,8\n', 3),
        ('a,b\n1,"2\n3,4\n5,"6"\n', 2),
        ('a,b\n1,"Say \\"hi\\" now"\n', 2),
        ('a,"b\n1,2\n', 1),
        ("a,b\r1,2\r", 1),
    ],
)
def test_a_fault_in_the_quotes_is_refused_with_its_line(tmp_path: Path, content: str, line: int) -> None:
    with pytest.raises(DataError, match=f"the row that begins in line {line} has a fault: .*; close each quote"):
        read_all(_written(tmp_path / "a.csv", content))


def test_a_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="names the column 'output' twice in its header"):
        read_all(_written(tmp_path / "a.csv", "instruction,output,output\n1,2,3\n"))


def test_text_that_is_not_utf8_is_a_fault_of_its_row(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"a,b\n1,\xe9\n1,\xc3\xa9\n")
    assert values(read_all(path)) == ["the row is not UTF-8; write the file in UTF-8", {"a": "1", "b": "é"}]
    path.write_bytes(b"\xff,b\n1,2\n")
    with pytest.raises(DataError, match="a header that is not UTF-8"):
        read_all(path)


def test_an_empty_file_has_no_record(tmp_path: Path) -> None:
    assert read_all(_written(tmp_path / "a.csv", "")) == []
    assert read_all(_written(tmp_path / "a.csv", "a,b\n\n")) == []


def test_a_row_without_end_is_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "a.csv", 'a,b\n1,"2\n' + "3,4\n" * 1000)
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", 1 << 10)
    with pytest.raises(DataError, match="the row that begins in line 2 has a fault: "):
        read_all(path)


def test_a_cell_may_hold_an_image_in_base64(tmp_path: Path) -> None:
    image = "A" * (1 << 18)  # above the limit of 128 Ki that the reader has by itself
    assert values(read_all(_written(tmp_path / "a.csv", f"image\n{image}\n"))) == [{"image": image}]


def test_chunks_can_be_read_alone_and_their_digests_know_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", 2)
    rows = '1,"2\n"\n3,4\n5,6\n3,4\n5,6\n'
    path = _written(tmp_path / "a.csv", f"a,b\n{rows}")
    parts = list(delimited.chunks(path))
    assert [[place[1] for place, _ in delimited.records(path, part)] for part in parts] == [[2, 4], [5, 6], [7]]
    digests = [delimited.digest(path, part) for part in parts]
    assert len(set(digests)) == 3
    other = _written(tmp_path / "b.csv", f"b,a\n{rows}")
    assert not {delimited.digest(other, part) for part in parts} & set(digests)
    assert delimited.digest(path, Chunk(start=parts[1].start, end=parts[1].end, line=9)) == digests[1]


@pytest.mark.parametrize(
    "cells",
    [
        {"messages": '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]', "images": ""},
        {"conversations": "[{'from': 'human', 'value': 'Hi'}, {'from': 'gpt', 'value': 'Yo'}]"},
    ],
)
def test_a_list_of_turns_as_text_is_told_from_an_unknown_format(tmp_path: Path, cells: dict[str, str]) -> None:
    path = _table(tmp_path / "a.csv", cells)
    key = next(iter(cells))
    with pytest.raises(DataError, match=f"`{key}` is a list or an object as text; write it as such in JSON Lines or"):
        formats.resolve(Source(path=str(path)), tmp_path)
    bad = _said(path, format="messages" if key == "messages" else "llava")
    assert isinstance(bad, BadLine)
    assert bad.reason.startswith(f"`{key}` is a list or an object as text")


@pytest.mark.parametrize(
    "cell", ['["a.jpg"]', "['a.jpg', 'b.jpg']", " [ ] ", '{"path": "a.jpg"}', "[{'path': 'a.jpg'}]"]
)
@pytest.mark.parametrize("key", ["images", "videos"])
def test_a_list_of_files_as_text_is_no_file_name(tmp_path: Path, key: str, cell: str) -> None:
    bad = _said(_table(tmp_path / "a.csv", {"prompt": "What?", "completion": "A circle.", key: cell}))
    assert isinstance(bad, BadLine)
    assert bad.reason.startswith(f"`{key}` is a list or an object as text; write it as such in JSON Lines or Parquet")


@pytest.mark.parametrize("name", ["a.jpg", "[a].jpg", '["a"].jpg', "{a}", "[a]"])
def test_brackets_in_the_name_of_a_file_are_no_list(tmp_path: Path, name: str) -> None:
    cells = {"prompt": "What?", "completion": "A circle.", "images": name}
    assert _sample(_table(tmp_path / "a.csv", cells)).images == (tmp_path / name,)


@pytest.mark.parametrize("text", ["[1, 2]", '["a", "b"]', '[{"role": "user"}]', "[]"])
def test_a_text_that_is_a_list_stays_a_text(tmp_path: Path, text: str) -> None:
    path = _table(tmp_path / "a.csv", {"instruction": text, "output": text})
    assert [turn.text for turn in _sample(path).turns] == [text, text]


def _table(path: Path, cells: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([cells.keys(), cells.values()])
    return path


def _said(path: Path, **settings: Any) -> Sample | Measured | BadLine:
    """What the only row of a file says."""
    (file,) = formats.resolve(Source(path=str(path), **settings), path.parent)
    ((_, found),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    return found


def _sample(path: Path) -> Sample:
    found = _said(path)
    assert isinstance(found, Sample), found
    return found
