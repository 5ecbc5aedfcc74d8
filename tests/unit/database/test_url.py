"""Database URLs: which are accepted, and what messages show of them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.folders import lengths_folder, work_folder
from autotune.machine.devices import lock_file
from storage.database.url import default_url, masked, parse, secrets, sqlite_path
from storage.errors import BadUrl, NoHome

CANARY = "c4nary"


def test_the_default_is_a_file_in_the_users_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert sqlite_path(parse(default_url())) == tmp_path / "autotune" / "autotune.db"


@pytest.mark.parametrize("find", [default_url, lambda: work_folder(None), lengths_folder, lock_file])
def test_without_a_home_the_remedy_is_named(find: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # a container may give its user a number without a name
    with pytest.raises(NoHome, match="set HOME, or XDG_DATA_HOME, XDG_CACHE_HOME and XDG_STATE_HOME"):
        find()


def test_a_relative_sqlite_file_stays_the_same_file_after_a_change_of_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sqlite_path(parse("sqlite:///results.db")) == tmp_path / "results.db"


def test_the_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert sqlite_path(parse("sqlite:///~/results.db")) == tmp_path / "results.db"


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_postgresql_uses_psycopg(scheme: str) -> None:
    url = parse(f"{scheme}://me:{CANARY}@db.example:5433/results?sslmode=require")
    assert url.drivername == "postgresql+psycopg"
    assert (url.password, url.port, url.query) == (CANARY, 5433, {"sslmode": "require"})
    assert sqlite_path(url) is None


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("results.db", "cannot read the database URL; use sqlite:///FILE"),
        ("postgresql://me:a@b@host/results", "write an @ in a password as %40, and use sqlite:///FILE"),
        ("", "the database URL is empty"),
        ("mysql://me@host/results", "no database driver 'mysql'"),
        ("postgresql+asyncpg://me@host/results", "no database driver"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("sqlite:///file:results.db?uri=true", "has a host or a query"),
        ("sqlite://results.db", "has a host"),
        ("sqlite:///results.db?mode=ro", "has a host or a query"),
        ("sqlite:///what?.db", "has a host or a query"),
    ],
)
def test_any_other_url_is_refused_with_the_ones_that_work(url: str, message: str) -> None:
    with pytest.raises(BadUrl, match=message) as refused:
        parse(url)
    assert "sqlite:///FILE" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (f"postgresql://me:{CANARY}@host/results", "postgresql://me:***@host/results"),
        (f"postgresql://host/results?password={CANARY}&sslmode=require", None),
        (f"postgresql://host/results?SSLPassword={CANARY}", None),
        (f"postgresql://host/results?oauth_client_secret={CANARY}&password=a&password={CANARY}", None),
        (f"postgresql://me:{CANARY}@host:port/results", "***"),
        (f"postgresql://me:half@{CANARY}@host/results", "***"),
        (f"mysql://me:{CANARY}@host/results", "mysql://me:***@host/results"),
        (CANARY, "***"),
        ("sqlite:////data/results.db", "sqlite:////data/results.db"),
    ],
)
def test_no_password_is_shown(url: str, shown: str | None) -> None:
    assert CANARY not in masked(url)
    assert shown in {None, masked(url)}


def test_every_value_of_a_repeated_secret_is_known() -> None:
    assert secrets(parse(f"postgresql://me:a@host/results?password={CANARY}&password=b")) == ("a", CANARY, "b")


def test_what_is_no_secret_stays_readable() -> None:
    url = "postgresql://me@host/results?password=x&sslmode=require"
    assert masked(url) == "postgresql://me@host/results?password=***&sslmode=require"


def test_a_database_keeps_its_work_folder_when_its_password_or_tls_changes() -> None:
    spellings = ("me@host/d", "me:pw@host/d", "me@HOST/d", "me@host/d?sslmode=require", "me@host/d?password=pw")
    assert len({work_folder(f"postgresql://{each}") for each in spellings}) == 1
    others = (
        "me@host/d",
        "you@host/d",
        "me@host2/d",
        "me@host:5433/d",
        "me@host/e",
        "me@host/d?options=-csearch_path=x",
    )
    assert len({work_folder(f"postgresql://{each}") for each in others}) == len(others)


@pytest.mark.parametrize(
    "url", [f"postgresql://me:{CANARY}@host:port/results", f"mysql://me:{CANARY}@host/results", f"{CANARY}/results"]
)
def test_a_refused_url_shows_no_password(url: str) -> None:
    with pytest.raises(BadUrl) as refused:
        parse(url)
    assert CANARY not in str(refused.value)
    assert refused.value.__suppress_context__ or refused.value.__context__ is None
