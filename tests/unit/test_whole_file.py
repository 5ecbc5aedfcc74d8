"""Atomic writes of files."""

import resource
from pathlib import Path

import pytest

from trials.whole_file import whole_file


def test_a_write_that_finds_no_room_names_the_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught, whole_file(path) as stream:
            stream.write(b"new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.filename == str(path)
    assert [each.read_text() for each in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("place", ["absent/job.yaml", "folder"])
def test_a_file_that_cannot_be_made_is_named_as_it_was_asked_for(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=f"{place}'$") as caught, whole_file(tmp_path / place) as stream:
        stream.write(b"new")
    assert (caught.value.filename, caught.value.filename2) == (str(tmp_path / place), None)
