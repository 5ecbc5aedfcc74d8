import errno
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from transformers.image_utils import load_image

from trials.data.records.faults import unreadable
from trials.data.records.images import ImageHeader, image_header, image_pixels, image_size
from trials.errors import DataError, PassingFault

KINDS: list[tuple[str, dict[str, Any]]] = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True, "exif": b"Exif\0\0 a small picture \xff\xd9"}),
    ("PNG", {}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
]
kinds = pytest.mark.parametrize(("kind", "options"), KINDS)


def picture(kind: str, options: dict[str, Any], mode: str = "RGB") -> bytes:
    noise = np.random.default_rng(0).integers(0, 255, (37, 53, 3), dtype=np.uint8)
    stream = BytesIO()
    Image.fromarray(noise).convert(mode).save(stream, kind, **options)
    return stream.getvalue()


def is_read(read: Any, content: bytes) -> bool:
    try:
        read(content)
    except DataError:
        return False
    return True


@kinds
@pytest.mark.parametrize("mode", ["RGB", "L", "1"])
def test_an_image_whose_end_is_missing_is_found_without_its_pixels(
    kind: str, options: dict[str, Any], mode: str
) -> None:
    whole = picture(kind, options, mode)
    assert image_size(whole) == (37, 53)
    for cut in (*range(1, 12), len(whole) // 4, len(whole) // 2, len(whole) - 40, len(whole) - 3):
        assert is_read(image_size, whole[:-cut]) == is_read(image_pixels, whole[:-cut]), cut
    with pytest.raises(DataError, match=r"of \d+ bytes, (was cut off: it|has no readable header)"):
        image_size(whole[: len(whole) // 2])


@kinds
def test_other_data_behind_an_image_does_no_harm(kind: str, options: dict[str, Any]) -> None:
    assert image_header(picture(kind, options) + bytes(100_000)) == ImageHeader(size=(37, 53), has_more=False)


@pytest.mark.parametrize("kind", ["TIFF", "GIF", "WEBP", "PNG", "AVIF"])
def test_an_image_with_further_pictures_is_known_by_its_header(kind: str) -> None:
    pictures = [Image.new("RGB", (16, 16), colour) for colour in ("red", "green", "blue")]
    stream = BytesIO()
    pictures[0].save(stream, kind, save_all=True, append_images=pictures[1:])
    assert image_header(stream.getvalue()).has_more


def test_the_previews_of_a_camera_are_no_further_pictures() -> None:
    stream = BytesIO()
    Image.new("RGB", (16, 16)).save(stream, "MPO", save_all=True, append_images=[Image.new("RGB", (4, 4))])
    assert not image_header(stream.getvalue()).has_more


def test_a_second_picture_of_an_animation_may_be_missing() -> None:
    stream = BytesIO()
    frames = [Image.fromarray(np.full((8, 8, 3), value, dtype=np.uint8)) for value in (0, 255)]
    frames[0].save(stream, "GIF", save_all=True, append_images=frames[1:], comment=b"two")
    assert image_size(stream.getvalue()[:-4]) == (8, 8)


def chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0)])
def test_an_image_without_pixels_is_refused(size: tuple[int, int]) -> None:
    header = struct.pack(">IIBBBBB", *size, 8, 2, 0, 0, 0)
    empty = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(DataError, match="image in the record"):
        image_size(empty)


@pytest.mark.parametrize("content", [b"", b"hello", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"<svg/>", b"GIF89a"])
def test_a_file_that_is_no_image_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(content)
    for image in (path, content):
        with pytest.raises(DataError, match=r"(a\.png|in the record.*) (has no readable header|was cut off)"):
            image_size(image)
        with pytest.raises(DataError, match="cannot be decoded"):
            image_pixels(image)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"image .*no\.png does not exist"):
        image_size(tmp_path / "no.png")
    with pytest.raises(DataError, match="has no readable header"):
        image_size(tmp_path)


def test_pixels_come_in_rgb_from_a_file_or_its_content(tmp_path: Path) -> None:
    content = picture("PNG", {}, mode="L")
    (tmp_path / "a.png").write_bytes(content)
    for image in (tmp_path / "a.png", content):
        assert image_pixels(image).shape == (37, 53, 3)


@kinds
def test_damage_anywhere_is_a_data_error(kind: str, options: dict[str, Any]) -> None:
    whole = picture(kind, options)
    random = np.random.default_rng(1)
    for _ in range(40):
        damaged = bytearray(whole)
        for place in random.integers(0, min(len(whole), 100), 3):
            damaged[place] = random.integers(0, 256)
        is_read(image_size, bytes(damaged))


