"""Files that are written whole or not at all, also where several processes write the same one."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content takes the place of `path` at the end of the context, unless an error ends it."""
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f"{path.stem[:8]}-", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
