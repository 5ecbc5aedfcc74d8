"""Damage to a file: to values, keys, lines or bytes, or something else in its place."""

import copy
import hashlib
import json
import string
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import Any, TypeAlias

from tests.fuzz.documents import Document, Raw, Section, documents


class Special(Enum):
    """Something other than a regular file."""

    ABSENT = "nothing"
    FOLDER = "a folder"
    LOOP = "a link to itself"
    PIPE = "a pipe that nothing is written to"
    ENDLESS = "a link to /dev/zero"
    LARGE = "a GiB of zeros"


Content: TypeAlias = bytes | Special
Files: TypeAlias = Mapping[str, Content]
"""Contents by path in the folder of a case."""
Change: TypeAlias = Callable[[bytes, Random], bytes]

_NEAR = 0.4
"""Share of values that keep their type, because these get further before they are refused."""
DEEP = 100_000
_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1, 5, 0.5, -0.0, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**9, 10**18, 10**400),
    *(1e308, -1e308, 5e-324, *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "1e-999", "9" * 5000, "01"))),
)
_TEXTS = (
    *("", " ", "5", "null", "a" * 300, "a" * 100_000, "1e308GiB", "-1s", "first:-1", "2026-01-01T00:00:00Z"),
    *("\0", "\x1b[2J\x1b]0;title\x07", "\r", "a\nb", "\u202e", "\ud800", "%s{0}", "../..", "/", "~", "/dev/zero"),
)
_OTHERS: tuple[Any, ...] = (
    *(None, True, False, [], Section(), [[]], [None], Section([("", None)]), ["a"], [1, [2, [3]]]),
    *map(Raw, ("'", "{", "]", '"\\ud800"', "")),
    *(Raw("[" * DEEP + "]" * DEEP), Raw('{"a":' * DEEP), Raw("[" + "0," * DEEP + "0]")),
)
YAML = (
    *("*x", "&x [*x]", "&x {<<: *x}", "!!python/object/apply:os.system [id]", "!!binary aGk=", "!!set {a}", "!x y"),
    *("2026-01-01", "0o17", "0x1F", "017", "1_000", "12:30:45", "yes", "off", "~", ".nan", "-.inf", "1e5", "+.5"),
    *("|", ">-", "? a", "- - -", "%YAML 9.9", "---\na: 1\n---", "...", '"\\uD800"', "'", "{a: 1, a: 2}", "@", "`"),
    "\n".join([" {a0: &a0 [0,0,0,0,0,0,0,0]", *(f", a{n}: &a{n} [{f'*a{n - 1},' * 8}]" for n in range(1, 12)), "}"]),
    *("[" * 20_000, "{a: " * 20_000, "- " * 20_000, "\t", "# " + "x" * 70_000),
)
"""The separator after a key in YAML."""


def mutated(files: Files, dice: Random, specials: Sequence[Special]) -> tuple[Files, str]:
    """Return the files with one more fault, and a description of the fault."""
    name = dice.choice(sorted(files))
    content = files[name]
    if isinstance(content, Special):
        return files, f"{name}: as before"
    if dice.random() < 0.05:
        special = dice.choice(specials)
        return {**files, name: special}, f"{name}: {special.value} in its place"
    found = documents(name, content)
    if found and dice.random() < 0.75:
        changed, what = _in_tree(dice.choice(found), dice)
        return {**files, name: changed}, f"{name}: {what}"
    if name.endswith(".yaml") and dice.random() < 0.5:
        return {**files, name: _with_hostile_value(content, dice)}, f"{name}: hostile YAML"
    what = dice.choice(sorted(_OF_BYTES))
    return {**files, name: _OF_BYTES[what](content, dice)}, f"{name}: {what}"


