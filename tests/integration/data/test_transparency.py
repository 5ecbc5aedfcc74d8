"""Transparent areas of images and videos, which are laid on white."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from transformers.image_transforms import convert_to_rgb

from tests.values.parameters import examples
from trials.data.records.images import image_pixels, image_size
from trials.data.records.video_file import clip_of, pixels_of
from trials.errors import DataError, PassingFault

SIZE = (13, 9)
PALETTE = np.random.default_rng(3).integers(0, 256, 768, dtype=np.uint8).tobytes()


def values(bands: int, seed: int) -> NDArray[np.uint8]:
    """Return random values [height, width, bands], a third of them at the ends of the range."""
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (*SIZE[::-1], bands), dtype=np.uint8)
    ends = random.integers(0, 6, found.shape[:2])
    found[ends == 0, -1], found[ends == 1, -1] = 0, 255
    return found


def coloured(mode: str, seed: int) -> Image.Image:
    bands = values(len(Image.new(mode, (1, 1)).getbands()), seed)
    found = Image.frombytes(mode, SIZE, bands.tobytes())
    if mode in ("P", "PA"):
        found.putpalette(PALETTE)
    return found


def saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    stream = BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def keyed(mode: str, kind: str, seed: int) -> bytes:
    """Return a file in which one value, or one colour that occurs, is transparent."""
    picture = coloured(mode, seed)
    return saved(picture, kind, transparency=picture.getpixel((2, 3)))


TRANSPARENT = {
    "RGBA": lambda seed: saved(coloured("RGBA", seed), "PNG"),
    "LA": lambda seed: saved(coloured("LA", seed), "PNG"),
    "P with a value": lambda seed: keyed("P", "PNG", seed),
    "P with alphas": lambda seed: saved(coloured("P", seed), "PNG", transparency=values(1, seed).tobytes()[:99]),
    "L with a value": lambda seed: keyed("L", "PNG", seed),
    "RGB with a colour": lambda seed: keyed("RGB", "PNG", seed),
    "GIF": lambda seed: keyed("P", "GIF", seed),
    "WebP": lambda seed: saved(coloured("RGBA", seed), "WEBP", lossless=True, exact=True),
    "lossy WebP": lambda seed: saved(coloured("RGBA", seed), "WEBP"),
    "RGBA as TIFF": lambda seed: saved(coloured("RGBA", seed), "TIFF"),
    "LA as TIFF": lambda seed: saved(coloured("LA", seed), "TIFF"),
    "PA as TIFF": lambda seed: saved(coloured("PA", seed), "TIFF"),
    "RGBA as TGA": lambda seed: saved(coloured("RGBA", seed), "TGA"),
    "icon": lambda seed: saved(coloured("RGBA", seed).resize((16, 16)), "ICO", sizes=[(16, 16)]),
}


@pytest.mark.parametrize("kind", TRANSPARENT)
@settings(max_examples=examples(12))
@given(seed=st.integers(0, 1 << 32))
def test_transparent_pixels_lie_on_white_as_transformers_lays_them(kind: str, seed: int) -> None:
    content = TRANSPARENT[kind](seed)
    with Image.open(BytesIO(content)) as opened:
        expected = convert_to_rgb(opened, return_numpy=True)
    np.testing.assert_array_equal(image_pixels(content), expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "CMYK", "YCbCr"])
@settings(max_examples=examples(12))
@given(seed=st.integers(0, 1 << 32))
def test_opaque_pixels_stay_as_pillow_converts_them(mode: str, seed: int) -> None:
    content = saved(coloured("L", seed).convert("1") if mode == "1" else coloured(mode, seed), "TIFF")
    with Image.open(BytesIO(content)) as opened:
        np.testing.assert_array_equal(image_pixels(content), np.asarray(opened.convert("RGB")))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_an_image_with_an_opaque_alpha_channel_is_that_without_it(mode: str) -> None:
    picture = coloured(mode[:-1], 1)
    expected = np.asarray(picture.convert("RGB"))
    picture.putalpha(255)
    np.testing.assert_array_equal(image_pixels(saved(picture, "PNG")), expected)


def test_grey_values_that_a_tiff_multiplied_by_their_alpha_lie_on_white() -> None:
    """Pillow reads them in a mode that it cannot convert to colours directly."""
    content = saved(Image.frombytes("LA", (3, 1), bytes([0, 0, 60, 120, 90, 255])), "TIFF")
    associated = content.replace(struct.pack("<HHIH", 338, 3, 1, 2), struct.pack("<HHIH", 338, 3, 1, 1))
    with Image.open(BytesIO(associated)) as opened:
        assert opened.mode == "La"
    assert image_pixels(associated)[0, :, 0].tolist() == [255, 60 + 255 - 120, 90]


def png(depth: int, kind: int, row: bytes, width: int, transparent: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, kind, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"tRNS", transparent) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("depth", "row", "seen"),
    [(1, b"\x40", [0, 255]), (2, b"\x18", [0, 255, 170, 0]), (4, b"\x01\x23", [0, 255, 34, 51])],
)
def test_a_transparent_grey_value_of_few_bits_is_found(depth: int, row: bytes, seen: list[int]) -> None:
    """Pillow multiplies the values of the pixels, but not the one that is transparent."""
    content = png(depth, 0, row, len(seen), struct.pack(">H", 1))
    assert image_pixels(content)[0, :, 0].tolist() == seen


def test_a_transparent_colour_of_16_bits_is_refused() -> None:
    content = png(16, 2, bytes([18, 52] * 3), 1, bytes([18, 52] * 3))
    for read in (image_size, image_pixels):
        with pytest.raises(DataError, match=r"has a transparent colour of 16 bits, .* save it with an alpha channel"):
            read(content)


# --- video files ---

FILMED = np.zeros((48, 64, 4), dtype=np.uint8)
FILMED[8:24, 8:32] = [255, 0, 0, 255]
FILMED[24:40, 8:32] = [0, 0, 255, 128]
ON_WHITE = np.array([[255, 255, 255], [255, 0, 0], [127, 127, 255]])


def film(path: Path, codec: str, pixels: str, colours: NDArray[np.uint8] = FILMED) -> Path:
    av = pytest.importorskip("av")
    kind = {3: "rgb24", 4: "rgba"}[colours.shape[2]]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=5)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pixels
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(colours, format=kind)))
        container.mux(stream.encode(None))
    return path


@pytest.mark.parametrize(
    ("name", "codec", "pixels"),
    [
        ("a.webm", "libvpx-vp9", "yuva420p"),
        ("a.mov", "prores_ks", "yuva444p10le"),
        ("a.mov", "qtrle", "argb"),
        ("a.mov", "png", "rgba"),
        ("a.mkv", "ffv1", "yuva420p"),
        ("a.mkv", "ffv1", "bgra"),
    ],
)
def test_transparent_pixels_of_a_video_file_lie_on_white(tmp_path: Path, name: str, codec: str, pixels: str) -> None:
    path = film(tmp_path / name, codec, pixels)
    frames = list(pixels_of(path, [0, 2, 2]))
    assert len(frames) == 3
    for frame in frames:
        seen = frame[[2, 16, 32], [2, 20, 20]].astype(int)
        assert np.abs(seen - ON_WHITE).max() <= 4, seen


def test_another_build_of_the_decoder_may_read_what_this_one_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = film(tmp_path / "a.webm", "libvpx-vp9", "yuva420p")
    monkeypatch.setattr(pytest.importorskip("av"), "codecs_available", frozenset())
    with pytest.raises(PassingFault, match="which need a build of PyAV with libvpx-vp9"):
        clip_of(path, None)


def test_transparent_pixels_of_a_gif_film_lie_on_white(tmp_path: Path) -> None:
    pytest.importorskip("av")
    frames = [Image.fromarray(np.roll(FILMED, step, axis=1)) for step in (0, 4, 8)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:], duration=200, disposal=2)
    first, *_ = pixels_of(tmp_path / "a.gif", [0, 1, 2])
    assert first[[2, 16], [2, 20]].tolist() == [[255, 255, 255], [255, 0, 0]]


def test_an_opaque_video_keeps_its_pixels(tmp_path: Path) -> None:
    av = pytest.importorskip("av")
    colours = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    for codec, pixels in (("mpeg4", "yuv420p"), ("ffv1", "yuva420p")):
        path = film(tmp_path / f"{codec}.mkv", codec, pixels, colours)
        with av.open(str(path)) as container:
            expected = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        np.testing.assert_array_equal(np.stack(list(pixels_of(path, [0, 1, 2]))), np.stack(expected))


def test_the_unused_byte_of_uncompressed_pixels_hides_nothing(tmp_path: Path) -> None:
    path = film(tmp_path / "a.avi", "rawvideo", "bgra")
    (frame,) = pixels_of(path, [0])
    assert frame[[2, 16, 32], [2, 20, 20]].tolist() == [[0, 0, 0], [255, 0, 0], [0, 0, 255]]
