"""Messages and exit codes for errors of the operating system, such as a missing folder or a full disk."""

import errno

_SPACE = "free some space and try again"
_WRITABLE = "make it writable, or name another place"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: f"raise the limit on the size of files (ulimit -f), or {_SPACE}",
    errno.EROFS: _WRITABLE,
    errno.EACCES: _WRITABLE,
    errno.EPERM: _WRITABLE,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ENOENT: "restore it, or name another place",
    errno.ENOTDIR: "a part of the path is a file; name another place",
    errno.EEXIST: "a file is in its place; move it away, or name another place",
    errno.EISDIR: "it is a folder; name a file",
    errno.ELOOP: "symbolic links form a loop; name another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and try again",
    errno.EIO: "check the disk, and try again",
}
_NAMED_WRONGLY = {errno.ENAMETOOLONG, errno.ELOOP}


def message(error: OSError) -> str:
    """Return what failed, where, and the remedy."""
    places = [str(place) for place in (error.filename, error.filename2) if place is not None]
    shown = [path if len(path) <= 200 else f"{path[:100]}...{path[-60:]}, {len(path)} characters" for path in places]
    where = f" ({' to '.join(shown)})" if shown else ""
    return f"{error.strerror}{where}; {_REMEDIES.get(error.errno or 0, 'check that it exists, and try again')}"


def exit_code(error: OSError) -> int:
    """Return 2 for an impossible name that the user gave, else 1."""
    return 2 if error.errno in _NAMED_WRONGLY else 1
