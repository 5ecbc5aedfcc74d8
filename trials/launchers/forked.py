"""A rank process on this machine, forked from a server that has imported torch, DeepSpeed and transformers.

A fork server lives as long as this process, so that later groups of ranks, of any pool, start without imports.
"""

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trials import wire

_READ_BY_IMPORTS = ("DS_ACCELERATOR", "OMP_NUM_THREADS")
"""Variables that libraries read while they are imported: ranks with other values need another server."""
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
# More than the two short lines that the server writes for a rank.
_CHUNK_BYTES = 1 << 16
_starter = ThreadPoolExecutor(1, thread_name_prefix="ranks")
"""The thread that starts the servers. The system ends a server with that thread, so it lives as long as the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessState:
    """The server's report of a rank, sent when the rank is forked and again when it has ended."""

    pid: int
    exit_code: int | None = None
    """Exit code, minus the signal for a process that was killed; None while it runs."""


class ForkedRank:
    """One rank process. Its standard input is a socket, on which the server reports its state: see `fork_server`."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Fork the rank with `environment` in place of the server's; its output is appended to `log`."""
        self._state: ProcessState | None = None
        self._unread = b""
        # DeepSpeed sets it too. Otherwise counting devices would initialize CUDA, which no forked process can use.
        environment = {**environment, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._server = _starter.submit(_server_for, environment, log.with_name("imports.log")).result()
        self._socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output, suppress(ConnectionError):  # the server has ended: `_hear` finds out
            socket.send_fds(self._server.socket, [b"\0"], [theirs.fileno(), output.fileno()])
        with suppress(ConnectionError):
            self.send(json.dumps(environment))

    def send(self, line: str) -> None:
        """Send one line to the rank. Raise ConnectionError when it has ended."""
        self._socket.sendall(line.encode() + b"\n")

    @property
    def pid(self) -> int | None:
        """Process id; None until it is forked."""
        self._hear()
        return self._state.pid if self._state else None

    @property
    def exit_code(self) -> int | None:
        """Exit code, minus the signal when it was killed; None while it runs."""
        self._hear()
        return self._state.exit_code if self._state else None

    def close(self) -> None:
        """Close the connection, on which the rank ends itself with all its children."""
        self._socket.close()

    def _hear(self) -> None:
        while self._state is None or self._state.exit_code is None:
            try:
                news = self._socket.recv(_CHUNK_BYTES, socket.MSG_DONTWAIT)
            except (BlockingIOError, ConnectionResetError):  # reset: the rank ended with lines unread
                return
            if not news:  # the server has ended, and its ranks with it
                self._state = ProcessState(pid=self._state.pid if self._state else 0, exit_code=self._server.wait())
                return
            *lines, self._unread = (self._unread + news).split(b"\n")
            for line in lines:
                self._state = wire.decode(ProcessState, line)


class _Server:
    """A process that forks ranks: `python -m trials.run.fork_server`."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs, log.open("ab") as output:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                # -P: a folder `storage` or `trials` in the current directory must not shadow the package.
                [sys.executable, "-P", "-m", "trials.run.fork_server", "--agent", str(os.getpid())],
                env={name: value for name, value in environment.items() if name not in _OF_A_RANK},
                stdin=theirs.fileno(),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def wait(self) -> int:
        """Return the exit code of a server that is ending."""
        return self._process.wait()

    def end(self) -> None:
        self.socket.close()
        self._process.kill()
        self._process.wait()


_servers: dict[tuple[str | None, ...], _Server] = {}


def _server_for(environment: Mapping[str, str], log: Path) -> _Server:
    """Return the server for this environment; a new one writes its output to `log`."""
    key = tuple(environment.get(name) for name in _READ_BY_IMPORTS)
    if key in _servers and not _servers[key].runs:
        _servers.pop(key).end()
    if key not in _servers:
        _servers[key] = _Server(environment, log)
    return _servers[key]


@atexit.register
def _end_servers() -> None:
    for server in _servers.values():
        server.end()
