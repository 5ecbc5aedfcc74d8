"""Mixture files: lists of annotation files, with what is said about each. One module each, found by name."""

import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from trials import plugins, strict_yaml
from trials.data.records.columns import Columns
from trials.data.records.file_chunk import open_annotations
from trials.data.records.record import MAX_RECORD_BYTES, RecordError, parse
from trials.errors import DataError
from trials.sampling import MOST_REPEATS, PATTERN

# A choice: lists of data sets have some KiB, and YAML is slow to parse.
_MAX_YAML_BYTES = 1 << 20
_SHARE = re.compile(r"(.+)%(\d+)")
"""A name with a share of its samples, as in Qwen-VL's lists of data sets."""
_REPEATS = "repeat_time"
_DOCUMENTING = ("length", "name", "description", "comment")
"""Keys of an entry that change nothing: the length is that of the whole file, which is counted here."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One annotation file, and what the mixture says about it."""

    path: Path
    images: Path
    """Folder that image names are relative to."""
    repeat: float = 1.0
    sampling: str = "all"
    columns: Columns | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """One entry of a mixture file as it is written there."""

    file: Path
    """The mixture file, to whose folder names of annotation files are relative."""
    name: str
    images: Path
    """Folder that image folders are relative to."""
    values: dict[str, Any]

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f'{self.file}: "{self.name}"'

    def text(self, key: str, default: str | None = None) -> str:
        """Return the text under a key. Raise DataError when there is neither a text nor a default."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            fault = f"is {repr(value)[:40]}" if key in self.values else "is missing"
            raise DataError(
                f"{self.where}: `{key}` {fault}; write a path relative to the mixture file, or an absolute one"
            )
        return value

    def entry(self, file: str, images: str | None = None) -> Entry:
        """Return the entry whose annotation file and image folder stand under these keys. Raise DataError."""
        root = self.images / self.text(images, "") if images else self.images
        path = self.file.parent / self.text(file)
        repeat = self.values.get(_REPEATS, 1)
        if isinstance(repeat, bool) or not isinstance(repeat, int | float) or not 0 < repeat <= MOST_REPEATS:
            raise DataError(
                f"{self.where}: `{_REPEATS}` is {repr(repeat)[:40]}; write a number above 0, at most {MOST_REPEATS}"
            )
        return Entry(path=path, images=root, repeat=float(repeat))


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The entries of a mixture file."""

    format: str
    """Format of its annotation files, unless the job names another."""
    entries: tuple[Entry, ...]


class MixtureKind(Protocol):
    """What a module of this package offers."""

    FORMAT: str
    """Module of `trials.data.formats`."""
    AROUND: tuple[str, ...]
    """Keys of the document that hold all entries; none where each key is the name of an entry."""
    KEYS: tuple[str, ...]
    """Keys of an entry that are followed, besides `repeat_time`, or refused with a reason."""
    IGNORED: Mapping[str, str]
    """Keys that are named in a warning, and why they are not followed."""

    def listed(self, document: dict[str, Any]) -> dict[str, Any] | None:
        """Return the entries by name; None for any other document."""

    def entry(self, listing: Listing) -> Entry:
        """Return the entry of a listing. Raise DataError for a faulty one."""


MIXTURES: plugins.Plugins[MixtureKind] = plugins.Plugins(__name__)


def expand(path: Path, images: Path, names: Sequence[str] | None) -> Mixture | None:
    """Return the files that a mixture file lists, all or those in `names`; None when the file is no mixture.

    `name%50` takes a random half of an entry. Raise DataError for a faulty entry, an unknown name, and an entry that is
    named twice.
    """
    document = _read_mapping(path)
    for _, kind in plugins.each(MIXTURES) if document else ():
        listed = kind.listed(document or {})
        if listed is not None:
            around = {key: value for key, value in (document or {}).items() if value is not None}
            if kind.AROUND and (other := next((key for key in around if key not in kind.AROUND), None)) is not None:
                raise DataError(f"{path}: `{_shown(other)}` is not known next to {kind.AROUND[0]}; remove it")
            counts = Counter(_key_and_share(listed, name)[0] for name in names or listed)
            if (twice := next((key for key, count in counts.items() if count > 1), None)) is not None:
                raise DataError(
                    f'{path}: "{twice}" is twice in `names` of this source; name it once, and to show its samples more '
                    "often make it a source of its own with `repeat`"
                )
            entries = (_entry(kind, path, images, listed, name) for name in names or listed)
            return Mixture(format=kind.FORMAT, entries=tuple(entries))
    return None


