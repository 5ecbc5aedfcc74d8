"""Database URLs: which ones work, which file they name, and how to show them without their secrets."""

import re
from pathlib import Path

import platformdirs
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from storage.errors import BadUrl

_DRIVERS = {"sqlite": "sqlite", "postgresql": "postgresql+psycopg", "postgresql+psycopg": "postgresql+psycopg"}
_EXAMPLES = "use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_SECRET_KEY = re.compile(r"pass|secret|token|key", re.IGNORECASE)
_STARS = "***"


def default_url() -> str:
    """The user's own database: `autotune.db` in the data directory of this platform (`XDG_DATA_HOME` on Linux)."""
    return f"sqlite:///{Path(platformdirs.user_data_dir('autotune'), 'autotune.db')}"


def parse(url: str) -> URL:
    """The URL with its driver and, for SQLite, an absolute path, so that a change of directory cannot move the file.

    Raises BadUrl for anything but a SQLite file or a PostgreSQL database.
    """
    if not url.strip():
        raise BadUrl(f"the database URL is empty; {_EXAMPLES}")
    scheme = url.partition(":")[0]
    parsed = _split(url)
    if parsed is None:  # the text may hold a password in any place, so none of it is shown
        raise BadUrl(f"cannot read the database URL that begins with {scheme[:20]!r}; {_EXAMPLES}")
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise BadUrl(f"no database driver {parsed.drivername!r}; {_EXAMPLES}")
    return _sqlite(parsed) if driver == "sqlite" else parsed.set(drivername=driver)


def masked(url: str | URL) -> str:
    """The URL as people may see it: the password, also one in the query string, is `***`."""
    parsed = _split(url) if isinstance(url, str) else url
    if parsed is None:  # a password may stand anywhere
        return _STARS
    hidden = {key: _STARS for key in parsed.query if _SECRET_KEY.search(key)}
    shown = parsed.update_query_dict(hidden).render_as_string(hide_password=True)
    return shown.replace("%2A%2A%2A", _STARS)


def secrets(url: URL) -> tuple[str, ...]:
    """The texts of the URL that no message may show."""
    values = [url.password, *(value for key, value in url.query.items() if _SECRET_KEY.search(key))]
    return tuple(value for value in values if isinstance(value, str) and value)


def sqlite_path(url: URL) -> Path | None:
    """The file of a parsed SQLite URL; None for PostgreSQL."""
    return Path(url.database or "") if url.drivername == "sqlite" else None


def _split(url: str) -> URL | None:
    try:
        return make_url(url)
    except (ArgumentError, ValueError):
        return None


def _sqlite(url: URL) -> URL:
    if url.host or url.query:
        raise BadUrl(f"{masked(url)} has a host or a query, which SQLite does not use; write sqlite:///FILE")
    if not url.database or url.database == ":memory:":
        raise BadUrl(f"{masked(url)} names no file, so nothing would be remembered; use sqlite:///FILE")
    return url.set(database=str(Path(url.database).expanduser().absolute()))
