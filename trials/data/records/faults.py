"""Faults of reading an image or a video: those of its file stay with it, and those of this machine pass."""

import errno

from trials.errors import DataError, PassingFault

# What is wrong with a name is mended by another name, and a file that appears has another size and time. Pillow seeks
# to where a damaged header says, which is an invalid argument.
_OF_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL})


def unreadable(message: str, error: Exception) -> DataError:
    """Return the error of a file that raised `error`: PassingFault for one of the operating system, such as EIO."""
    passes = isinstance(error, OSError) and error.errno is not None and error.errno not in _OF_FILE
    return PassingFault(message) if passes else DataError(message)
