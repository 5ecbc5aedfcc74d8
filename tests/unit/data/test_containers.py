import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.values.data import lines, read_all, values, write_records
from trials.data import containers
from trials.data.containers import json_lines, json_list
from trials.data.records import file_chunk, record
from trials.data.records.record import Record, RecordError
from trials.errors import DataError

BOTH = pytest.mark.parametrize("suffix", ["jsonl", "json"])


def write(path: Path, *records: Any, indent: int | None = 4) -> Path:
    """JSON Lines, or one list in a file that is called .json."""
    if path.suffix == ".jsonl":
        return write_records(path, *records)
    path.write_text(json.dumps(records, indent=indent))
    return path


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["\n    {", "}, {", "]", '"\\']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
objects = st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=3), max_size=20)


@given(objects, st.sampled_from([None, 0, 1, 4, "\t"]), st.booleans(), st.tuples(st.integers(1, 60), st.integers(1, 5)))
def test_every_record_is_read_in_order_whatever_the_layout(
    tmp_path_factory: pytest.TempPathFactory,
    written: list[Record],
    indent: int | None,
    in_lines: bool,
    limits: tuple[int, int],
) -> None:
    path = tmp_path_factory.mktemp("layout") / ("a.jsonl" if in_lines else "a.json")
    write(path, *written, indent=indent)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_chunk, "CHUNK_BYTES", limits[0])
        patch.setattr(file_chunk, "CHUNK_RECORDS", limits[1])
        for module in (file_chunk, json_lines, json_list):
            patch.setattr(module, "BLOCK_BYTES", 7)
        found = read_all(path)
        assert values(found) == written
        container = containers.load(containers.recognise(path))
        for place, value in found:
            assert container.read(path, place) == value
            assert path.read_bytes()[: place[0]].count(b"\n") + 1 == place[1]


@BOTH
def test_chunks_are_bounded_in_records_and_bytes(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / f"a.{suffix}", *({"number": number, "text": "x" * (number % 7)} for number in range(1000)))
    container = containers.load(containers.recognise(path))
    for most_records, most_bytes in ((50, 100_000), (1000, 1000)):
        monkeypatch.setattr(file_chunk, "CHUNK_RECORDS", most_records)
        monkeypatch.setattr(file_chunk, "CHUNK_BYTES", most_bytes)
        parts = list(container.chunks(path))
        assert all(part.end - part.start <= most_bytes for part in parts)
        assert all(1 <= len(list(container.records(path, part))) <= most_records for part in parts)


@BOTH
def test_equal_chunks_have_equal_digests_wherever_they_stand(tmp_path: Path, suffix: str) -> None:
    first = write(tmp_path / f"a.{suffix}", {"a": 1}, {"b": 2})
    copy = write(tmp_path / f"b.{suffix}", {"a": 1}, {"b": 2})
    other = write(tmp_path / f"c.{suffix}", {"a": 1}, {"b": 3})
    digests = []
    for path in (first, copy, other):
        container = containers.load(containers.recognise(path))
        (part,) = container.chunks(path)
        digests.append(container.digest(path, part))
    assert digests[0] == digests[1] != digests[2]


# --- faults ---


def test_a_faulty_line_costs_itself_alone(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", {"a": 1}, b"{", b"", b'{"a": "\xff"}', b"[1]", {"a": 2})
    found = read_all(path)
    assert lines(found) == [1, 2, 4, 5, 6]
    assert values(found) == [
        {"a": 1},
        "the record is not JSON: Expecting property name enclosed in double quotes at character 2",
        "byte 8 of the record is not UTF-8",
        "the record is a JSON list, not an object; write each sample on a line of its own",
        {"a": 2},
    ]


@pytest.mark.parametrize(
    ("damage", "reason", "kept"),
    [
        (('"b": 2', '"b": '), "not JSON", [0, 2]),
        (('"b": 2', '"b": "open'), "not JSON", [0, 2]),
        (('"b": 2', '"b": "\\ud800", "c": ' + "9" * 5000), "not JSON that can be read", [0, 2]),
        (('"b": 2', '"b": ' + "[" * 100_000), "not JSON that can be read", [0, 2]),
        (('{\n        "b": 2\n    }', "7"), "is a JSON int, not an object", [0, 2]),
        (('"b": 2\n    },', '"b": 2\n    },,'), "not JSON", [0, 1, 2]),
    ],
)
def test_behind_a_fault_in_a_list_the_next_element_goes_on(
    tmp_path: Path, damage: tuple[str, str], reason: str, kept: list[int]
) -> None:
    written = [{"a": 1}, {"b": 2}, {"c": 3}]
    path = write(tmp_path / "a.json", *written)
    path.write_text(path.read_text().replace(*damage))
    found = read_all(path)
    assert [value for _, value in found if not isinstance(value, RecordError)] == [written[number] for number in kept]
    (fault,) = [value for value in values(found) if isinstance(value, str)]
    assert reason in fault


def test_a_byte_that_is_not_utf_8_loses_one_element_of_a_list(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'[\n  {"a": 1},\n  {"b": "\xff"},\n  {"c": 3}\n]')
    found = read_all(path)
    assert lines(found) == [2, 3, 4]
    assert values(found) == [{"a": 1}, "byte 8 of the record is not UTF-8", {"c": 3}]


def test_what_only_a_strict_reader_refuses_costs_one_element_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1}, {"b": "\n"}, {"c": ' + "9" * 5000 + '}, {"d": 4}]')
    found = values(read_all(path))
    assert [type(value) for value in found] == [dict, str, str, dict]
    assert "Invalid control character" in found[1]


