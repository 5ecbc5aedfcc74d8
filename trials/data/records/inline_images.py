"""Images that stand in a record as text: a data: URL, or base64 alone, as ms-swift and transformers read it."""

import base64
import binascii
from urllib.parse import unquote, unquote_to_bytes

from trials.data.records.record import RecordError

_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"RIFF", b"BM", b"II*\0", b"MM\0*", b"\0\0\0\x0cjP  ")
_ENCODED = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk", "SUkqA", "TU0AK", "AAAADGpQICA")
"""How base64 of these begins. Much of it could be the beginning of a name, so that all of it has to be base64."""
_FEWEST = 40
"""Characters of base64, below which a text is a name: no image has fewer than 30 bytes."""


def is_data_url(text: str) -> bool:
    """Return whether a text is a data: URL; case does not count in the scheme of a URL."""
    return text[:5].lower() == "data:"


def inline_image(text: str, what: str) -> bytes | None:
    """Return the image that a text holds, None for a text that may be a name. Raise RecordError."""
    return _from_data_url(text, what) if is_data_url(text) else _bare(text)


def is_inline_image(text: str) -> bool:
    """Return whether a text holds an image by its beginning, and for base64 alone by all of it."""
    return text[:11].lower() == "data:image/" or _bare(text) is not None


def _bare(text: str) -> bytes | None:
    """Return the image that base64 without a data: URL stands for, None for any other text."""
    if len(text) < _FEWEST or not text.startswith(_ENCODED):
        return None
    try:
        content = _decoded(text)
    except ValueError:
        return None
    return content if content.startswith(_SIGNATURES) else None


def _from_data_url(url: str, what: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        is_base64 = head.rstrip().lower().endswith(";base64")
        content = _decoded(unquote(body)) if is_base64 else unquote_to_bytes(body)
    except ValueError as error:
        raise RecordError(f"{what} is a data: URL that cannot be decoded: {error}") from error
    if not comma or not content:
        raise RecordError(f"{what} is a data: URL without content")
    return content


def _decoded(text: str) -> bytes:
    """Return what base64 stands for, which may be broken into lines. Raise ValueError."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
