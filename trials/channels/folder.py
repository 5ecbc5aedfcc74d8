"""Messages as files in a folder that the agent and the ranks share: the channel of one machine."""

from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from trials.whole_file import whole_file

FILE_SCHEME = "quoted-file"
"""torch's own `file://` takes a path as it is, and ends it at a `#` or `?`."""


class FolderChannel:
    """One file per message; its name is that of the message."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def rendezvous(self) -> str:
        return file_rendezvous(self.folder / "rendezvous")

    def put(self, name: str, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with whole_file(self.folder / name, durable=False) as stream:
            stream.write(text.encode())

    def get(self, name: str) -> str | None:
        try:
            return (self.folder / name).read_text()
        except FileNotFoundError:
            return None

    def written(self, names: Iterable[str]) -> list[str]:
        there = [name for name in names if (self.folder / name).exists()]
        return sorted(there, key=lambda name: (self.folder / name).stat().st_mtime_ns)

    def file(self, path: Path) -> Path:
        return path


def file_rendezvous(path: Path) -> str:
    """Return the `init_method` of ranks that meet in a file, whose name may hold any character."""
    return f"{FILE_SCHEME}://{quote(str(path.absolute()))}"
