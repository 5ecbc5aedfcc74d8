"""Files that commands write: whole or not at all, in place of what stood there."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from autotune.errors import PackError


def check_output_file(path: Path, suffixes: Iterable[str]) -> None:
    """Raises PackError, before any work is done, for another suffix or where no file can be made; leaves none."""
    known = tuple(suffixes)
    if path.suffix not in known:
        raise PackError(f"{path}: a file of this kind cannot be written; give a name that ends on {' or '.join(known)}")
    try:
        if path.is_dir():
            raise PackError(f"{path} cannot be written (it is a folder); name a file in it")
        _partial(path).open("wb").close()
        _partial(path).unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place in the end. Raises PackError where it cannot be."""
    try:
        yield _partial(path)
        _partial(path).replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):
            _partial(path).unlink()


def _partial(path: Path) -> Path:
    """Keeps the suffix, by which libraries know what to write."""
    return path.with_name(f".{path.stem}.partial{path.suffix}")


def _unwritable(path: Path, error: OSError) -> PackError:
    return PackError(f"{path} cannot be written ({error.strerror or error}); name another file")
