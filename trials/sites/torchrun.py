"""Nodes on which torchrun runs: started over ssh where the job names its hosts, else by the user, command by command.

torchrun starts one process on each node, `autotune node`, which forks the ranks and renews them after a failure. A new
torchrun for each of them would import torch again.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from trials.channels.store import join, split
from trials.errors import NodesMissing, SiteError
from trials.job import HardwareSection
from trials.launchers.commands import Command, shared_environment
from trials.launchers.network import address_towards, own_address
from trials.launchers.node_messages import TOKEN
from trials.launchers.node_ranks import NodeSite
from trials.launchers.nodes import Nodes
from trials.sites import Place, Site
from trials.whole_file import whole_file

_ANYWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737), to which only the default route leads."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_LAST_LINES = 3
_END_SECONDS = 5.0
"""torchrun waits up to 300 s for the ends of the others, which may be lost."""


def nodes(settings: HardwareSection, _: Mapping[str, str]) -> int:
    if settings.hosts is None and settings.nodes is None:
        raise SiteError("hardware.launcher: torchrun needs hardware.nodes or hardware.hosts; add one of them")
    return len(settings.hosts) if settings.hosts else settings.nodes or 1


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    settings, hardware = place.settings, place.hardware
    others = [host.rpartition("@")[2] for host in (settings.hosts or ())[1:]]
    address = own_address(settings.address) if settings.address else address_towards((*others, _ANYWHERE)[0])
    starter = TorchrunStarter(settings, hardware.nodes, address, place.folder, place.tell)
    with Nodes(
        hardware.nodes,
        hardware.of_node,
        address,
        place.facts(),
        starter,
        patience_seconds=settings.start_timeout,
    ) as found:
        yield NodeSite(found, hardware.accelerator)


class TorchrunStarter:
    """Starts `autotune node` by torchrun."""

    def __init__(
        self, settings: HardwareSection, nodes: int, address: str, folder: Path, tell: Callable[[str], None]
    ) -> None:
        self._settings, self._nodes, self._address, self._folder, self._tell = settings, nodes, address, folder, tell
        self._agent, self._token, self._meeting = "", "", ""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._folder.mkdir(parents=True, exist_ok=True)
        # With c10d torchrun's agents meet at the store of ours, which needs no other port.
        self._meeting = _free_port(self._address) if self._settings.rendezvous == "static" else agent
        with whole_file(self._token_file, 0o600) as stream:
            stream.write(token.encode())
        for node in range(self._nodes):
            self._start(node)

    def revive(self, node: int) -> None:
        if process := self._processes.pop(node, None):
            _end(process)
        self._start(node)

    def check(self) -> None:
        for node, process in self._processes.items():
            if process.poll() is not None:
                where = self._settings.hosts[node] if self._settings.hosts else "this node"
                raise NodesMissing(
                    f"node {node} ({where}) has ended with exit code {process.returncode} before it took part: "
                    f"{_last_lines(self._log(node))}; its output is in {self._log(node)}"
                )

    def end(self) -> None:
        for process in self._processes.values():
            _end(process)
        self._token_file.unlink(missing_ok=True)

    def commands(self, places: Sequence[range], accelerator: str, request: Path) -> tuple[Command, ...]:
        meeting = _free_port(self._address)
        return tuple(
            Command(
                argv=(
                    *torchrun(node, len(places), self._settings.rendezvous, meeting, ranks=len(ranks)),
                    *("-m", "trials.run.worker", "--request", str(request)),
                ),
                environment=shared_environment(accelerator, len(ranks)),
            )
            for node, ranks in enumerate(places)
        )

    def _start(self, node: int) -> None:
        folder = Path(sys.executable).parent
        command = (
            *torchrun(node, self._nodes, self._settings.rendezvous, self._meeting, is_host=False),
            *("--no-python", str(folder / "autotune"), "node", self._agent, f"--number={node}"),
        )
        if node and self._settings.hosts is None:
            line = shlex.join((*command, "--token-file", str(self._token_file)))
            self._tell(f"Start this on node {node}, in a copy of this environment:\n{line}")
            return
        hosts = self._settings.hosts
        remote = (*_SSH, hosts[node], _with_token(command)) if node and hosts else command
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._log(node).open("wb") as log:
            process = subprocess.Popen(
                remote,
                env={**os.environ, TOKEN: self._token} if not node else None,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._processes[node] = process
        assert process.stdin is not None
        try:
            process.stdin.write(f"{self._token}\n".encode() if node else b"")
            process.stdin.close()
        except BrokenPipeError:  # it has ended at once: `check` finds out
            pass

    def _log(self, node: int) -> Path:
        return self._folder / f"node-{node}.log"

    @property
    def _token_file(self) -> Path:
        return self._folder / "token"


def torchrun(
    node: int, nodes: int, rendezvous: str, meeting: str, *, ranks: int = 1, is_host: bool = True
) -> tuple[str, ...]:
    """Return torchrun's command on one node, without the program. torchrun's own agents meet at `meeting`, `HOST:PORT`.

    With c10d the first of them serves the meeting unless a store is there already: `is_host` is False.
    """
    host, port = split(meeting)
    how = {
        "static": (f"--node-rank={node}", f"--master-addr={host}", f"--master-port={port}"),
        "c10d": (
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}", "--rdzv-id=autotune"),
            f"--rdzv-conf=is_host={int(is_host and node == 0)}",
        ),
    }
    command = str(Path(sys.executable).with_name("torchrun"))
    return (command, f"--nnodes={nodes}", f"--nproc-per-node={ranks}", *how[rendezvous])


def _free_port(address: str) -> str:
    """Return `HOST:PORT` of a port at which nothing listens now; torchrun cannot ask the system for one later."""
    with socket.create_server((address, 0)) as free:
        return join(address, free.getsockname()[1])


def _with_token(command: tuple[str, ...]) -> str:
    """Return a line for the remote shell, which reads the token from its input: command lines are seen by everyone."""
    return f"IFS= read -r {TOKEN}; export {TOKEN}; exec {shlex.join(command)}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a process that has been told to end, then end it."""
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_lines(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:]) or "it said nothing"
