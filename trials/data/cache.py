"""A cache of measured lengths and of tokens, two files per chunk, named by a digest of all that they depend on."""

import json
import logging
import os
import zlib
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from trials import data, wire
from trials.data import formats
from trials.data.formats import AnnotationFile, Chunk
from trials.data.kept.files import TokenFile, has_room
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
    _may_keep_tokens: bool = field(default=True, init=False)
    _code: str = field(init=False)

    def __post_init__(self) -> None:
        # A later version may refuse what this one takes, and another PyAV decode what this one cannot.
        self._code = code_digest(data)
        with suppress(PackageNotFoundError):
            self._code += version("av")

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
        """Return the chunk, without its images, if none of these has changed; None if it has to be measured.

        A chunk whose tokens are not there is measured again where there is room for them.
        """
        if self.folder is None:
            return None
        try:
            found = _decoded((self.folder / f"{key}.npz").read_bytes(), self.folder)
        except FileNotFoundError:
            return None
        except _DAMAGE as error:
            logger.info("cached lengths %s cannot be read (%s); they are measured again", key, error)
            return None
        file = found.token_file
        if not found.holds():
            if file is not None:  # no other chunk names it
                file.path.unlink(missing_ok=True)
            return None
        lacks_tokens = file is not None and not file.is_there()
        if file is not None and lacks_tokens and has_room(self.folder, file.size):
            return None
        return replace(found, images=())

    def keep(self, key: str, lengths: ChunkLengths) -> ChunkLengths:
        """Write two files atomically, readable by this user only; return the lengths with their file of tokens.

        Warn once of a folder that cannot be written, and of a disk without room for tokens. A chunk with a bad record
        that may be read another time is not written.
        """
        if self.folder is None or lengths.has_passing_fault:
            return replace(lengths, tokens=b"")
        if lengths.tokens:
            name = f"{key}-{sha256(lengths.tokens).hexdigest()[:16]}.tokens"
            file = TokenFile(path=self.folder / name, size=len(lengths.tokens))
            kept = self._keep_tokens(file, lengths.tokens)
            lengths = replace(lengths, tokens=b"", token_file=file if kept else None)
        if self._may_write:
            self._keep_lengths(self.folder, key, lengths)
        return lengths

    def _keep_tokens(self, file: TokenFile, tokens: bytes) -> bool:
        """Write the file where there is room; return whether it is there, or may be made again once there is room."""
        if not has_room(file.path.parent, file.size):
            self._warn_of_tokens("the disk would have too little space left", "free some space")
            return True
        try:
            file.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Not durable: what a power cut leaves is seen by its size and its digests.
            with whole_file(file.path, mode=0o600, durable=False) as stream:
                stream.write(tokens)
        except OSError as error:
            # Without a file that can be written, lengths that name one would be measured again by each command.
            self._warn_of_tokens(str(error.strerror), "free some space and delete the folder")
            return False
        return True

    def _warn_of_tokens(self, why: str, remedy: str) -> None:
        if self._may_keep_tokens:
            logger.warning(
                "tokens cannot be kept in %s (%s), so each step makes them again; %s, or set XDG_CACHE_HOME to another "
                "one",
                self.folder,
                why,
                remedy,
            )
        self._may_keep_tokens = False

    def _keep_lengths(self, folder: Path, key: str, lengths: ChunkLengths) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with whole_file(folder / f"{key}.npz", mode=0o600) as stream:
                stream.write(_encoded(lengths))
        except OSError as error:
            # Warned once, not for each of thousands of chunks.
            self._may_write = False
            logger.warning(
                "lengths cannot be kept in %s (%s), so the next run measures them again; make it writable, or set "
                "XDG_CACHE_HOME to another folder",
                folder,
                error.strerror,
            )


def _encoded(lengths: ChunkLengths) -> bytes:
    facts = {
        "records": lengths.records,
        "wrong_sizes": lengths.wrong_sizes,
        "bad": lengths.bad,
        "unused": lengths.unused,
        "tokens": lengths.token_file and [lengths.token_file.path.name, lengths.token_file.size],
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


def _decoded(content: bytes, folder: Path) -> ChunkLengths:
    with np.load(BytesIO(content), allow_pickle=False) as stored:
        facts = json.loads(stored["facts"].tobytes())
        paths = os.fsdecode(stored["images"].tobytes()).split("\0")
        image_facts = [(int(size), int(time)) for size, time in stored["image_facts"]]
        columns = stored["columns"]
    name, size = facts["tokens"] or ("", 0)
    return ChunkLengths(
        columns=dict(zip(COLUMNS, columns, strict=True)),
        records=facts["records"],
        bad=tuple(((offset, line), reason, shows) for (offset, line), reason, shows in facts["bad"]),
        wrong_sizes=facts["wrong_sizes"],
        images=tuple(zip(paths, image_facts, strict=True)) if image_facts else (),
        unused={what: (count, (offset, line)) for what, (count, (offset, line)) in facts["unused"].items()},
        token_file=TokenFile(path=folder / name, size=int(size)) if name else None,
    )


def _bytes(text: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(os.fsencode(text), dtype=np.uint8)
