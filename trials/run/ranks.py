"""Processes of one group of ranks: started together, ended together, none left behind."""

import ipaddress
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

_GRACE_SECONDS = 2.0
_PORT = 29500
_starter = ThreadPoolExecutor(1, thread_name_prefix="ranks")
"""Starts every rank: the system ends a rank with the thread that started it, and this one ends with its process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: arguments, and what to add to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """The command as it would be typed."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*settings, shlex.join(self.argv)))


def local_ranks(
    world_size: int, accelerator: str, request: Path | None = None, *, group: int = 0, groups: int = 1
) -> tuple[Command, ...]:
    """One worker per rank on this machine, each with its share of the cores.

    They wait for requests on their standard input, or serve the one in the folder `request`. Of several `groups` that
    work at the same time, the first has the first devices, and so on.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // (world_size * groups))
    only = ("--request", str(request)) if request else ("--agent", str(os.getpid()))
    loopback = _loopback()
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT)} if request else {}
    return tuple(
        Command(
            # -P: a folder called storage or trials where the user stands must not shadow ours.
            argv=(sys.executable, "-P", "-m", "trials.run.worker", *only),
            environment={
                "RANK": str(rank),
                "LOCAL_RANK": str(group * world_size + rank),
                "WORLD_SIZE": str(world_size),
                **meeting,
                # Whoever reaches the port of a rank can join its group. NCCL takes a bare name for a prefix.
                "GLOO_SOCKET_IFNAME": loopback,
                "NCCL_SOCKET_IFNAME": f"={loopback}",
                "DS_ACCELERATOR": accelerator,
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
                "TOKENIZERS_PARALLELISM": "false",
            },
        )
        for rank in range(world_size)
    )


def _loopback() -> str:
    """The name of this machine's loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and ipaddress.ip_address(each.address).is_loopback for each in addresses):
            return name
    return "lo"


def _is_inherited(name: str) -> bool:
    """Whether ranks get that variable: not a launcher's that is around us, nor what opens a database."""
    return name not in ("MASTER_ADDR", "MASTER_PORT", "AUTOTUNE_DB_URL") and not name.startswith("PG")


class Ranks:
    """Running processes, with their output in one log file each."""

    def __init__(self, commands: Sequence[Command], log_folder: Path) -> None:
        log_folder.mkdir(parents=True, exist_ok=True)
        self._logs: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, command in enumerate(commands):
                _starter.submit(self._start, command, log_folder / f"rank-{rank}.log").result()
        except BaseException:
            _starter.submit(bool).result()  # after an interrupt: the rank that was just starting is known then
            self.end()
            raise

    def _start(self, command: Command, log: Path) -> None:
        inherited = {key: value for key, value in os.environ.items() if _is_inherited(key)}
        self._logs.append(log.open("ab"))
        self._processes.append(
            subprocess.Popen(
                command.argv,
                env={**inherited, **command.environment},
                stdin=subprocess.PIPE,
                stdout=self._logs[-1],
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )

    def send(self, line: str) -> None:
        """Gives every rank one line. Raises BrokenPipeError when one is gone."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(line.encode() + b"\n")
            process.stdin.flush()

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes, in order of rank."""
        return tuple(process.pid for process in self._processes)

    def dead(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended; minus the signal for one that was killed."""
        codes = ((rank, process.poll()) for rank, process in enumerate(self._processes))
        return {rank: code for rank, code in codes if code is not None}

    def end(self) -> None:
        """Ends every rank and its children: politely, then not. Returns when they are gone, or cannot be ended."""
        families = [_family(process) for process in self._processes]
        for process in self._processes:
            _signal_group(process, signal.SIGTERM)
        everyone = [member for family in families for member in family]
        _, alive = psutil.wait_procs(everyone, timeout=_GRACE_SECONDS)
        for process in self._processes:
            _signal_group(process, signal.SIGKILL)
        psutil.wait_procs(alive, timeout=_GRACE_SECONDS)
        for process in self._processes:
            process.poll()
            if process.stdin is not None:
                process.stdin.close()
        for log in self._logs:
            log.close()


def _family(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_group(process: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return
