"""Files that commands write. A file is either complete or absent; inputs are never overwritten."""

import importlib
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from autotune.errors import PackError
from trials.whole_file import whole_file


def check_output_file(path: Path, suffixes: Iterable[str]) -> None:
    """Check, before any work is done, that `path` can be written; leave no file behind.

    Raise PackError for another suffix, and where no file can be made.
    """
    known = tuple(suffixes)
    if path.suffix not in known:
        raise PackError(f"{path}: a file of this kind cannot be written; give a name that ends in {' or '.join(known)}")
    try:
        if path.is_dir():
            raise PackError(f"{path} cannot be written (it is a folder); name a file in it")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _unwritable(path, error) from error


def check_library(user: str, module: str, package: str) -> None:
    """Raise PackError, with the command that installs the package, when its module cannot be imported."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise PackError(f"{user} needs {package}; pip install {package}") from error


def check_no_input(path: Path, inputs: Iterable[Path]) -> None:
    """Raise PackError when the file to write is also read."""
    if path.exists() and any(each.exists() and path.samefile(each) for each in inputs):
        raise PackError(f"{path} is an input of this command and is not overwritten; name another file")


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