def sealed(bundle: bytes) -> bytes:
    """Return the bundle with a new last line, which holds the row counts and the checksum of all other lines."""
    *lines, _ = bundle.splitlines(keepends=True) or [b""]
    end = {"rows": len(lines) - 1, "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
    return b"".join((*lines, json.dumps(end).encode() + b"\n"))


# --- values ---


def _in_tree(document: Document, dice: Random) -> tuple[bytes, str]:
    root = copy.deepcopy([document.root])  # in a list, so that it has a place itself
    holder, key, place = _random_place(root, dice)
    what = "changed to" if dice.random() < _NEAR else dice.choice(sorted(_OF_TREES))
    detail = _OF_TREES[what](holder, key, dice, root)
    return document.written(root[0] if root else None), f"{place or 'all of it'}: {what}{detail}"


def _random_place(root: list[Any], dice: Random) -> tuple[list[Any], int, str]:
    """Return (container of a random value, its index, its place); all depths are equally likely."""
    holder, key, place = root, 0, ""
    while True:
        value = holder[key][1] if isinstance(holder, Section) else holder[key]
        if not isinstance(value, list) or not value or dice.random() < 0.25:
            return holder, key, place
        holder, key = value, dice.randrange(len(value))
        place += f".{holder[key][0]}" if isinstance(holder, Section) else f"[{key}]"


def _value(holder: list[Any], key: int) -> Any:
    return holder[key][1] if isinstance(holder, Section) else holder[key]


def _put(holder: list[Any], key: int, value: Any) -> None:
    holder[key] = (holder[key][0], value) if isinstance(holder, Section) else value


def _hostile(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    value = _any(dice)
    _put(holder, key, value)
    return f" {_shown(value)}"


def _any(dice: Random) -> Any:
    return dice.choice(dice.choice([_NUMBERS, _TEXTS, _OTHERS]))


def _of_same_type(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    """Return another value of the same type."""
    value = _value(holder, key)
    if isinstance(value, str | int | float) and dice.random() < 0.5:
        value = dice.choice(_TEXTS if isinstance(value, str) else _NUMBERS)
    elif isinstance(value, str) and value:
        at = dice.randrange(len(value))
        value = value[:at] + dice.choice(["", "\0", " ", "/", "\u00e9", *string.printable]) + value[at + 1 :]
    elif isinstance(value, int | float):
        value = dice.choice([value + 1, value - 1, -value, value * 10, value * 10**9, value // 2, str(value), [value]])
    elif isinstance(value, list):
        dice.shuffle(value)
    _put(holder, key, value)
    return f" {_shown(value)}"


def _remove(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    del holder[key]
    return ""


def _twice(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    holder.insert(dice.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
    return ""


def _often(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    value = _value(holder, key)
    many = dice.choice([2, 100, 5000])
    repeatable = isinstance(value, list) and len(str(value)) < 200
    _put(holder, key, value * many if repeatable else [value] * 3)
    return f" {many} times"


def _elsewhere(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    value = copy.deepcopy(_value(holder, key))
    other, at, place = _random_place(root, dice)
    _put(other, at, value)
    return f" {place}"


def _renamed(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    if not isinstance(holder, Section):
        return _hostile(holder, key, dice, root)
    names = [name for name, _ in holder] + list(_TEXTS)
    holder[key] = (dice.choice(names), holder[key][1])
    return f" {_shown(holder[key][0])}"


def _unknown(holder: list[Any], key: int, dice: Random, root: list[Any]) -> str:
    value = _any(dice)
    new = dice.choice(["unknown", "path", "auto_map", "<<", "", "\x1b[2J"])
    holder.insert(key, (new, value) if isinstance(holder, Section) else value)
    return f" {new}"


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) < 60 else f"{text[:40]}... ({len(text)} characters)"


_OF_TREES: dict[str, Callable[[list[Any], int, Random, list[Any]], str]] = {
    "replaced by": _hostile,
    "changed to": _of_same_type,
    "removed": _remove,
    "given twice": _twice,
    "repeated": _often,
    "copied over": _elsewhere,
    "named": _renamed,
    "beside something new,": _unknown,
}

# --- bytes ---


def _some(content: bytes, dice: Random) -> tuple[int, int]:
    start = dice.randrange(len(content) + 1)
    return start, min(len(content), start + dice.choice([1, 10, 1000]))


def _cut_out(content: bytes, dice: Random) -> bytes:
    start, end = _some(content, dice)
    return content[:start] + content[end:]


def _overwritten(filler: Callable[[Random, int], bytes]) -> Change:
    def change(content: bytes, dice: Random) -> bytes:
        start, end = _some(content, dice)
        return content[:start] + filler(dice, end - start) + content[end:]

    return change


def _flipped(content: bytes, dice: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(min(len(content), dice.choice([1, 20]))):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _inserted(*parts: bytes) -> Change:
    def change(content: bytes, dice: Random) -> bytes:
        at = dice.choice([0, len(content), dice.randrange(len(content) + 1)])
        return content[:at] + dice.choice(parts) + content[at:]

    return change


def _lines(order: Callable[[list[bytes], Random], list[bytes]]) -> Change:
    return lambda content, dice: b"".join(order(content.splitlines(keepends=True), dice))


def _without_one(lines: list[bytes], dice: Random) -> list[bytes]:
    at = dice.randrange(len(lines) + 1)
    return lines[:at] + lines[at + 1 :]


def _with_one_twice(lines: list[bytes], dice: Random) -> list[bytes]:
    return [*lines, dice.choice(lines)] if lines else []


def _with_hostile_value(content: bytes, dice: Random) -> bytes:
    lines = content.decode(errors="replace").splitlines()
    at = dice.randrange(len(lines) + 1)
    before, colon, _ = (lines[at] if at < len(lines) else "new:").partition(":")
    return "\n".join((*lines[:at], f"{before}{colon} {dice.choice(YAML)}", *lines[at + 1 :])).encode()


_OF_BYTES: dict[str, Change] = {
    "cut off": lambda content, dice: content[: dice.randrange(len(content) + 1)],
    "emptied": lambda content, dice: b"",
    "bytes cut out": _cut_out,
    "bytes zeroed": _overwritten(lambda dice, size: bytes(size)),
    "random bytes": _overwritten(lambda dice, size: dice.randbytes(size)),
    "bits flipped": _flipped,
    "wrong magic": lambda content, dice: dice.randbytes(8) + content[8:],
    "no UTF-8": _inserted(b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x80" * 100),
    "control characters": _inserted(b"\0", b"\x1b[2J", b"\r\n", b"\x85", b"\x0c", b"\n" * 1000),
    "brackets": _inserted(b"[", b"{", b"]}", b'"', b",", b"\\", b"//", b"[" * DEEP, b'{"a":' * DEEP),
    "a line lost": _lines(_without_one),
    "a line twice": _lines(_with_one_twice),
    "lines in another order": _lines(lambda lines, dice: dice.sample(lines, len(lines))),
    "many times": lambda content, dice: content * min(100, 1 + (4 << 20) // (1 + len(content))),
}
