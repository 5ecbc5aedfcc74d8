"""Processes that tests start and inspect, on machines that may be busy."""

import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

WAIT_SECONDS = 120.0
"""Seconds after which a test gives up."""


def wait_for(happened: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.05)


def wait_for_file(folder: Path, pattern: str) -> None:
    wait_for(lambda: any(folder.glob(pattern)))


def has_ended(process: psutil.Process) -> bool:
    """Return whether it has ended; a zombie has, too."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def children(pid: int | None = None) -> list[psutil.Process]:
    """Return the running descendants of a process, by default of this one."""
    return [child for child in psutil.Process(pid).children(recursive=True) if not has_ended(child)]


def ranks(pid: int | None = None) -> list[psutil.Process]:
    """Return the ranks that a process, by default this one, has started, in order, without their children.

    Of ranks with the same number, those of an earlier pool come first.
    """
    named = [child for child in children(pid) if child.name().startswith("rank ")]
    own = (each for each in named if each.parent() not in named)
    return sorted(own, key=lambda each: (each.name(), each.create_time()))


def free_port() -> int:
    """A port of the loopback on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def have_ended(started: Iterable["subprocess.Popen[Any]"], addresses: set[str]) -> bool:
    """Whether all processes have ended; adds the addresses at which they listen or are connected by TCP."""
    for process in started:
        with suppress(psutil.NoSuchProcess):
            # Without UDP: torch's store looks up its address's name, and asks a name server from the outer interface.
            used = psutil.Process(process.pid).net_connections("tcp")
            addresses.update(each.laddr.ip.removeprefix("::ffff:") for each in used)
    return all(process.poll() is not None for process in started)


def wait_for_the_end(processes: list[psutil.Process]) -> None:
    wait_for(lambda: all(map(has_ended, processes)))
