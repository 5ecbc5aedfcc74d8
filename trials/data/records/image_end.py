"""Truncated image files, found without decoding pixels: by the end of the file, or by sizes that it states."""

from typing import IO

from PIL import Image as Pillow

# Choices: cameras and editors append some KiB behind the picture; the whole file is read, in blocks, only without a
# mark in them.
_TAIL_BYTES = 64 << 10
_BLOCK_BYTES = 1 << 20
_JPEG_END = b"\xff\xd9"
# Start of scan (ITU-T T.81, table B.1); segments before it may hold a thumbnail with an end mark of its own.
_JPEG_SCAN = 0xDA
_PNG_END = b"IEND\xaeB`\x82"
_GIF_BLOCK, _GIF_IMAGE = 0x21, 0x2C


def missing_bytes(image: Pillow.Image, stream: IO[bytes]) -> str | None:
    """Return what is missing at the end of the image that was opened from `stream`, None if nothing is known to be.

    JPEG, PNG, the first picture of a GIF and uncompressed BMP are looked at; Pillow itself refuses a WebP. Raise what
    reading raises.
    """
    length = stream.seek(0, 2)
    match image.format:
        case "JPEG" | "MPO":
            start = _jpeg_scan(stream)
            whole = start is not None and _holds(stream, start, _JPEG_END)
            return None if whole else "it has no end-of-image mark"
        case "PNG":
            return None if _holds(stream, 0, _PNG_END) else "it has no end chunk"
        case "GIF":
            return None if _gif_has_picture(stream) else "its first picture has no end"
        case "BMP":
            stated = _bmp_end(image)
            return f"it has {length} of {stated} bytes" if length < stated else None
    return None


def _holds(stream: IO[bytes], start: int, mark: bytes) -> bool:
    """Return whether `mark` follows `start`; it usually is near the end, and other data may follow it."""
    length = stream.seek(0, 2)
    stream.seek(max(start, length - _TAIL_BYTES))
    if mark in stream.read():
        return True
    stream.seek(start)
    end = b""
    while block := stream.read(_BLOCK_BYTES):
        if mark in end + block:
            return True
        end = block[1 - len(mark) :]
    return False


def _jpeg_scan(stream: IO[bytes]) -> int | None:
    """Return where the first coded data begins, behind all headers and the thumbnails in them."""
    position = 2
    while True:
        stream.seek(position)
        head = stream.read(4)
        if len(head) < 4 or head[0] != 0xFF:
            return None
        if head[1] == 0xFF:  # a byte that fills
            position += 1
            continue
        position += 2 + int.from_bytes(head[2:], "big")
        if head[1] == _JPEG_SCAN:
            return position


def _gif_has_picture(stream: IO[bytes]) -> bool:
    stream.seek(10)
    _skip_palette(stream)
    while kind := stream.read(1):
        if kind[0] == _GIF_BLOCK:
            stream.read(1)
            if not _skip_blocks(stream):
                return False
        elif kind[0] == _GIF_IMAGE:
            stream.read(8)
            _skip_palette(stream, behind=0)
            stream.read(1)
            return _skip_blocks(stream)
    return False


def _skip_palette(stream: IO[bytes], behind: int = 2) -> None:
    """Skip the flags, `behind` bytes, and the palette that the flags announce."""
    flags = (stream.read(1) or b"\0")[0]
    stream.seek(behind + (3 << (flags & 7) + 1 if flags & 0x80 else 0), 1)


def _skip_blocks(stream: IO[bytes]) -> bool:
    """Skip a chain of blocks; return whether it has an end."""
    while size := stream.read(1):
        if size[0] == 0:
            return True
        stream.seek(size[0], 1)
    return False


def _bmp_end(image: Pillow.Image) -> int:
    """Return where the rows of an uncompressed picture must end; 0 for a compressed one."""
    match getattr(image, "tile", ()):
        case [("raw", _, int() as offset, (_, int() as stride, *_))]:
            return offset + stride * image.height
    return 0
