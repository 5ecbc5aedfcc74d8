"""Conditions of a shell script: true, false, or None where only a run of the script can say."""

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from itertools import groupby

UNKNOWN = "\0"
"""Stands in a text for what the script does not set."""
UNSET = "\0\2"
"""The value of a variable that the script does not set. Tests take it for empty, as `${NAME:-DEFAULT}` does."""
TESTS = ("[", "[[", "test")
"""Commands that are tests."""

_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-gt": operator.gt,
    "-ge": operator.ge,
    "-lt": operator.lt,
    "-le": operator.le,
}
_NUMBER = re.compile(r"-?\d{1,18}")
_SUCCEED = {":", "true", "cd", "pushd", "mkdir", "echo", "printf", "set", "source", "."}
"""Commands after which no script of a training goes on where they fail."""


def negated(value: bool | None) -> bool | None:
    return None if value is None else not value


def both(left: bool | None, right: bool | None) -> bool | None:
    """Return whether both are true: false as soon as one of them is, even if the other one is not known."""
    if left is False or right is False:
        return False
    return None if left is None or right is None else True


def either(left: bool | None, right: bool | None) -> bool | None:
    return negated(both(negated(left), negated(right)))


def succeeds(words: Sequence[str]) -> bool | None:
    """Return whether a command succeeds, as far as its words say."""
    match words:
        case ["!", *rest]:
            return negated(succeeds(rest))
        case [command, *_] if command in _SUCCEED:
            return True
        case ["false"]:
            return False
        case ["[", *inner, "]"] | ["test", *inner]:
            return _holds(inner)
        case ["[[", *inner, "]]"] if "(" not in inner:
            found: bool | None = False
            for choice in _split(inner, "||"):
                all_hold: bool | None = True
                for test in _split(choice, "&&"):
                    all_hold = both(all_hold, _holds(test))
                found = either(found, all_hold)
            return found
    return None


def _split(words: Iterable[str], separator: str) -> list[list[str]]:
    return [list(group) for ends, group in groupby(words, key=lambda word: word == separator) if not ends]


def _holds(test: Sequence[str]) -> bool | None:
    match test:
        case ["!", *rest]:
            return negated(_holds(rest))
        case ["-z", text]:
            return _is_same(text, "")
        case ["-n", text] | [text]:
            return negated(_is_same(text, ""))
        case [left, "=" | "==" | "!=" as sign, right]:
            same = _is_same(left, right)
            return negated(same) if sign == "!=" else same
        case [left, comparison, right] if comparison in _COMPARISONS and _NUMBER.fullmatch(left):
            return _COMPARISONS[comparison](int(left), int(right)) if _NUMBER.fullmatch(right) else None
    return None


def _is_same(left: str, right: str) -> bool | None:
    if {left, right} == {UNSET, ""}:
        return True
    return None if UNKNOWN in left + right else left == right


def matches(text: str, patterns: str) -> bool | None:
    """Return whether a text matches one of the patterns of a `case`, which `|` separates."""
    found: bool | None = False
    for written in patterns.split("|"):
        pattern = written.strip()
        quoted = re.fullmatch(r"""(['"])([^'"$`\\*?\[]*)\1""", pattern)
        if quoted:
            pattern = quoted[2]
        if pattern == "*":
            return True
        is_followed = UNKNOWN not in text and not re.search(r"""[$`\\'"\[]""", pattern)
        found = either(found, fnmatchcase(text, pattern) if is_followed else None)
    return found
