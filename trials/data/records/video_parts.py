"""Parts of a video file, followed by the sizes that they state, without decoding: where it is cut off or damaged.

Sources: Matroska (RFC 9559), AVI (Microsoft's RIFF), MP4 (ISO 14496-12, 4.2).
"""

from collections.abc import Callable
from typing import IO, TypeAlias

# Choices: an hour of film has some 200,000 blocks, and no head of a part is longer.
_MOST_PARTS = 10_000_000
_HEAD_BYTES = 16
_SEGMENT, _CLUSTER = 0x18538067, 0x1F43B675
"""Elements of Matroska whose content is followed, and whose size recorders leave open that cannot go back."""
_ELEMENTS = frozenset(
    {
        *(0x1A45DFA3, _SEGMENT, _CLUSTER, 0x114D9B74, 0x1549A966, 0x1654AE6B, 0x1C53BB6B, 0x1941A469, 0x1043A770),
        *(0x1254C367, 0xEC, 0xBF, 0xE7, 0x5854, 0xA7, 0xAB, 0xA3, 0xA0, 0xAF),
    }
)
"""Those of a file, of segments and of clusters."""
_Next: TypeAlias = tuple[int, int]
"""Place of the next part, and of the end of all parts as far as it is known."""


def broken_at(file: IO[bytes], kind: str) -> int | None:
    """Return the place in bytes from which on parts are missing or do not follow each other; None if none is known.

    `kind` is FFmpeg's name of the format. Of others than Matroska, AVI and MP4 nothing is known, and nothing of what
    is inside of their parts.
    """
    following = next((each for name, each in _FOLLOWING.items() if name in kind.split(",")), None)
    if following is None:
        return None
    place, end = 0, (length := file.seek(0, 2))
    for _ in range(_MOST_PARTS):
        if place >= min(end, length):
            return None if place == end <= length else min(end, length)
        file.seek(place)
        found = following(file.read(_HEAD_BYTES), place, end)
        if found is None:
            return place
        place, end = found
    return None


def _after_element(head: bytes, place: int, end: int) -> _Next | None:
    # The first bit that is set in a number states its length in bytes.
    name_bytes = 9 - int.from_bytes(head[:1]).bit_length()
    size_bytes = 9 - int.from_bytes(head[name_bytes : name_bytes + 1]).bit_length()
    name, body = int.from_bytes(head[:name_bytes]), name_bytes + size_bytes
    if size_bytes > 8 or name not in _ELEMENTS:
        return None
    open_size = (1 << 7 * size_bytes) - 1
    size = int.from_bytes(head[name_bytes:body]) & open_size
    if name == _SEGMENT and size != open_size:
        end = place + body + size
    return place + body + (0 if name in (_SEGMENT, _CLUSTER) else size), end


def _after_chunk(head: bytes, place: int, end: int) -> _Next | None:
    name, size = head[:4], int.from_bytes(head[4:8], "little")
    if len(head) < 8 or not name.isascii() or not name.decode().isprintable():
        return None
    return place + (12 if name == b"RIFF" else 8 + size + size % 2), end


def _after_box(head: bytes, place: int, end: int) -> _Next | None:
    size = int.from_bytes(head[8:16] if head[:4] == b"\0\0\0\1" else head[:4])
    if size == 0:  # as long as the file
        return end, end
    return None if size < 8 else (place + size, end)


_FOLLOWING: dict[str, Callable[[bytes, int, int], _Next | None]] = {
    "matroska": _after_element,
    "avi": _after_chunk,
    "mp4": _after_box,
}
"""(first bytes of a part, its place, the end of all) -> what follows it; None for what is no part."""
