"""Environment variables of the ranks of this machine, and the commands that start them without an agent."""

import ipaddress
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trials.launchers.network import free_port, interface_of
from trials.machine.control_groups import usable_cores

_LOOPBACK = "127.0.0.1"
_ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"
"""Setting with which segments of torch's CUDA allocator grow, so that packs of changing sizes leave no gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A process to start: its arguments, and variables to add to the environment."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]

    def shell(self) -> str:
        """Return the command as one line for a shell."""
        settings = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join((*settings, shlex.join(self.argv)))


def rank_environments(
    world_size: int,
    accelerator: str,
    *,
    group: int = 0,
    groups: int = 1,
    ranks: range | None = None,
    address: str = _LOOPBACK,
) -> tuple[dict[str, str], ...]:
    """Return the variables to add to the environment of each rank on this machine, with its share of the cores.

    Of several `groups` that work at the same time, the first has the first devices, and so on. `ranks` are those on
    this machine, all of them when absent; they meet the others at the interface with this `address`, or between nodes
    at those that `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` name.
    """
    ranks = range(world_size) if ranks is None else ranks
    interfaces = _interfaces(address)
    return tuple(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(group * len(ranks) + place),
            "WORLD_SIZE": str(world_size),
            **interfaces,
            **shared_environment(accelerator, len(ranks) * groups),
        }
        for place, rank in enumerate(ranks)
    )


def _interfaces(address: str) -> dict[str, str]:
    """Return the variables that name the interfaces of gloo and NCCL."""
    interface = interface_of(address)
    # Any process that reaches the port of a rank can join its group. NCCL takes a bare name for a prefix.
    found = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    if ipaddress.ip_address(address).is_loopback:
        return found
    return {name: os.environ.get(name, own) for name, own in found.items()}


def shared_environment(accelerator: str, ranks: int) -> dict[str, str]:
    """Return the variables that are the same for all ranks of a machine; they share its cores."""
    threads = max(1, usable_cores() // ranks)
    name, setting = allocator_setting(os.environ)
    return {
        # CUDA counts the fastest device first, while NVML counts as the PCI bus, and the agent with it.
        **({name: ",".join(setting), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if accelerator == "cuda" else {}),
        "DS_ACCELERATOR": accelerator,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "TOKENIZERS_PARALLELISM": "false",
    }


def allocator_setting(environment: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the variable with the settings of torch's CUDA allocator on the ranks, and these.

    The first that is set counts (c10/core/AllocatorConfig.h). Without one, ranks have `EXPANDABLE`.
    """
    name = next((each for each in _ALLOCATOR if each in environment), _ALLOCATOR[0])
    return name, tuple(environment.get(name, EXPANDABLE).replace(" ", "").split(","))


def worker_commands(world_size: int, accelerator: str, request: Path, *, groups: int = 1) -> tuple[Command, ...]:
    """Return one command per rank on this machine: it serves the request in the folder `request` and ends."""
    rendezvous = {"MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(free_port(_LOOPBACK))}
    return tuple(
        Command(
            # -P: a folder `storage` or `trials` in the current directory must not shadow the package.
            argv=(sys.executable, "-P", "-m", "trials.run.worker", "--request", str(request)),
            environment=environment | rendezvous,
        )
        for environment in rank_environments(world_size, accelerator, groups=groups)
    )
