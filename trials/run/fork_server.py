"""A process that imports torch, DeepSpeed and transformers once, and forks a rank whenever its agent asks for one.

The server listens on its standard input, a socket. Each message carries two descriptors: a socket that becomes the
standard input of a new rank, and a file for its output. From that socket the rank reads its environment, one line of
JSON, and then the channel of each request, one line each; it ends when the socket closes. On the same socket the server
reports the rank's `ProcessState`.

The server computes nothing: a forked process can use neither the threads nor the CUDA context of its parent.
"""

import argparse
import contextlib
import gc
import json
import os
import queue
import selectors
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from trials import wire
from trials.channels import Channel
from trials.channels.folder import FolderChannel
from trials.launchers.forked import ProcessState
from trials.launchers.node_messages import AGENT, FILES, TOKEN
from trials.machine.lifeline import end_with
from trials.run.worker import end_failed, import_serve, keep_streams

if TYPE_CHECKING:
    from trials.channels.store import SignedStore


_NOT_FOR_SERVER = (signal.SIGINT, signal.SIGTERM)
"""Signals that schedulers send to every process. The server outlives them, because its ranks end with it."""


def main() -> None:
    """Fork ranks until the agent has ended. In each rank, serve requests until there are no more, or one fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agent", type=int, required=True, help="process id of the agent, with which this ends")
    end_with(parser.parse_args().agent)
    keep_streams()
    started_with = frozenset(os.environ)
    serve = import_serve()
    if _fork_ranks(socket.socket(fileno=os.dup(0))):
        _serve_requests(serve, started_with)


def _fork_ranks(agent: socket.socket) -> bool:
    """Return True in each rank, and False in the server once the agent has ended."""
    ranks: dict[int, socket.socket] = {}
    ended, interrupt = socket.socketpair()
    for each in (ended, interrupt):
        each.setblocking(False)
    # Any handler will do: Python writes to the wake-up descriptor only for signals that have one.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in _NOT_FOR_SERVER:
        signal.signal(number, signal.SIG_IGN)
    signal.set_wakeup_fd(interrupt.fileno())
    with agent, ended, interrupt, selectors.PollSelector() as selector:
        selector.register(agent, selectors.EVENT_READ)
        selector.register(ended, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if ended in ready:
                ended.recv(1 << 16)
                _send_ends(ranks)
            if agent in ready:
                message, descriptors, *_ = socket.recv_fds(agent, 1, 2)
                if not message:
                    return False
                stdin, log = socket.socket(fileno=descriptors[0]), descriptors[1]
                server = os.getpid()
                pid = os.fork()
                os.setpgid(pid, pid)  # by both, so that there is a group to end before the agent knows of the rank
                if not pid:
                    break
                os.close(log)
                ranks[pid] = stdin
                _send(stdin, ProcessState(pid=pid))
    _become_rank(server, stdin, log)
    for other in ranks.values():  # else they would stay open when the server ends
        other.close()
    return True


def _send_ends(ranks: dict[int, socket.socket]) -> None:
    for pid in tuple(ranks):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with ranks.pop(pid) as stdin:
                _send(stdin, ProcessState(pid=pid, exit_code=os.waitstatus_to_exitcode(status)))


def _send(stdin: socket.socket, state: ProcessState) -> None:
    with contextlib.suppress(OSError):  # the agent has closed it
        stdin.sendall(wire.encode(state).encode() + b"\n")


# --- in a rank ---


def _become_rank(server: int, stdin: socket.socket, log: int) -> None:
    end_with(server)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_NOT_FOR_SERVER):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, standard in ((stdin.fileno(), 0), (log, 1), (log, 2)):
        os.dup2(descriptor, standard)
    stdin.close()
    os.close(log)


def _serve_requests(serve: Callable[[Channel], bool], of_the_server: frozenset[str]) -> None:
    """Read the environment, then serve requests. It replaces variables `of_the_server`, not those that imports set."""
    # Not `sys.stdin`, whose lock the thread below would hold: each process that the loader forks closes `sys.stdin`
    # first, and would wait for that lock for ever.
    stdin = os.fdopen(0, closefd=False)
    environment = json.loads(stdin.readline())
    for name in of_the_server - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    Path("/proc/self/comm").write_text(f"rank {os.environ['RANK']}")  # its name in `ps` and `top`
    gc.enable()
    for channel in map(open_channel, _lines(stdin)):
        if not serve(channel):
            end_failed()


def _lines(stdin: TextIO) -> Iterator[str]:
    """Return the agent's lines. A thread reads them, so a closed socket ends even a busy rank."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in stdin:
            lines.put(line.rstrip("\n"))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return iter(lines.get, None)


def open_channel(line: str) -> Channel:
    """Return the channel that the agent names in a line: a folder, or on a node a request in the agent's store."""
    return FolderChannel(Path(line)) if AGENT not in os.environ else _store_channel(line)


def _store_channel(name: str) -> Channel:
    from trials.channels.store import StoreChannel  # noqa: PLC0415  # torch is imported by then

    return StoreChannel(_store(), name, Path(os.environ[FILES]))


@cache
def _store() -> "SignedStore":
    """Return this process's connection to the store of its agent."""
    from trials.channels.store import join_store  # noqa: PLC0415

    return join_store(os.environ[AGENT], os.environ[TOKEN])


if __name__ == "__main__":
    main()
