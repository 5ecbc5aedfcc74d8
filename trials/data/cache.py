"""A cache of measured lengths, one file per chunk, named by a digest of all that they depend on."""

import json
import logging
import os
import zlib
from dataclasses import dataclass, field, replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from trials import data, wire
from trials.data import formats
from trials.data.formats import AnnotationFile, Chunk
from trials.data.lengths import COLUMNS, ChunkLengths
from trials.data.records.sample import Measurer
from trials.data.source_code import code_digest
from trials.whole_file import whole_file

_DAMAGE = (OSError, EOFError, ValueError, TypeError, KeyError, BadZipFile, zlib.error, MemoryError, NotImplementedError)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LengthsCache:
    """A folder of the user, which may be deleted at any time; None caches nothing. Its files raise no errors."""

    folder: Path | None
    _may_write: bool = field(default=True, init=False)
    _code: str = field(init=False)

    def __post_init__(self) -> None:
        # A later version may refuse what this one takes.
        self._code = code_digest(data)

    def key(self, file: AnnotationFile, chunk: Chunk, measurer: Measurer | None, max_tokens: int | None) -> str:
        """Return a digest of the chunk's content, how and by which code it is read, and the model.

        Raise DataError if it cannot be read.
        """
        if self.folder is None:
            return ""
        # Where a file lies and how often it is shown changes no length.
        reading = wire.encode(replace(file, path=Path(), repeat=1.0, sampling="all"))
        facts = [self._code, formats.digest(file, chunk), reading, measurer and measurer.digest, max_tokens]
        return sha256(json.dumps(facts).encode()).hexdigest()

    def find(self, key: str) -> ChunkLengths | None:
        """Return the chunk, without its images, if none of these has changed; None if it has to be measured."""
        if self.folder is None:
            return None
        try:
            found = _decoded((self.folder / f"{key}.npz").read_bytes())
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            logger.info("cached lengths %s cannot be read (%s); they are measured again", key, error)
            return None
        return replace(found, images=()) if found.holds() else None

    def keep(self, key: str, lengths: ChunkLengths) -> None:
        """Write one file atomically, readable by this user only. Warn once of a folder that cannot be written."""
        if self.folder is None or not self._may_write:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with whole_file(self.folder / f"{key}.npz", mode=0o600) as stream:
                stream.write(_encoded(lengths))
        except OSError as error:
            # Warned once, not for each of thousands of chunks.
            self._may_write = False
            logger.warning(
                "lengths cannot be kept in %s (%s), so the next run measures them again; make it writable, or set "
                "XDG_CACHE_HOME to another folder",
                self.folder,
                error.strerror,
            )


def _encoded(lengths: ChunkLengths) -> bytes:
    facts = {
        "records": lengths.records,
        "wrong_sizes": lengths.wrong_sizes,
        "bad": lengths.bad,
        "unused": lengths.unused,
    }
    paths = "\0".join(path for path, _ in lengths.images)
    stream = BytesIO()
    arrays: dict[str, Any] = {
        "facts": _bytes(json.dumps(facts)),
        "images": _bytes(paths),
        "image_facts": np.array([fact for _, fact in lengths.images], dtype=np.int64).reshape(-1, 2),
        "columns": np.stack([lengths.columns[name] for name in COLUMNS]),
    }
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def _decoded(content: bytes) -> ChunkLengths:
    with np.load(BytesIO(content), allow_pickle=False) as stored:
        facts = json.loads(stored["facts"].tobytes())
        paths = os.fsdecode(stored["images"].tobytes()).split("\0")
        image_facts = [(int(size), int(time)) for size, time in stored["image_facts"]]
        columns = stored["columns"]
    return ChunkLengths(
        columns=dict(zip(COLUMNS, columns, strict=True)),
        records=facts["records"],
        bad=tuple(((offset, line), reason) for (offset, line), reason in facts["bad"]),
        wrong_sizes=facts["wrong_sizes"],
        images=tuple(zip(paths, image_facts, strict=True)) if image_facts else (),
        unused={what: (count, (offset, line)) for what, (count, (offset, line)) in facts["unused"].items()},
    )


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(os.fsencode(text), dtype=np.uint8)
