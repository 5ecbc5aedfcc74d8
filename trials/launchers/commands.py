"""What the ranks of this machine have in their environment, and the commands that start them without an agent."""

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: arguments, and what to add to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """The command as it would be typed."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*settings, shlex.join(self.argv)))


def rank_environments(
    world_size: int, accelerator: str, *, group: int = 0, groups: int = 1
) -> tuple[dict[str, str], ...]:
    """What to add to the environment of each rank on this machine, with its share of the cores.

    Of several `groups` that work at the same time, the first has the first devices, and so on.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // (world_size * groups))
    loopback = _loopback()
    return tuple(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(group * world_size + rank),
            "WORLD_SIZE": str(world_size),
            # Whoever reaches the port of a rank can join its group. NCCL takes a bare name for a prefix.
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": f"={loopback}",
            "DS_ACCELERATOR": accelerator,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            "TOKENIZERS_PARALLELISM": "false",
        }
        for rank in range(world_size)
    )


def worker_commands(world_size: int, accelerator: str, request: Path) -> tuple[Command, ...]:
    """One process per rank on this machine that serves the request in the folder `request` and ends."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_PORT)}
    return tuple(
        Command(
            # -P: a folder called storage or trials where the user stands must not shadow ours.
            argv=(sys.executable, "-P", "-m", "trials.run.worker", "--request", str(request)),
            environment=environment | meeting,
        )
        for environment in rank_environments(world_size, accelerator)
    )


def _loopback() -> str:
    """The name of this machine's loopback interface."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.family == socket.AF_INET and ipaddress.ip_address(each.address).is_loopback for each in addresses):
            return name
    return "lo"
