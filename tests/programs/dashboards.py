"""Optuna's dashboard, started like a user would, and its HTTP API."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.programs.browser import CHROMIUM

START_SECONDS = 60.0
RENDER_MILLISECONDS = 20_000


@contextmanager
def dashboard(url: str, *options: str) -> Iterator[str]:
    """Start the dashboard on the database, and provide its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("optuna-dashboard")
    with subprocess.Popen(
        [program, url, "--host", "127.0.0.1", "--port", str(port), *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as server:
        try:
            _wait(port, server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def _wait(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    server.terminate()
    raise AssertionError(server.communicate()[0])


def ask(address: str) -> Any:
    with urlopen(address, timeout=30) as answer:
        return json.load(answer)


def attributes(shown: dict[str, Any]) -> dict[str, str]:
    """Return the user attributes of a study or trial, as the API gives them."""
    return {each["key"]: each["value"] for each in shown["user_attrs"]}


def rendered(address: str, folder: Path) -> str:
    """Return the document that the browser shows."""
    assert CHROMIUM
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
    command += [f"--user-data-dir={folder}", f"--virtual-time-budget={RENDER_MILLISECONDS}", "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
