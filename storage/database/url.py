"""Database URLs: parsing, the file that they name, and masking of secrets."""

import re
from itertools import chain
from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from storage.errors import BadUrl
from storage.user_folders import data_folder

_POSTGRESQL = "postgresql+psycopg"
_DRIVERS = {"sqlite": "sqlite", **dict.fromkeys(("postgresql", "postgres", _POSTGRESQL), _POSTGRESQL)}
_EXAMPLES = "use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
_SECRET_KEY = re.compile(r"pass|secret|token|key", re.IGNORECASE)
_SCHEME = re.compile(r"\w[\w+]*://")
_STARS = "***"


def default_url() -> str:
    """Return the URL of the user's own `autotune.db`, in the platform's data directory (`XDG_DATA_HOME` on Linux).

    Raise NoHome.
    """
    return of_file(data_folder() / "autotune.db")


def of_file(path: Path) -> str:
    """Return the URL of a SQLite file, with special characters escaped."""
    return URL.create("sqlite", database=str(path)).render_as_string()


def parse(url: str) -> URL:
    """Return the URL with its driver and, for SQLite, an absolute path, which a change of directory does not affect.

    Raise BadUrl for anything but a SQLite file or a PostgreSQL database.
    """
    if not isinstance(url, str):
        raise BadUrl(f"a database is named by the text of its URL, not by a {type(url).__name__}; {_EXAMPLES}")
    if not url.strip():
        raise BadUrl(f"the database URL is empty; {_EXAMPLES}")
    parsed = _split(url)
    if parsed is None:  # the text may hold a password in any place, so none of it is shown
        scheme = _SCHEME.match(url)
        which = f" that begins with {scheme[0]}" if scheme else ""
        hint = "write an @ in a password as %40, and " if url.count("@") > 1 else ""
        raise BadUrl(f"cannot read the database URL{which}; {hint}{_EXAMPLES}")
    driver = _DRIVERS.get(parsed.drivername)
    if driver is None:
        raise BadUrl(f"no database driver {parsed.drivername!r}; {_EXAMPLES}")
    if driver != "sqlite":
        return parsed.set(drivername=driver)
    if parsed.host or "?" in url:  # SQLAlchemy drops a query without values
        raise BadUrl(
            f"{masked(url)} has a host or a query, which SQLite does not use; write sqlite:///FILE, and a ? as %3F"
        )
    return _sqlite(parsed)


def masked(url: str | URL) -> str:
    """Return the URL for messages: passwords, also in the query string, are `***`."""
    parsed = _split(url) if isinstance(url, str) else url
    if parsed is None:  # a password may stand anywhere
        return _STARS
    hidden = {key: _STARS for key in parsed.query if _SECRET_KEY.search(key)}
    shown = parsed.update_query_dict(hidden).render_as_string(hide_password=True)
    return shown.replace("%2A%2A%2A", _STARS)  # SQLAlchemy escapes the values of the query string


def identity(url: URL) -> str:
    """Return the parsed URL as text without what may change for one database: passwords, TLS and the host's case."""
    query = {key: value for key, value in url.query.items() if not _SECRET_KEY.search(key) and key[:3] != "ssl"}
    host = url.host and url.host.lower()
    same = URL.create(url.drivername, url.username, host=host, port=url.port, database=url.database, query=query)
    return same.render_as_string()


def secrets(url: URL) -> tuple[str, ...]:
    """Return the parts of the URL that no message may show."""
    of_query = (url.normalized_query[key] for key in url.query if _SECRET_KEY.search(key))
    return tuple(filter(None, (url.password, *chain.from_iterable(of_query))))


def sqlite_path(url: URL) -> Path | None:
    """Return the file of a parsed SQLite URL, or None for PostgreSQL."""
    return Path(url.database or "") if url.drivername == "sqlite" else None


def _split(url: str) -> URL | None:
    """Parse the URL; None for an invalid one, or one with an ambiguous end of the password."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        return None
    return None if parsed.drivername != "sqlite" and url.count("@") > 1 else parsed


def _sqlite(url: URL) -> URL:
    if not url.database or url.database == ":memory:":
        raise BadUrl(f"{masked(url)} names no file, so nothing would be remembered; use sqlite:///FILE")
    try:
        path = Path(url.database).expanduser().resolve()  # SQLite keeps its log next to the file that a link leads to
    except (OSError, RuntimeError, ValueError) as error:
        raise BadUrl(f"{masked(url)} cannot be followed ({error}); name another file") from error
    return url.set(database=str(path))