@pytest.mark.parametrize(
    ("dtype", "kind"), [(np.uint16, "PNG"), (np.uint16, "TIFF"), (np.int32, "TIFF"), (np.float32, "TIFF")]
)
def test_values_that_rgb_would_cut_off_are_an_error_of_the_data(dtype: Any, kind: str) -> None:
    """Pillow makes all of them white, or those of floats below 1 black."""
    stream = BytesIO()
    Image.fromarray(np.arange(600, dtype=dtype).reshape(20, 30)).save(stream, kind)
    for read in (image_size, image_pixels):
        with pytest.raises(DataError, match=r"has values of more than 8 bits \(mode [IF].*scale them to 8 bits"):
            read(stream.getvalue())


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_values_of_8_bits_keep_their_brightness(mode: str) -> None:
    stream = BytesIO()
    grey = Image.new("RGB", (8, 8), (0, 0, 0))
    grey.paste((255, 255, 255), (0, 0, 4, 8))
    grey.convert(mode).save(stream, "TIFF")
    pixels = image_pixels(stream.getvalue())
    assert pixels.mean(axis=(0, 2)).tolist() == [255] * 4 + [0] * 4


UPRIGHT = np.array(
    [[[250, 0, 0], [0, 250, 0], [0, 0, 250]], [[0, 0, 0], [90, 90, 90], [250, 250, 250]]], dtype=np.uint8
)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_shown_upright_with_the_size_that_its_header_says(
    tmp_path: Path, kind: str, orientation: int
) -> None:
    marks = Image.Exif()
    marks[ExifTags.Base.Orientation] = orientation
    stored, path = lying(Image.fromarray(np.kron(UPRIGHT, np.ones((8, 8, 1), np.uint8))), orientation), tmp_path / "a"
    stored.save(path, kind, exif=marks, **({"lossless": True} if kind == "WEBP" else {}))
    shown = load_image(str(path))
    assert image_size(path) == shown.size[::-1] == (16, 24)
    np.testing.assert_array_equal(image_pixels(path), np.asarray(shown))
    np.testing.assert_array_equal(image_pixels(path)[::8, ::8], UPRIGHT)


EXIF = b"II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
"""Orientation 6 alone."""
_PROFILE = zlib.compress(b"\nexif\n%8d\n%s\n" % (len(EXIF) + 6, (b"Exif\0\0" + EXIF).hex().encode()))
MARKS = {
    "Exif": (b"eXIf", EXIF),
    "XMP": (b"iTXt", b'XML:com.adobe.xmp\0\0\0\0\0<rdf:Description tiff:Orientation="6"/>'),
    "a profile in text": (b"zTXt", b"Raw profile type exif\0\0" + _PROFILE),
    "none": (b"tEXt", b"date:create\0today"),
}


def png_with(early: bytes, behind: bytes, parts: int) -> bytes:
    """Return a PNG of 300 x 200 pixels with chunks before and behind those of its pixels."""
    noise = np.random.default_rng(0).integers(0, 256, (200, 300 * 3), dtype=np.uint8)
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in noise))
    step = -(-len(rows) // parts)
    pixels = b"".join(chunk(b"IDAT", rows[start : start + step]) for start in range(0, len(rows), step))
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 300, 200, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + early + pixels + behind + chunk(b"IEND", b"")


@pytest.mark.parametrize("more", [b"", chunk(b"tEXt", b"Comment\0" + b"." * 70_000)])
@pytest.mark.parametrize("parts", [1, 3, 60])
@pytest.mark.parametrize("late", MARKS)
@pytest.mark.parametrize("early", ["none", "Exif"])
def test_marks_behind_the_pixels_of_a_png_turn_it(
    tmp_path: Path, early: str, late: str, parts: int, more: bytes
) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(png_with(chunk(*MARKS[early]), chunk(*MARKS[late]) + more, parts))
    shown = load_image(str(path))
    assert image_size(path) == shown.size[::-1] == ((200, 300) if early == late == "none" else (300, 200))
    np.testing.assert_array_equal(image_pixels(path), np.asarray(shown))


@pytest.mark.parametrize("mark", [(b"eXIf", b"II*"), (b"zTXt", b"Raw profile type exif\0\0damaged")])
def test_damaged_marks_behind_the_pixels_of_a_png_say_nothing(mark: tuple[bytes, bytes]) -> None:
    content = png_with(b"", chunk(*mark), 3)
    assert image_size(content) == image_pixels(content).shape[:2] == (200, 300)


def lying(upright: Image.Image, orientation: int) -> Image.Image:
    """Return how a camera stores an image whose first row and column are where the standard says of an orientation."""
    if orientation > 4:
        upright = upright.transpose(Image.Transpose.TRANSPOSE)
    if orientation in (2, 3, 7, 8):
        upright = upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if orientation in (3, 4, 6, 7) else upright


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        *((OSError(number, "a fault"), True) for number in (errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES)),
        *((OSError(number, "a fault"), False) for number in (errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL)),
        (OSError("image file is truncated"), False),
        (ValueError(errno.EIO), False),
    ],
)
def test_a_fault_of_the_machine_passes_and_one_of_the_file_stays(error: Exception, passes: bool) -> None:
    assert isinstance(unreadable("a.png", error), PassingFault) is passes
