"""Images that stand in a record as text, and how much of a record a message shows."""

import base64
import random
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.programs.measurers import Words
from tests.values.data import file_of, record, write_records
from tests.values.parameters import parameters
from trials.data import formats
from trials.data.lengths import measure
from trials.data.records.sample import BadLine, Measured, Sample

LONG = 60_000


def picture(kind: str) -> bytes:
    stream = BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (12, 9, 3), dtype=np.uint8)
    Image.fromarray(noise).save(stream, kind)
    return stream.getvalue()


def read(tmp_path: Path, line: dict[str, Any], name: str = "qwen") -> Sample | Measured | BadLine:
    file = file_of(write_records(tmp_path / "a.jsonl", line), format=name)
    ((_, found),) = (each for chunk in formats.chunks(file) for each in formats.records(file, chunk))
    return found


KINDS = "PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"
WRITTEN = "{}", "data:image/png;base64,{}", "DATA:image/png;base64,{}", "Data:image/PNG;BASE64,{}", "data:;base64,{}"


@pytest.mark.parametrize(
    ("written", "kind"),
    parameters(
        {f"{written}, {kind}": (written, kind) for written in WRITTEN for kind in KINDS},
        short=[*(f"{written}, PNG" for written in WRITTEN), *(f"{WRITTEN[0]}, {kind}" for kind in KINDS)],
    ),
)
def test_an_image_in_base64_is_read_with_and_without_its_url(tmp_path: Path, kind: str, written: str) -> None:
    content = picture(kind)
    encoded = base64.b64encode(content).decode()
    lines = "\n".join(encoded[start : start + 76] for start in range(0, len(encoded), 76))
    for text in (written.format(encoded), written.format(lines)):
        found = read(tmp_path, record("<image>What?", "A circle.", image=text))
        assert isinstance(found, Sample), found
        assert found.images == (content,)


def test_frames_of_a_video_may_be_base64_alone(tmp_path: Path) -> None:
    frames = [base64.b64encode(picture("PNG")).decode(), "DATA:image/png;base64," + base64.b64encode(b"x").decode()]
    found = read(tmp_path, record("<video>What?", "A circle.", video=frames))
    assert isinstance(found, Sample), found
    assert found.videos[0].source == (picture("PNG"), b"x")


@pytest.mark.parametrize("name", ["iVBORw0KGgo.png", "/9j/4AAQ", "R0lGOD" + "a" * 60, "Qk" + "a/" * 40, "UklGRn"])
def test_a_name_that_begins_as_base64_of_an_image_stays_a_name(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, record("<image>What?", "A circle.", image=name))
    assert isinstance(found, Sample), found
    assert found.images == (tmp_path / name,)


@pytest.mark.parametrize("scheme", ["file://", "FILE://", "File://"])
def test_the_scheme_of_a_file_may_be_in_capitals(tmp_path: Path, scheme: str) -> None:
    found = read(tmp_path, record("<image>What?", "A circle.", image=f"{scheme}/x/a%20b.png"))
    assert isinstance(found, Sample), found
    assert found.images == (Path("/x/a b.png"),)


NOISE = "".join(random.Random(0).choices("ABCDEFGHabcdefgh0123+/", k=LONG))
TEXTS = {
    "base64 that is no image": NOISE,
    "a cut image": base64.b64encode(picture("PNG")).decode()[:-3] + "*" + NOISE,
    "a name": "a" * LONG,
    "a path": "a/" * (LONG // 2),
    "a name with line feeds": "a\n" * (LONG // 2),
    "escape sequences": "\x1b[31m" * (LONG // 5),
    "an address": "https://host/" + "a" * LONG,
    "a data: URL that cannot be decoded": "data:image/png;base64,*" + "a" * LONG,
    "a data: URL of no image": "data:image/png;base64," + base64.b64encode(b"a" * LONG).decode(),
    "a data: URL with a long kind": "data:" + "a" * LONG + ",",
    "a name of the longest length": "a" * 4000,
    "a path of the longest length": "a/" * 2000,
    "words": "a file " * 500,
}
RECORDS: dict[str, Callable[[str], dict[str, Any]]] = {
    "an image": lambda text: record("<image>What?", "A circle.", image=text),
    "two images": lambda text: record("<image><image>What?", "A circle.", images=[text, text]),
    "an object": lambda text: record("<image>What?", "A circle.", image={"path": text}),
    "a video": lambda text: record("<video>What?", "A circle.", video=text),
    "a frame": lambda text: record("<video>What?", "A circle.", video=[{"path": text + ".png"}]),
    "a list of images": lambda text: record("<image>What?", "A circle.", image=[[text]]),
    "an option": lambda text: record("<image>What?", "A circle.", image={"path": "a.png", "max_pixels": text}),
    "a side": lambda text: {"conversations": [{"from": text, "value": "What?"}]},
    "a turn": lambda text: {"conversations": [text]},
    "a text": lambda text: {"conversations": [{"from": "human", "value": [text]}]},
    "a key": lambda text: {text: 1},
    "a stated rate": lambda text: record("<video>What?", "A circle.", video={"video": "a.mp4", "fps": text}),
}


@pytest.mark.parametrize("where", RECORDS)
@pytest.mark.parametrize("what", TEXTS)
def test_no_message_shows_more_than_a_line_of_a_record(tmp_path: Path, where: str, what: str) -> None:
    path = write_records(tmp_path / "a.jsonl", RECORDS[where](TEXTS[what]))
    file = file_of(path, format="qwen")
    (chunk,) = formats.chunks(file)
    found = measure(file, chunk, Words(), None)
    ((_, reason, _),) = found.bad
    shown = reason.replace(str(tmp_path), "")
    assert len(shown) < 500, shown
    assert shown.isprintable()
