"""The index: where each sample stands, and how long it is, so that plans are made without reading the dataset again."""

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from trials import wire
from trials.arrays import Ints
from trials.data import formats
from trials.data.formats import AnnotationFile
from trials.data.kept.files import KeptTokens, TokenFile
from trials.data.records.file_chunk import where
from trials.data.records.sample import Lengths, Sample
from trials.errors import DataError, WireError
from trials.sampling import rounded_up
from trials.whole_file import whole_file
from trials.workload import DataProfile

COLUMNS = {
    "file": np.int32,
    "offset": np.int64,
    "line": np.int32,
    "record": np.int64,
    "kind": np.int8,
    "vision_units": np.int32,
    "text_tokens": np.int32,
    "target_tokens": np.int32,
}
"""Type of each column of a DatasetIndex."""
_KEPT_FILES, _KEPT_PLACES = "kept_files", "kept_places"
_LAYOUT = 4
"""Raised when saved indexes of before can no longer be read."""
# A choice: finer bins make the stored histogram larger, coarser ones hide how packs fill.
_BIN_TOKENS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DatasetIndex:
    """One row per usable sample, as columns [samples], in order of files and lines."""

    files: tuple[AnnotationFile, ...]
    file: NDArray[np.int32]
    """Position in `files`."""
    offset: NDArray[np.int64]
    """First byte of the record."""
    line: NDArray[np.int32]
    """Counted from 1."""
    record: NDArray[np.int64]
    """Position in the input: counted from 0 over the records of all files, unusable ones included."""
    kind: NDArray[np.int8]
    """The `Kind` of each sample; 0 where only its lengths are known."""
    vision_units: NDArray[np.int32]
    text_tokens: NDArray[np.int32]
    """Image tokens included."""
    target_tokens: NDArray[np.int32]
    kept: KeptTokens | None = None
    """Tokens that were made when the samples were measured; None where none are kept."""

    def __len__(self) -> int:
        return len(self.file)

    @property
    def repeats(self) -> NDArray[np.float64]:
        """How often an epoch shows each sample, [samples]; a random part of a file counts by its expectation."""
        samples = np.bincount(self.file, minlength=len(self.files))
        shown = [rounded_up(file.repeat, int(count)) for file, count in zip(self.files, samples, strict=True)]
        return (np.array(shown, dtype=np.float64) / np.maximum(samples, 1))[self.file]

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all lengths and repeats, in order."""
        lengths = (self.vision_units, self.text_tokens, self.target_tokens)
        table = np.stack([*(column.astype("<f8") for column in lengths), self.repeats.astype("<f8")])
        return hashlib.sha256(table.tobytes()).hexdigest()[:16]

    @property
    def steps_digest(self) -> str:
        """Digest of what the steps of a training depend on: lengths, repeats, and which samples are of one file."""
        files = self.file.astype("<i4").tobytes()  # of which each repeats a part of its samples, and is a source
        return hashlib.sha256(self.digest.encode() + files).hexdigest()[:16]

    def lengths(self, row: int) -> Lengths:
        return Lengths(
            vision_units=int(self.vision_units[row]),
            text_tokens=int(self.text_tokens[row]),
            target_tokens=int(self.target_tokens[row]),
        )

    def keep(self, rows: Ints | NDArray[np.bool_]) -> "DatasetIndex":
        """Return an index of these rows alone: ascending numbers, or a mask [samples]."""
        columns: dict[str, Any] = {name: getattr(self, name)[rows] for name in COLUMNS}
        return DatasetIndex(files=self.files, kept=self.kept and self.kept.keep(rows), **columns)

    @property
    def each_once(self) -> "DatasetIndex":
        """The index with no repeats: an epoch shows each sample once."""
        return replace(self, files=tuple(replace(file, repeat=1.0) for file in self.files))

    def where(self, row: int) -> str:
        """Return the place of a sample, for messages."""
        return where(self.files[self.file[row]].path, (int(self.offset[row]), int(self.line[row])))

    def sample(self, row: int) -> Sample:
        """Read the record again. Raise DataError when the file has changed so that none stands there."""
        file = self.files[self.file[row]]
        found = formats.read(file, (int(self.offset[row]), int(self.line[row])))
        if isinstance(found, Sample):
            return found
        raise DataError(f"{self.where(row)}: {found.reason}; the file has changed since it was indexed, index it again")

    def sealed(self, row: int) -> bytes:
        """Return the kept tokens of a sample, sealed; empty where there are none."""
        return self.kept.sealed(row) if self.kept else b""

    def save(self, path: Path) -> None:
        """Write one npz file without pickle, atomically, also where several processes do."""
        columns = {f"{name}_column": getattr(self, name) for name in COLUMNS} | self._encoded_kept
        with whole_file(path, mode=0o600) as stream:
            np.savez(stream, layout=np.array(_LAYOUT), files=self._encoded_files, **columns)

    @property
    def content_digest(self) -> str:
        """Digest of all that `save` writes, places of the samples included."""
        digest = hashlib.sha256(self._encoded_files.tobytes())
        for name in COLUMNS:
            digest.update(getattr(self, name).tobytes())
        for column in self._encoded_kept.values():
            digest.update(column.tobytes())
        return digest.hexdigest()[:16]

    @property
    def _encoded_files(self) -> NDArray[np.uint8]:
        return np.frombuffer(wire.encode(self.files, tuple[AnnotationFile, ...]).encode(), dtype=np.uint8)

    @property
    def _encoded_kept(self) -> dict[str, Any]:
        if self.kept is None:
            return {}
        files = wire.encode(self.kept.files, tuple[TokenFile, ...]).encode()
        return {_KEPT_FILES: np.frombuffer(files, dtype=np.uint8), _KEPT_PLACES: self.kept.places}

    @classmethod
    def load(cls, path: Path) -> "DatasetIndex":
        """Return what `save` wrote. Raise DataError when the file is missing, damaged or of another layout."""
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
                layout = int(stored["layout"])
                files = wire.decode(tuple[AnnotationFile, ...], stored["files"].tobytes())
                columns: dict[str, Any] = {name: stored[f"{name}_column"] for name in COLUMNS}
                if _KEPT_FILES in stored:
                    kept_files = wire.decode(tuple[TokenFile, ...], stored[_KEPT_FILES].tobytes())
                    columns["kept"] = KeptTokens(files=kept_files, places=stored[_KEPT_PLACES])
        except (OSError, EOFError, ValueError, TypeError, KeyError, BadZipFile, WireError) as error:
            raise DataError(f"index {path} cannot be read ({error}); index the dataset again") from error
        if layout != _LAYOUT:
            raise DataError(f"index {path} has layout {layout}, not {_LAYOUT}; index the dataset again")
        return cls(files=files, **columns)


def profile(index: DatasetIndex) -> DataProfile:
    """Describe the epoch's lengths; a random part counts by its expectation, so that no seed matters."""
    units, tokens, repeats = index.vision_units, index.text_tokens, index.repeats
    return DataProfile(
        samples=round(float(repeats.sum())),
        text_only_samples=round(float(repeats[units == 0].sum())),
        vision_units=round(float(repeats @ units)),
        text_tokens=round(float(repeats @ tokens)),
        longest_text_tokens=int(tokens.max()),
        most_vision_units=int(units.max()),
        histogram=_histogram(units.astype(np.int64), tokens.astype(np.int64), repeats),
        lengths_digest=index.digest,
        target_tokens=round(float(repeats @ index.target_tokens)),
    )


def median_text_tokens(index: DatasetIndex) -> int:
    """Return the fewest text tokens that at least half of the samples of an epoch have at most."""
    order = np.argsort(index.text_tokens)
    shown = np.cumsum(index.repeats[order])
    half = shown[-1] / 2 * (1 - 1e-9)  # repeats are rounded
    return int(index.text_tokens[order[np.searchsorted(shown, half)]])


def _histogram(units: Ints, tokens: Ints, repeats: NDArray[np.float64]) -> tuple[tuple[int, int, int], ...]:
    rounded = -(-tokens // _BIN_TOKENS) * _BIN_TOKENS
    bins, bin_of_row = np.unique(np.stack([units, rounded], axis=1), axis=0, return_inverse=True)
    shown = np.bincount(bin_of_row, weights=repeats)
    counts = np.floor(shown).astype(np.int64)
    # Bins have whole samples, and together those of the epoch: what is left goes to the largest parts of samples.
    counts[np.argsort(counts - shown, kind="stable")[: round(float(shown.sum())) - int(counts.sum())]] += 1
    return tuple((int(u), int(t), int(count)) for (u, t), count in zip(bins, counts, strict=True) if count)
