"""Atomic writes of files, even where several processes write the same one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4


@contextmanager
def whole_file(path: Path, mode: int = 0o666, *, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a stream whose content replaces `path` at the end of the context, unless an error ends it.

    With `durable` the content is on the disk by then, so that a power cut leaves the old file or the new one; messages
    between processes do not need it. A new file gets `mode`, less the umask; an existing one keeps its own.
    """
    partial = path.with_name(f".{path.stem[:32]}-{uuid4().hex[:8]}.partial")
    try:
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as stream:
            yield stream
        if path.exists():
            shutil.copymode(path, partial)
        if durable:
            sync(partial)
        partial.replace(path)
        if durable:
            sync(path.parent)
    except OSError as error:
        # The error of a write names no file, and the user has not asked for the temporary one.
        if error.filename is None or str(error.filename) == str(partial):
            error.filename = str(path)
            del error.filename2  # None would be shown
        partial.unlink(missing_ok=True)
        raise
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def sync(*paths: Path) -> None:
    """Wait until the files, and the entries of the folders, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
