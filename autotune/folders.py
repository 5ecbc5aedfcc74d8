"""The folders in which this user's files are kept: of ranks, of results that wait, and of measured lengths."""

import hashlib
from pathlib import Path

from platformdirs import user_cache_path, user_data_path

from storage.database.url import default_url, masked, parse


def work_folder(database_url: str | None) -> Path:
    """What ranks read and write, and results that wait: only the database that knows their trials can take them."""
    url = parse(default_url() if database_url is None else database_url)
    return user_data_path("autotune") / "work" / hashlib.sha256(masked(url).encode()).hexdigest()[:12]


def spool_folder(folder: Path) -> Path:
    """Where results wait, in a database's work folder."""
    return folder / "spool"


def lengths_folder() -> Path:
    """Where measured lengths are kept for every job of this user."""
    return user_cache_path("autotune") / "lengths"


def architectures_folder() -> Path:
    """Where it is kept which architectures were compared with transformers and found equal."""
    return user_cache_path("autotune") / "architectures"
