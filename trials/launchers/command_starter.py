"""Starts the program of a node by one command on each: here, over ssh, or by the user, to whom it is shown."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from trials.channels.store import join
from trials.errors import NodesMissing
from trials.launchers.commands import Command, shared_environment
from trials.launchers.network import free_port
from trials.launchers.node_messages import TOKEN
from trials.whole_file import whole_file

_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
# A choice: tools write the cause in the last lines, and the message stays readable.
_LAST_LINES = 3
_END_SECONDS = 5.0
"""A tool may wait much longer for the ends of its other processes, which may be lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where a command runs."""

    node: int
    ranks: tuple[int, ...]
    """Processes that the tool may start, on each of the nodes."""
    rendezvous: str
    """`HOST:PORT` where the tool's own processes meet."""
    address: str | None
    """At which others reach the node; None where the user starts the command on a node of their choice."""
    is_served: bool = False
    """Whether a store is there already."""


class Reach(Protocol):
    """A way to run a command on another node."""

    @property
    def passes_environment(self) -> bool:
        """Whether the command gets this process's environment; else the first line of its input is the token."""

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        """Return the command that runs `command` on a host, until its own input ends."""


class OverSsh:
    """ssh, without a password."""

    passes_environment = False

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        # The remote shell reads the token from its input, because command lines are seen by everyone. The end of the
        # input, with the connection or the agent, ends the command.
        line = (
            f"IFS= read -r {TOKEN}; export {TOKEN}; exec 3<&0; {shlex.join(command)} 3<&- & p=$!; "
            "{ cat <&3; kill $p; } >/dev/null 2>&1 & wait $p"
        )
        return (*_SSH, host, line)


class Tool(Protocol):
    """A tool that starts processes on one node."""

    @property
    def uses_store(self) -> bool:
        """Whether its processes can meet at the agent's store; else they need a port of their own."""

    def command(self, spot: Spot, program: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
        """Return the command that starts a program with its arguments, or a module of Python."""


class CommandStarter:
    """Starter of `autotune node` by a tool; see `Starter`."""

    def __init__(
        self,
        tool: Tool,
        ranks: Sequence[int],
        address: str,
        folder: Path,
        *,
        hosts: Sequence[str] | None,
        reach: Reach,
        show: Callable[[str], None],
    ) -> None:
        """Use nodes with these numbers of `ranks`; this node is the first and has the `address`.

        Commands `reach` the other `hosts`; without these, `show` gives the commands to the user. Output and token are
        written to a folder in `folder` that no other process uses at the time.
        """
        self._tool, self._ranks, self._address, self._folder = tool, tuple(ranks), address, folder
        self._hosts, self._reach, self._show = hosts, reach, show
        self._agent, self._token, self._rendezvous = "", "", ""
        self._lock: FileLock | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._rendezvous = agent if self._tool.uses_store else self._free()
        self._folder = self._free_folder()
        with whole_file(self._token_file, 0o600) as stream:
            stream.write(token.encode())
        for node in range(len(self._ranks)):
            self._start(node)

    def revive(self, node: int) -> None:
        if process := self._processes.pop(node, None):
            _end(process)
        self._start(node)

    def check(self, wanted: int) -> None:
        for node, process in self._processes.items():
            if node < wanted and process.poll() is not None:
                where = self._hosts[node] if self._hosts else "this node"
                raise NodesMissing(
                    f"node {node} ({where}) has ended with exit code {process.returncode} before it took part: "
                    f"{_last_lines(self._log(node))}; its output is in {self._log(node)}"
                )

    def end(self) -> None:
        for process in self._processes.values():
            _end(process)
        self._token_file.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.release()

    def commands(self, places: Sequence[range], accelerator: str, request: Path, *, groups: int) -> tuple[Command, ...]:
        rendezvous, ranks = self._free(), tuple(map(len, places))
        worker = ("trials.run.worker", "--request", str(request))
        found = []
        for node, of_node in enumerate(places):
            spot = Spot(node=node, ranks=ranks, rendezvous=rendezvous, address=self._address_of(node))
            argv = self._tool.command(spot, worker, is_module=True)
            if node and self._hosts and self._reach.passes_environment:  # ssh would not pass these variables
                argv = self._reach.command(self._hosts[node], argv)
            found.append(Command(argv=argv, environment=shared_environment(accelerator, len(of_node) * groups)))
        return tuple(found)

    def _start(self, node: int) -> None:
        program: tuple[str, ...] = (
            str(Path(sys.executable).with_name("autotune")),
            "node",
            self._agent,
            f"--number={node}",
        )
        is_shown = node > 0 and self._hosts is None
        if is_shown:
            program += ("--token-file", str(self._token_file))
        spot = Spot(
            node=node,
            ranks=self._ranks,
            rendezvous=self._rendezvous,
            address=self._address_of(node),
            is_served=self._tool.uses_store,
        )
        command = self._tool.command(spot, program, is_module=False)
        if is_shown:
            self._show(f"Start this on node {node}, in a copy of this environment:\n{shlex.join(command)}")
            return
        environment = {**os.environ, TOKEN: self._token}
        if is_read := node > 0 and not self._reach.passes_environment:
            environment = dict(os.environ)
        if node and self._hosts:
            command = self._reach.command(self._hosts[node], command)
        with self._log(node).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[node] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended at once: `check` finds out
            process.stdin.write(f"{self._token}\n".encode() if is_read else b"")
            process.stdin.flush()

    def _free_folder(self) -> Path:
        """Lock and return a folder of this command's own: others of the same database may work on other devices."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            self._lock = FileLock(self._folder / f"{number}.lock", timeout=0)
            with suppress(Timeout):
                self._lock.acquire()
                break
        own = self._folder / f"{number}"
        own.mkdir(exist_ok=True)
        return own

    def _free(self) -> str:
        return join(self._address, free_port(self._address))

    def _address_of(self, node: int) -> str | None:
        if node == 0:
            return self._address
        return self._hosts[node].rpartition("@")[2] if self._hosts else None

    def _log(self, node: int) -> Path:
        return self._folder / f"node-{node}.log"

    @property
    def _token_file(self) -> Path:
        return self._folder / "token"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process that has been asked to end, then end it."""
    assert process.stdin is not None
    # From the gentlest on: the end of its input ends `autotune node`, behind ssh as well.
    ends: tuple[Callable[[], object], ...] = (process.poll, process.stdin.close, process.terminate, process.kill)
    for end in ends:
        with suppress(BrokenPipeError):
            end()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
            break
    with suppress(BrokenPipeError):  # what it did not read any more, such as its token
        process.stdin.close()


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:]) or "it said nothing"
