"""Files that are written whole or not at all, also where several processes write the same one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Stream whose content replaces `path` at the end of the context, unless an error ends it.

    The content is on the disk by then, so a power cut leaves the old file or the new one.
    """
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem[:8]}-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        sync(Path(partial))
        Path(partial).replace(path)
        sync(path.parent)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def sync(*paths: Path) -> None:
    """Wait until the files, and the entries of the folders, are on the disk."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
