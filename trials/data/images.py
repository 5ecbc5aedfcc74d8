"""Reads images: their size from the header, their pixels only when asked."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from trials.errors import DataError


def image_size(path: Path) -> tuple[int, int]:
    """(height, width) from the file's header, as stored: a camera's rotation mark is not applied.

    Raises DataError for a missing image, and for a header that Pillow cannot read: zero sizes are among them.
    """
    try:
        with Image.open(path) as image:
            return image.height, image.width
    except FileNotFoundError:
        raise DataError(f"image {path} does not exist") from None
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"image {path} has no readable header: {_first_line(error)}") from error


def image_pixels(path: Path) -> NDArray[np.uint8]:
    """Pixels [height, width, 3] in RGB. Raises DataError for a missing or damaged image."""
    try:
        with Image.open(path) as image:
            return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"image {path} cannot be decoded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__
