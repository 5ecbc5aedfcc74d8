"""Arguments of a trainer, checked as the draft of a job takes them."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from autotune.draft.shell_script import NoValue
from autotune.errors import JobError
from trials import strict_yaml

_Value = TypeVar("_Value")


class Given:
    """Values of arguments, checked as they are taken."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.left = dict(values)
        """Values that were not taken, by name."""
        self.automatic: set[str] = set()
        """Names of the values that are `auto`."""
        self.unknown = {name for name, value in values.items() if isinstance(value, NoValue)}
        """Names of the values that the script does not set."""

    def take(self, name: str, read: Callable[[Any], _Value | None]) -> _Value | None:
        """Return a value; None for an absent, empty, unknown or `auto` one. Raise JobError for another kind of it."""
        self.left.pop(name, None)
        return self.look(name, read)

    def look(self, name: str, read: Callable[[Any], _Value | None]) -> _Value | None:
        """Return a value as `take` does, but leave it."""
        value = self._values.get(name)
        # Arguments of a script are texts; read as YAML, they become numbers and flags.
        if isinstance(value, str) and read is not text and read is not texts:
            value = None if value == "None" else strict_yaml.read(value.encode()).value
        if value == "auto":
            self.automatic.add(name)
        if value in (None, "auto", "") or isinstance(value, NoValue):
            return None
        try:
            return read(value)
        except (TypeError, ValueError) as error:
            raise JobError(f"{name}: {error}") from error


def number(value: object) -> float:
    """Return the value if it is a number. Raise ValueError, as all of these functions do for another kind."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r:.60} is not a number; correct it")
    return value


def count(value: object) -> int:
    """Return a whole number that is not negative."""
    found = number(value)
    if found != int(found) or found < 0:
        raise ValueError(f"{found:g} is not a count; give a whole number")
    return int(found)


def limit(value: object) -> int | None:
    """Return a count; None, which is no limit, for zero and below."""
    return count(value) if number(value) > 0 else None


def flag(value: object) -> bool:
    """Return a truth value."""
    if value in (True, False):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("yes", "on", "no", "off"):
        return value.lower() in ("yes", "on")
    raise ValueError(f"{value!r:.60} is neither true nor false; correct it")


def text(value: object) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is not a text; correct it")
    return value


def texts(value: object) -> list[str]:
    """Return a list of texts, which a single text separates by commas."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{value!r:.60} is not a list of texts; correct it")
    return [part for part in parts if part]
