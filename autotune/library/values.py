"""Checks of the arguments that programs give."""

import os
from typing import Any, TypeVar

from autotune.errors import PredictError
from trials.units import parse_bytes

_Error = TypeVar("_Error", bound=Exception)


def check_whole(error: type[_Error], **values: tuple[Any, int]) -> None:
    """Raise an error for a value that is given and is not a whole number of at least its bound."""
    for name, (value, least) in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise error(f"{name} must be a whole number of at least {least}, not {value!r}")


def text_of(error: type[_Error], name: str, value: object) -> str:
    """Return a text or path as a text. Raise an error for a value of another type."""
    if not isinstance(value, str | os.PathLike):
        raise error(f"{name} must be a text, not {type(value).__name__}")
    return os.fspath(value)


def bytes_of(value: str) -> int:
    """Return a size in bytes. Raise PredictError for what is none."""
    try:
        size = parse_bytes(value)
    except ValueError as error:
        raise PredictError(f"memory_limit: {error}") from error
    check_whole(PredictError, memory_limit=(size, 1))
    return size
