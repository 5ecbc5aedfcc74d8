"""A second node for tests: a network namespace with a name of its own, joined to this one by a virtual cable."""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from autotune.machine.node import node_facts
from tests.programs.processes import WAIT_SECONDS
from trials.launchers.commands import Command
from trials.launchers.node_messages import TOKEN
from trials.launchers.nodes import Nodes

OTHER = "node-b"
"""Name of the other node's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """Two machines as far as the network goes: this one, and a namespace."""

    namespace: str
    here: str
    """Address of this machine."""
    there: str

    def on_other(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` on the other node; its process is that of `command` itself."""
        script = f'hostname {OTHER}; exec "$@"'
        # Not by `ip netns exec`, which would hide the control groups.
        inside = ("nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--uts")
        return [*inside, "sh", "-c", script, "sh", *command]

    def set(self, state: str) -> None:
        """Cut the cable (`down`), or join it again (`up`)."""
        _ip("link", "set", f"{self.namespace}-a", state)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this machine has sent over the cable."""
        return int(Path(f"/sys/class/net/{self.namespace}-a/statistics/tx_bytes").read_text())

    def limit(self, rate: str | None) -> None:
        """Limit each direction of the cable to a rate of `tc`, such as `100mbit`; None lifts the limit."""
        filters = ("tbf", "rate", rate, "burst", "64kb", "latency", "500ms") if rate else ("noqueue",)
        _tc("qdisc", "replace", "dev", f"{self.namespace}-a", "root", *filters)
        _tc("-n", self.namespace, "qdisc", "replace", "dev", f"{self.namespace}-b", "root", *filters)


@contextmanager
def cable() -> Iterator[Cable]:
    """Make the other node; skip the test, with the reason, where this machine does not allow it."""
    name, net = f"at{os.getpid()}", f"10.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
    made = Cable(namespace=name, here=f"{net}.1", there=f"{net}.2")
    with ExitStack() as stack:
        for command in (
            f"netns add {name}",
            f"link add {name}-a type veth peer name {name}-b netns {name}",
            f"addr add {made.here}/24 dev {name}-a",
            f"link set {name}-a up",
            f"-n {name} addr add {made.there}/24 dev {name}-b",
            f"-n {name} link set {name}-b up",
            f"-n {name} link set lo up",
        ):
            try:
                _ip(*command.split())
            except (OSError, subprocess.CalledProcessError) as error:
                pytest.skip(f"no second node: network namespaces cannot be made here ({error})")
            if command.startswith("netns"):
                stack.callback(_ip, "netns", "del", name)
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tc(*arguments: str) -> None:
    subprocess.run(["tc", *arguments], check=True, capture_output=True)


class NodeProcesses:
    """Starts each node as a process of this test, one of them at the other end of the cable."""

    def __init__(self, cable: Cable, *, token: str = "", environment: Mapping[str, str] | None = None) -> None:
        """With `token` the other node presents that one in place of the agent's; it has `environment` besides ours."""
        self._cable, self._wrong_token, self._environment = cable, token, environment or {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.of_agent = ("", "")
        """Address and token of the agent, once it has started nodes."""

    def start(self, agent: str, token: str) -> None:
        self.of_agent = (agent, token)
        for number in range(2):
            self._start(number)

    def _start(self, number: int) -> None:
        agent, token = self.of_agent
        # A machine has cores of its own: with threads for all of them, ranks of two nodes would wait for each other.
        cores = sorted(os.sched_getaffinity(0))
        command = ["taskset", "--cpu-list", str(cores[number % len(cores)])]
        command += [sys.executable, "-P", "-m", "autotune", "node", agent, "--number", str(number)]
        if number:
            command, token = self._cable.on_other(command), self._wrong_token or token
        environment = {**os.environ, **(self._environment if number else {}), TOKEN: token}
        self.processes[number] = subprocess.Popen(command, env=environment)

    def revive(self, node: int) -> None:
        self.processes[node].kill()
        self.processes[node].wait()
        self._start(node)

    def check(self, wanted: int) -> None:
        """Processes that end are noticed by the signs of life that they no longer give."""

    def commands(self, places: Sequence[range], accelerator: str, request: Path, *, groups: int) -> tuple[Command, ...]:
        raise NotImplementedError("no test asks for them")

    def end(self) -> None:
        for process in self.processes.values():
            try:
                process.wait(WAIT_SECONDS)
            finally:
                process.kill()
                process.wait()


@contextmanager
def two_nodes(
    cable: Cable, starter: NodeProcesses | None = None, patience_seconds: float = 100, ranks: int = 1
) -> Iterator[Nodes]:
    """Two nodes with this number of ranks each."""
    with Nodes(
        2, ranks, cable.here, node_facts(), starter or NodeProcesses(cable), patience_seconds=patience_seconds
    ) as nodes:
        yield nodes


def ssh_over(cable: Cable, folder: Path) -> Path:
    """Write a stand-in for ssh, and return its folder: it hands its last argument to a shell of the other node."""
    folder.mkdir()
    script = folder / "ssh"
    on_other = " ".join(map(shlex.quote, cable.on_other(["sh", "-c"])))
    script.write_text(
        f'#!/bin/bash\n[ "${{@: -2:1}}" = {cable.there} ] || {{ echo "no route to host" >&2; exit 255; }}\n'
    )
    with script.open("a") as stream:
        stream.write(f'exec {on_other} "${{@: -1}}"\n')
    script.chmod(0o755)
    return folder
