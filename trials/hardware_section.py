"""The section of a job on its devices, and on the machines that they are in."""

import re
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from trials.section import Bytes, Seconds, Section

_HOST = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*@)?[A-Za-z0-9:][A-Za-z0-9_.:-]*")
"""Names and addresses of hosts, with a user before an `@`."""


def is_host(text: str) -> bool:
    """Return whether a text can be the name or address of a host. No shell gives a meaning to any of its characters."""
    return _HOST.fullmatch(text) is not None


def _plain_host(host: str) -> str:
    if not is_host(host):
        raise ValueError(
            f"{host!r} is no name or address of a host; use letters, digits and the characters . _ : - alone"
        )
    return host


Host = Annotated[str, AfterValidator(_plain_host)]


class HardwareSection(Section):
    devices: Annotated[int, Field(gt=0)] | None = None
    """Ranks to use, on all nodes together; when absent the slots of `hostfile`, else every visible accelerator, else 2
    CPU ranks on each node."""
    memory_limit: Bytes | None = None
    """Limit of each rank; the device's memory less a reserve when absent."""
    launcher: str = "local"
    """Tool that starts the ranks, on several machines too: local, torchrun, deepspeed or slurm."""
    nodes: Annotated[int, Field(gt=0)] | None = None
    """Machines to use, this one included; when absent those of `hosts`, `hostfile` or Slurm's allocation, else this one
    alone."""
    hosts: Annotated[tuple[Host, ...], Field(min_length=1)] | None = None
    """Names or addresses of all machines, this one first, which `torchrun` reaches by ssh."""
    hostfile: Path | None = None
    """File of lines like `node-a slots=8`, relative to the job file, for the launcher deepspeed; this machine first."""
    address: Host | None = None
    """Name or address of this machine, at which the others reach it; when absent, the one from which the second host
    is reached, or the default route."""
    rendezvous: Literal["static", "c10d"] = "static"
    """How torchrun's agents find each other: static or c10d."""
    start_timeout: Seconds = 300.0
    """Longest time until all nodes have come."""

    @field_validator("hosts")
    @classmethod
    def _different(cls, hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for host in hosts or ():
            if (hosts or ()).count(host) > 1:
                raise ValueError(f"names {host} twice; name each host once")
        return hosts

    @model_validator(mode="after")
    def _agreeing(self) -> Self:
        if self.hosts and self.nodes not in (None, len(self.hosts)):
            raise ValueError(f"has {len(self.hosts)} hosts, and nodes: {self.nodes}; remove one of the two")
        return self
