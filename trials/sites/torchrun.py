"""Nodes on which torchrun runs: started over ssh where the job names its hosts, else by the user, command by command.

torchrun starts one process on each node, `autotune node`, which forks the ranks and renews them after a failure. A new
torchrun for each of them would import torch again.
"""

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from trials.channels.store import join
from trials.errors import NodesMissing, SiteError
from trials.job import HardwareSection
from trials.launchers.node_messages import TOKEN
from trials.launchers.node_ranks import NodeSite
from trials.launchers.nodes import Nodes
from trials.sites import Place, Site
from trials.whole_file import whole_file

_ANYWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737), to which only the default route leads."""
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "ServerAliveInterval=15")
_LAST_LINES = 3
_END_SECONDS = 20.0


def nodes(settings: HardwareSection, _: Mapping[str, str]) -> int:
    if settings.hosts is None and settings.nodes is None:
        raise SiteError("hardware.launcher: torchrun needs hardware.nodes or hardware.hosts; add one of them")
    return len(settings.hosts) if settings.hosts else settings.nodes or 1


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    settings, hardware = place.settings, place.hardware
    named = settings.address or (settings.hosts[1] if settings.hosts and len(settings.hosts) > 1 else _ANYWHERE)
    address = place.address(named)
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
        self._agent, self._token, self._port = "", "", 0
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, agent: str, token: str) -> None:
        self._agent, self._token = agent, token
        self._folder.mkdir(parents=True, exist_ok=True)
        with socket.create_server((self._address, 0)) as free:  # torchrun itself listens there later
            self._port = free.getsockname()[1]
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

    def _start(self, node: int) -> None:
        command = torchrun_command(
            node, self._nodes, self._settings.rendezvous, join(self._address, self._port), self._agent
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


def torchrun_command(node: int, nodes: int, rendezvous: str, meeting: str, agent: str) -> tuple[str, ...]:
    """Return torchrun's command on one node. `meeting` is where torchrun's own agents meet, `agent` is ours."""
    folder = Path(sys.executable).parent
    static = (
        f"--node-rank={node}",
        f"--master-addr={meeting.rpartition(':')[0].strip('[]')}",
        f"--master-port={meeting.rpartition(':')[2]}",
    )
    # With c10d they meet at the store of our agent, which needs no other port.
    c10d = ("--rdzv-backend=c10d", f"--rdzv-endpoint={agent}", "--rdzv-id=autotune", "--rdzv-conf=is_host=0")
    return (
        str(folder / "torchrun"),
        f"--nnodes={nodes}",
        "--nproc-per-node=1",
        *(static if rendezvous == "static" else c10d),
        "--no-python",
        str(folder / "autotune"),
        "node",
        agent,
        f"--number={node}",
    )


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