def _key_and_share(listed: dict[str, Any], name: str) -> tuple[str, str | None]:
    """Return the key of the entry that is named, and the percentage of its samples that is taken; None for all."""
    share = None if name in listed else _SHARE.fullmatch(name)
    return (share[1], share[2]) if share else (name, None)


def _entry(kind: MixtureKind, path: Path, images: Path, listed: dict[str, Any], name: str) -> Entry:
    key, share = _key_and_share(listed, name)
    where = f'{path}: "{key}"'
    if key not in listed:
        raise DataError(f"{where} is not listed; `names` of this source can be: {', '.join(listed)}")
    if not isinstance(listed[key], dict):
        raise DataError(f"{where}: expected an object, not {repr(listed[key])[:40]}")
    listing = Listing(file=path, name=key, images=images, values=listed[key])
    entry = kind.entry(listing)
    _check_keys(kind, listing)
    if share:
        if entry.sampling != "all":
            raise DataError(f"{where}: has the sampling {entry.sampling} already; remove the percentage from `names`")
        entry = replace(entry, sampling=f"random:{share}%")
    if not re.fullmatch(PATTERN, entry.sampling):
        raise DataError(
            f"{where}: the sampling is {entry.sampling!r}; write all, exactly:N, first:N, end:N or random:N, "
            "where N is a count, or a percentage such as 25% with the last three"
        )
    return entry


def _check_keys(kind: MixtureKind, listing: Listing) -> None:
    """Warn of the keys of an entry that are not followed. Raise DataError for a key that is not known."""
    known = (*kind.KEYS, _REPEATS, *kind.IGNORED, *_DOCUMENTING)
    for key, value in listing.values.items():
        if value is not None and key not in known:
            raise DataError(
                f"{listing.where}: `{_shown(key)}` is not known, and might change what is trained on; the keys of an "
                f"entry are: {', '.join(known)}; the source in the job file can have `repeat`, `sampling` and `images`"
            )
        if key in kind.IGNORED and value not in (None, False):
            warn(listing.file, key, kind.IGNORED[key])


@cache
def warn(file: Path, key: str, why: str) -> None:
    """Warn once of a key in a file, which commands read several times and whose entries may all have it.

    A process that runs several commands clears this cache before each.
    """
    logger.warning("%s: %s is ignored; %s", file, key, why)


def _shown(key: object) -> str:
    return repr(str(key))[1:-1][:60]


def _read_mapping(path: Path) -> dict[str, Any] | None:
    """Return the file's mapping by name; None when it holds anything else. Raise DataError when it cannot be opened.

    Raise DataError also for YAML that is faulty, holds a tag or an alias, or gives a key twice.
    """
    if os.path.isdir(path):  # noqa: PTH112 - false, not an error, for what cannot be a path
        return None
    is_yaml = path.suffix.lower() in (".yaml", ".yml")
    with open_annotations(path) as stream:
        text = stream.read((_MAX_YAML_BYTES if is_yaml else MAX_RECORD_BYTES) + 1)
    if is_yaml:
        return _from_yaml(path, text)
    try:
        value = parse(text, dict)
    except RecordError:
        return None
    # Only a mapping of objects can be a mixture; then a key given twice would hide an entry.
    if all(isinstance(entry, dict) for entry in value.values()):
        try:
            parse(text)
        except RecordError as error:
            raise DataError(f"{path}: {error}") from error
    return value


def _from_yaml(path: Path, text: bytes) -> dict[str, Any] | None:
    if len(text) > _MAX_YAML_BYTES:
        raise DataError(
            f"{path} is longer than {_MAX_YAML_BYTES >> 20} MiB, which no list of data sets is; correct its path"
        )
    try:
        document = strict_yaml.read(text)
    except strict_yaml.NotYaml as error:
        raise DataError(f"{path}: {error}; correct the file") from error
    if document.mistakes:
        raise DataError(f"{path}: {document.mistakes[0]}")
    return document.value if isinstance(document.value, dict) else None
