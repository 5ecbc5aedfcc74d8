"""The folders of this user for files of ranks, results that wait for the database, and caches."""

import hashlib
from pathlib import Path

from storage.database.url import default_url, identity, masked, parse, sqlite_path
from storage.user_folders import cache_folder, data_folder


def work_folder(database_url: str | None) -> Path:
    """Return the folder for files of ranks and waiting results; each database, which knows the trials, has one."""
    url = parse(default_url() if database_url is None else database_url)
    return data_folder() / "work" / hashlib.sha256(identity(url).encode()).hexdigest()[:12]


def spool_folder(folder: Path) -> Path:
    """Return the folder of waiting results in a database's work folder."""
    return folder / "spool"


def certificates_folder(folder: Path) -> Path:
    """Return the folder of the plans' certificates in a database's work folder."""
    return folder / "certificates"


def lengths_folder() -> Path:
    """Return the cache of measured lengths, for all jobs of this user."""
    return cache_folder() / "lengths"


def architectures_folder() -> Path:
    """Return the folder that records which architectures were found equal to transformers' own."""
    return cache_folder() / "architectures"


def database_name(database_url: str | None) -> str:
    """Return the URL of a database for messages, and whether its file is not there yet."""
    name = masked(parse(default_url() if database_url is None else database_url))
    return name if database_is_there(database_url) else f"{name}, which is not there yet"


def database_is_there(database_url: str | None) -> bool:
    """Return whether a database has its file; True for a server."""
    path = sqlite_path(parse(default_url() if database_url is None else database_url))
    return path is None or path.exists()
