"""Images: size from the header, and pixels; both upright, as cameras mark it (`load_image` of transformers)."""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import IO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, UnidentifiedImageError
from PIL import Image as Pillow

from trials.data.records.faults import unreadable
from trials.data.records.image_end import missing_bytes
from trials.data.records.png_marks import late_marks
from trials.data.records.sample import Image
from trials.errors import DataError, shown_name
from trials.regular_file import check_regular

MOST_PIXELS = 2 * 89_478_485
"""Most pixels of an image: twice the limit above which Pillow warns of a decompression bomb."""
# A choice: an image of MOST_PIXELS has half as many bytes without compression, so a larger file is something else.
_MOST_BYTES = 1 << 30
_DEEP = ("I", "F")
"""Beginnings of the names of Pillow's modes for whole numbers of 16 and 32 bits, and for floats."""
_SHALLOW = {"L;2": 85, "L;4": 17}
"""What Pillow multiplies the grey values of a PNG by, but not the one that is transparent, by its names for them."""
_TURNS = {
    2: Pillow.Transpose.FLIP_LEFT_RIGHT,
    3: Pillow.Transpose.ROTATE_180,
    4: Pillow.Transpose.FLIP_TOP_BOTTOM,
    5: Pillow.Transpose.TRANSPOSE,
    6: Pillow.Transpose.ROTATE_270,
    7: Pillow.Transpose.TRANSVERSE,
    8: Pillow.Transpose.ROTATE_90,
}
"""What makes an image of each orientation of Exif upright."""
_LYING = (5, 6, 7, 8)
"""Orientations that exchange height and width."""
_PAGED = ("AVIF", "GIF", "PNG", "TIFF", "WEBP")
"""Formats of several pages or frames. In others Pillow counts layers, or the previews that cameras append."""
_UNREADABLE = (OSError, ValueError, SyntaxError, LookupError, NotImplementedError)
"""Exceptions of Pillow for damaged or unknown content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageHeader:
    """What the header of an image says."""

    size: tuple[int, int]
    """(height, width), upright."""
    has_more: bool
    """Whether it holds further pictures, pages or frames, which are not read."""


def image_size(image: Image) -> tuple[int, int]:
    """Return (height, width) from the header. Raise DataError as `image_header` does."""
    return image_header(image).size


def image_header(image: Image) -> ImageHeader:
    """Return the header.

    Raise DataError for a missing image, for one that is no regular file, for a header that Pillow cannot read, for
    values of more than 8 bits, for zero and huge sizes, and for a file that was cut off behind its header.
    """
    with _opened(image, "has no readable header") as opened:
        size = opened.height, opened.width
        if min(size) < 1:
            raise DataError(f"image {_name(image)} is {size[1]} pixels wide and {size[0]} high")
        upright = size[::-1] if _orientation(opened) in _LYING else size
        return ImageHeader(size=upright, has_more=_has_more(opened))


def image_pixels(image: Image) -> NDArray[np.uint8]:
    """Return pixels [height, width, 3] in RGB, transparent ones on white.

    Raise DataError as `image_size` does, and for content that cannot be decoded.
    """
    with _opened(image, "cannot be decoded") as opened:
        turn = _TURNS.get(_orientation(opened))
        pixels = on_white(_scaled_transparency(opened))
    return pixels if turn is None else np.asarray(Pillow.fromarray(pixels).transpose(turn))


@contextmanager
def _opened(image: Image, failure: str) -> Iterator[Pillow.Image]:
    """Open an image that is whole by its end. Raise DataError; `failure` describes what Pillow raises."""
    try:
        with _stream(image) as stream, Pillow.open(stream) as opened:
            _check_pixels(image, opened)
            begun = stream.tell()
            if fault := missing_bytes(opened, stream):
                raise DataError(f"image {_name(image)} was cut off: {fault}")
            if opened.format == "PNG":
                opened.info |= late_marks(stream)
            stream.seek(begun)  # Pillow reads on from there
            yield opened
    except FileNotFoundError:
        raise DataError(f"image {_name(image)} does not exist") from None
    except Pillow.DecompressionBombError:
        raise _too_large(image) from None
    except _UNREADABLE as error:
        raise unreadable(f"image {_name(image)} {failure}: {_first_line(error)}", error) from error


def on_white(picture: Pillow.Image) -> NDArray[np.uint8]:
    """Return pixels [height, width, 3] in RGB of a picture laid on white, as image processors of transformers do it."""
    picture.load()  # what is transparent may stand behind the pixels
    if not picture.has_transparency_data:
        return np.asarray(picture.convert("RGB"))
    if picture.mode == "La":  # grey values that were multiplied by their alpha, for which Pillow has no direct way
        picture = picture.convert("LA")
    seen = picture.convert("RGBA")
    white = Pillow.new("RGBA", seen.size, "white")
    return np.asarray(Pillow.alpha_composite(white, seen).convert("RGB"))


def _has_more(opened: Pillow.Image) -> bool:
    try:
        return opened.format in _PAGED and bool(getattr(opened, "is_animated", False))
    except (*_UNREADABLE, struct.error):
        return True  # what follows the first picture is damaged


def _orientation(opened: Pillow.Image) -> int:
    """Return the orientation that a header states, by its number in Exif; 1, which is upright, without one."""
    if opened.format == "TIFF":  # which Pillow makes upright itself
        return 1
    try:
        # Of the base class: that of a PNG decodes the image, to find marks that `late_marks` has found already.
        found: object = Pillow.Image.getexif(opened).get(ExifTags.Base.Orientation)
    except (*_UNREADABLE, struct.error, TypeError):
        return 1  # damaged marks say nothing
    return found if isinstance(found, int) else 1


def _scaled_transparency(opened: Pillow.Image) -> Pillow.Image:
    scale = _SHALLOW.get(_coded_mode(opened))
    grey = opened.info.get("transparency")
    if scale and isinstance(grey, int):
        opened.info["transparency"] = scale * grey
    return opened


def _coded_mode(opened: Pillow.Image) -> str:
    """Return Pillow's name for the values in the file, which says more than the mode that it reads them in."""
    match getattr(opened, "tile", ()):
        case [(_, _, _, str() as mode), *_]:
            return mode
    return ""


