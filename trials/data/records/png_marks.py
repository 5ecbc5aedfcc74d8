"""Marks of a camera that stand behind the pixels of a PNG, found without decoding these."""

from collections.abc import Iterator
from io import BytesIO
from typing import IO, Any

from PIL import Image as Pillow

_EXIF = b"eXIf"
_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""How the chunks of text begin in which Pillow looks for an orientation."""
# A choice: programs write pixels in chunks of 8 or 64 KiB, or in one chunk, which is skipped at once.
_TAIL_BYTES = 64 << 10
_HEADER_BYTES = 33
"""Bytes of the signature and of the first chunk, IHDR."""


def late_marks(stream: IO[bytes]) -> dict[str | tuple[int, int], Any]:
    """Return what Pillow finds in the marks behind the pixels, by its names for them; nothing if they are damaged.

    All chunks are visited only if the end of the file holds a mark, or no beginning of a chunk of pixels. Raise what
    reading raises.
    """
    stream.seek(max(0, stream.seek(0, 2) - _TAIL_BYTES))
    _, has_pixels, behind = stream.read().rpartition(b"IDAT")
    if has_pixels and not any(mark in behind for mark in (_EXIF, *_TEXTS)):
        return {}
    stream.seek(_HEADER_BYTES)
    marks = b"".join(_behind_pixels(stream))
    return _read(marks) if marks else {}


def _behind_pixels(stream: IO[bytes]) -> Iterator[bytes]:
    """Yield the chunks of marks between the pixels and the end, or the next frame of an animation."""
    seen_pixels = False
    while len(head := stream.read(8)) == 8:
        rest, kind = int.from_bytes(head[:4], "big") + 4, head[4:]
        if kind == b"IEND" or (kind == b"fcTL" and seen_pixels):
            return
        seen_pixels |= kind == b"IDAT"
        if seen_pixels and kind in (_EXIF, b"iTXt", b"zTXt", b"tEXt"):
            content = stream.read(rest)
            if kind == _EXIF or content.startswith(_TEXTS):
                yield head + content
        else:
            stream.seek(rest, 1)


def _read(marks: bytes) -> dict[str | tuple[int, int], Any]:
    blank = BytesIO()
    Pillow.new("L", (1, 1)).save(blank, "PNG")
    content = blank.getvalue()
    try:
        with Pillow.open(BytesIO(content[:_HEADER_BYTES] + marks + content[_HEADER_BYTES:])) as read:
            return read.info
    except (OSError, ValueError):
        return {}
