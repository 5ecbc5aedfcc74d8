"""Files that commands write. A file is either complete or absent, and replaces only an older one of its kind."""

import importlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import PackError
from trials.regular_file import open_regular
from trials.whole_file import whole_file

# A choice: what a kind of file begins or ends with is shorter, as is all before the mark of a report.
_MARKED_BYTES = 4 << 10


def check_output_file(path: Path, suffixes: Iterable[str], mark: bytes = b"") -> None:
    """Check, before any work is done, that `path` can be written; leave no file behind.

    `mark` is in the first or the last bytes of every file of this kind. Raise PackError for another suffix, where no
    file can be made, and where the file to replace has no such mark, as it may be the user's own; an empty one is fine.
    """
    known = tuple(suffixes)
    if path.suffix not in known:
        raise PackError(f"{path}: a file of this kind cannot be written; give a name that ends in {' or '.join(known)}")
    try:
        if path.is_dir():
            raise PackError(f"{path} cannot be written (it is a folder); name a file in it")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        is_foreign = path.exists() and not _has(path, mark)
    except OSError as error:
        raise _unwritable(path, error) from error
    if is_foreign:
        raise PackError(
            f"{path} exists and is not an earlier output of this kind, so it is not overwritten; remove it, or name "
            "another file"
        )


def _has(path: Path, mark: bytes) -> bool:
    """Return whether the mark is in the first or the last bytes of the file, or the file is empty."""
    with open_regular(path) as file:
        first = file.read(_MARKED_BYTES)
        file.seek(max(0, os.fstat(file.fileno()).st_size - _MARKED_BYTES))
        return not first or mark in first or mark in file.read()


def check_library(user: str, module: str, package: str) -> None:
    """Raise PackError, with the command that installs the package, when its module cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise PackError(f"{user} needs {package}; pip install {package}") from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Provide a file to write, which replaces `path` in the end. Raise PackError where it cannot."""
    try:
        with whole_file(path) as stream:
            yield Path(stream.name)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> PackError:
    return PackError(f"{path} cannot be written ({error.strerror or error}); name another file")
