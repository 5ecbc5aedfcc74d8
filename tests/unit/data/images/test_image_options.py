"""Options of one image in a record: read, or refused with their value."""

from pathlib import Path
from typing import Any

import pytest

from tests.values.data import file_of, record, write_records
from trials.data import formats
from trials.data.records.images import MOST_PIXELS
from trials.data.records.sample import BadLine, ImageOptions, Measured, Sample

ANSWER = {"role": "assistant", "content": "A circle."}


def read(tmp_path: Path, line: dict[str, Any]) -> Sample | Measured | BadLine:
    path = write_records(tmp_path / "a.jsonl", line)
    file = file_of(path, format="messages" if "messages" in line else "qwen")
    ((_, found),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    return found


def as_part(options: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", **options}]}, ANSWER]}


def as_url(options: dict[str, Any]) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": "a.png", **options}}
    return {"messages": [{"role": "user", "content": [part]}, ANSWER]}


def as_base64(options: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image", "base64": "aaaa", **options}]}, ANSWER]}


def under_key(options: dict[str, Any]) -> dict[str, Any]:
    return record("<image>What?", "A circle.", images=[{"path": "a.png", **options}])


places = pytest.mark.parametrize("place", [as_part, as_url, as_base64, under_key])


@places
@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ({"max_pixels": 50176}, ImageOptions(max_pixels=50176)),
        ({"min_pixels": 1, "max_pixels": 784}, ImageOptions(min_pixels=1, max_pixels=784)),
        ({"resized_height": 280, "resized_width": 420}, ImageOptions(resized_height=280, resized_width=420)),
        ({"max_pixels": None, "detail": "auto", "crop": None, "rotate": False, "min_pixels": 9},
         ImageOptions(min_pixels=9)),
    ],
)  # fmt: skip
def test_the_size_that_a_record_wants_for_an_image_is_read(
    tmp_path: Path, place: Any, given: dict[str, Any], read_as: ImageOptions
) -> None:
    found = read(tmp_path, place(given))
    assert isinstance(found, Sample), found
    assert found.image_options == (read_as,)


@places
@pytest.mark.parametrize("given", [{}, {"detail": "auto", "max_pixels": None}])
def test_an_image_without_options_has_none(tmp_path: Path, place: Any, given: dict[str, Any]) -> None:
    found = read(tmp_path, place(given))
    assert isinstance(found, Sample), found
    assert found.image_options == ()


@places
@pytest.mark.parametrize(
    ("given", "reason"),
    [
        *(
            ({key: value}, rf"`{key}` of .* is {shown}; write a whole number of pixels from 1 to {MOST_PIXELS}")
            for key in ("min_pixels", "max_pixels")
            for value, shown in (("bad", "'bad'"), (0, "0"), (-5, "-5"), (True, "True"), (2.5, "2.5"), ([9], r"\[9\]"))
        ),
        ({"max_pixels": 10**30}, f"`max_pixels` of .* is {10**30}; write"),
        ({"max_pixels": "x" * 999}, r"`max_pixels` of .* is 'x{39}; write"),
        ({"resized_height": 28}, "has one of `resized_height` and `resized_width`; write both, or neither"),
        ({"resized_width": 28}, "has one of `resized_height` and `resized_width`; write both, or neither"),
        ({"resized_height": "28", "resized_width": 28}, "`resized_height` of .* is '28'; write a whole number"),
        ({"resized_height": 28, "resized_width": 28, "max_pixels": 900}, "as well as `max_pixels`, which would not"),
        ({"min_pixels": 900, "max_pixels": 800}, "`min_pixels` of .* is 900, above its `max_pixels` 800; correct one"),
        ({"detail": "low"}, "`detail` of .* would change the image, which is not supported for one image"),
        ({"detail": "high"}, "`detail` of .* would change the image"),
        ({"crop": [0, 0, 5, 5]}, "`crop` of .* would change the image"),
        ({"bbox": [0, 0, 5, 5]}, "`bbox` of .* would change the image"),
        ({"total_pixels": 900}, "`total_pixels` of .* would change the image"),
        ({"rotate": 90}, "`rotate` of .* would change the image, which is not supported for one image; change the im"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(
    tmp_path: Path, place: Any, given: dict[str, Any], reason: str
) -> None:
    found = read(tmp_path, place(given))
    assert isinstance(found, BadLine), found
    with pytest.raises(ValueError, match=reason):
        raise ValueError(found.reason)


def test_each_image_keeps_its_own_options(tmp_path: Path) -> None:
    parts = [{"type": "image"}, {"type": "image", "image": "b.png", "max_pixels": 800}, {"type": "image"}]
    line = {"messages": [{"role": "user", "content": parts}, ANSWER], "images": [{"path": "a.png"}, "c.png"]}
    line["images"][0]["min_pixels"] = 900  # type: ignore[index]
    found = read(tmp_path, line)
    assert isinstance(found, Sample), found
    assert [Path(str(image)).name for image in found.images] == ["a.png", "b.png", "c.png"]
    assert found.image_options == (ImageOptions(min_pixels=900), ImageOptions(max_pixels=800), None)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "max_pixels": 9}]}, ANSWER], "image": "a.png"},
            "has options of an image that is named elsewhere; write them where it is named",
        ),
        (
            as_part({"image": {"url": "a.png", "max_pixels": 8}, "max_pixels": 9}),
            "has options of its image in two places; keep one",
        ),
        (
            record("<video>", "A circle.", video={"frames": [{"path": "a.png"}, {"path": "b.png", "max_pixels": 9}]}),
            "frame 2 of `video` has options of its own, which are not supported",
        ),
    ],
)  # fmt: skip
def test_options_without_an_image_of_their_own_are_refused(tmp_path: Path, line: dict[str, Any], reason: str) -> None:
    found = read(tmp_path, line)
    assert isinstance(found, BadLine), found
    assert reason in found.reason