def _stream(image: Image) -> IO[bytes]:
    if isinstance(image, bytes):
        return BytesIO(image)
    if check_regular(image) > _MOST_BYTES:
        raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB")
    return image.open("rb")


def _check_pixels(image: Image, opened: Pillow.Image) -> None:
    if opened.width * opened.height > MOST_PIXELS:
        raise _too_large(image)
    # Pillow cuts the values of these off at 255, so that an image of 16 bits becomes white.
    if opened.mode.startswith(_DEEP):
        raise DataError(
            f"image {_name(image)} has values of more than 8 bits (mode {opened.mode}), which would turn white or "
            "black; scale them to 8 bits"
        )
    if _coded_mode(opened) == "RGB;16B" and "transparency" in opened.info:
        raise DataError(
            f"image {_name(image)} has a transparent colour of 16 bits, which cannot be told from its neighbours in "
            "8 bits; save it with an alpha channel, or with 8 bits"
        )


def _too_large(image: Image) -> DataError:
    return DataError(f"image {_name(image)} has more than {MOST_PIXELS} pixels; scale it down")


def _name(image: Image) -> str:
    return f"in the record, of {len(image)} bytes," if isinstance(image, bytes) else shown_name(image)


def _first_line(error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):  # its own text names an object in memory
        return "it is empty, or in no image format known here"
    if isinstance(error, OSError) and error.strerror:  # its own text repeats the name
        return error.strerror
    return str(error).partition("\n")[0] or type(error).__name__