@pytest.mark.parametrize(
    "content", ['[\n  {"a": 1},\n  {"b": 2},\n]\n', '[\n  {"a": 1}\n  {"b": 2}\n]', '[{"a": 1}, {"b": 2}, ]']
)
def test_a_comma_too_much_or_too_little_loses_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert values(read_all(path)) == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("end", ["{", '"c"', "]", "}", '"last"'])
def test_a_list_that_was_cut_off_is_refused(tmp_path: Path, indent: int | None, end: str) -> None:
    """It may lack any number of records."""
    path = write(tmp_path / "a.json", {"a": 1}, {"b": 2, "c": [{"d": 3}], "last": 4}, indent=indent)
    whole = path.read_text()
    path.write_text(whole[: whole.rindex(end)].rstrip(" \n,"))
    with pytest.raises(DataError, match="so the file was cut off and samples may be missing"):
        read_all(path)


def test_a_broken_last_record_is_not_taken_for_the_end_of_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[\n  {"a": 1},\n  {"b": [{"c": 2}], }\n]\n')
    assert values(read_all(path))[0] == {"a": 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1}, {"b": }, {"c": 3333333}]', "a.json:1: the record is not JSON: Expecting value at character 7"),
        ('[{"a": 1},\n{"b": 2}]\n[{"b": 2}] and more', "a.json:2: the record is not JSON"),
        ('[{"a": 1},\n{"b": 2} {"c": 3}]', "a.json:2: the record is not JSON: Extra data at character 10"),
        ('[{"a": ' + "[" * 10_000, "a.json:1: the record is not JSON that can be read"),
    ],
)
def test_a_list_whose_rest_cannot_be_found_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read_all(path)
    assert message in str(caught.value)
    assert "nothing after byte" in str(caught.value)


def test_packed_samples_are_reported_line_by_line(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.jsonl", [{"a": 1}, {"b": 2}], [{"c": 3}])
    assert lines(read_all(path)) == [1, 2]
    assert set(values(read_all(path))) == {
        "the record is a JSON list, not an object; write each sample on a line of its own"
    }


@pytest.mark.parametrize("content", ["", "\n \n", "[]", "\ufeff[\n]\n"])
def test_nothing_is_read_from_an_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    assert read_all(path) == []


@BOTH
def test_blank_lines_byte_order_mark_and_carriage_returns_do_no_harm(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", {"a": "\r"}, {"b": 2}, indent=1)
    path.write_bytes(b"\xef\xbb\xbf\r\n" + path.read_bytes().replace(b"\n", b"\r\n  \r\n"))
    assert values(read_all(path)) == [{"a": "\r"}, {"b": 2}]
    assert lines(read_all(path)) == ([2, 4] if suffix == "jsonl" else [4, 10])


@BOTH
def test_a_byte_order_mark_may_stand_right_before_the_first_record(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.{suffix}", {"a": 1}, indent=None)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert values(read_all(path)) == [{"a": 1}]


@BOTH
def test_a_record_above_the_size_limit_is_reported_and_passed_over(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MAX_RECORD_BYTES", 200)
    monkeypatch.setattr(file_chunk, "CHUNK_BYTES", 100)
    found = read_all(write(tmp_path / f"a.{suffix}", {"a": "x" * 1000}, {"b": 2}, {"c": 3}))
    assert values(found) == ["the record is longer than 0 MiB", {"b": 2}, {"c": 3}]


@BOTH
def test_a_record_of_50_mb_is_never_held_in_memory(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    opening, separator, closing = ("", "", "") if suffix == "jsonl" else ("[\n", ",", "]")
    with path.open("w") as stream:
        stream.write(f'{opening}{{"a": 1}}{separator}\n{{"b": "')
        for _ in range(50):
            stream.write("x" * 1_000_000)
        stream.write(f'"}}{separator}\n{{"c": 3}}\n{closing}')
    tracemalloc.start()
    try:
        found = values(read_all(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == [{"a": 1}, "the record is longer than 16 MiB", {"c": 3}]
    assert peak < 45e6 < path.stat().st_size


def test_many_records_stream_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("[" + ", ".join([json.dumps({"text": "x" * 1000})] * 16_000) + "]")
    tracemalloc.start()
    try:
        assert sum(len(list(json_list.records(path, part))) for part in json_list.chunks(path)) == 16_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 14e6 < path.stat().st_size


def test_a_missing_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    for name in ("no.jsonl", "no.parquet", "no\0.jsonl"):
        with pytest.raises(DataError, match="correct its path"):
            read_all(tmp_path / name)
