import errno
import os
from pathlib import Path

import pytest

from autotune.errors import PackError
from autotune.output_file import check_output_file, whole


def test_a_file_takes_its_place_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "packs.jsonl"
    path.write_text("old")
    with whole(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_finished_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "packs.jsonl"
    path.write_text("old")
    with pytest.raises(
        PackError, match=r"packs\.jsonl cannot be written \(No space left on device\); name another file"
    ):
        _fill_the_disk(path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def _fill_the_disk(path: Path) -> None:
    with whole(path) as partial:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_the_check_leaves_nothing_behind(tmp_path: Path) -> None:
    check_output_file(tmp_path / "packs.jsonl", (".jsonl",))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b'{"mark": 1}' + bytes(9000), bytes(9000) + b'"mark"'])
def test_an_older_file_of_the_kind_may_be_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "packs.jsonl"
    path.write_bytes(content)
    check_output_file(path, (".jsonl",), b'"mark"')
    assert path.read_bytes() == content


@pytest.mark.parametrize("content", [b"{}", bytes(9000) + b'"mark"' + bytes(9000)])
def test_a_file_of_the_user_is_not_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "packs.jsonl"
    path.write_bytes(content)
    with pytest.raises(
        PackError, match=r"packs\.jsonl exists and is not an earlier output of this kind, so it is not overwritten"
    ):
        check_output_file(path, (".jsonl",), b'"mark"')
