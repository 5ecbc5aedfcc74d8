"""The folder in which a node keeps the logs of its ranks and the files of its agent while it works."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX, _LOCK = "autotune-node-", "in-use.lock"


@contextmanager
def node_folder() -> Iterator[Path]:
    """Provide a new folder, which is removed at the end; first remove those of this user's nodes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, Timeout):
            _remove_unused(folder)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, FileLock(Path(name) / _LOCK):
        yield Path(name)


def _remove_unused(folder: Path) -> None:
    """Remove the folder of a node that has ended. Raise Timeout where the node still works."""
    # Other users may write to the folder for temporary files, and a link of theirs could lead the lock elsewhere.
    is_own = folder.lstat().st_uid == os.getuid()
    # A node that has just made its folder has not locked it yet.
    if is_own and (folder / _LOCK).is_file():
        # The system releases the lock of a process that is killed.
        with FileLock(folder / _LOCK, timeout=0):
            shutil.rmtree(folder)
