"""Network file systems, on which the locks and the shared memory of SQLite do not work.

Write-ahead logging needs memory that all processes share, so it "does not work over a network filesystem"
(https://sqlite.org/wal.html); locks of network file systems are often broken (https://sqlite.org/faq.html#q5).
"""

from pathlib import Path

import psutil

_SHARED = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "ocfs2", "gfs2", "pvfs2"}
_SHARED_FUSE = ("sshfs", "glusterfs", "s3fs", "gcsfuse", "juicefs", "goofys", "rclone", "ceph", "lustre", "beegfs")


def shared_filesystem(path: Path) -> str | None:
    """Return the type of the network file system of the path, which need not exist yet; None for a local one."""
    existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists()).resolve()
    mounts = [mount for mount in psutil.disk_partitions(all=True) if existing.is_relative_to(mount.mountpoint)]
    # Of several at one place, such as an automount and what it mounted, the last one is seen.
    kind = max(reversed(mounts), key=lambda mount: len(mount.mountpoint)).fstype.lower() if mounts else ""
    is_shared = kind in _SHARED or (kind.startswith("fuse.") and kind.removeprefix("fuse.").startswith(_SHARED_FUSE))
    return kind if is_shared else None
