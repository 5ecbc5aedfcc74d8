"""Nodes of a hostfile, on which DeepSpeed's launcher runs. It is started over ssh.

The command on each node is the one that DeepSpeed's own runner would start there by pdsh (`PDSHRunner.get_cmd` of
DeepSpeed 0.19), without variables on the command line, so neither pdsh nor a copy of the hostfile is needed. Of the
processes that it starts on a node, one for each slot, the first serves as `autotune node`; the others end at once.
DeepSpeed's launcher replaces CUDA_VISIBLE_DEVICES by the numbers of the slots. On this machine, whose devices the agent
describes, locks and watches, its programs get the variable back.
"""

import base64
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trials.channels.store import split
from trials.errors import SiteError
from trials.hardware_section import HardwareSection, is_host
from trials.launchers.command_starter import CommandStarter, OverSsh, Spot
from trials.launchers.network import address_of_agent, check_first
from trials.sites import Place, Shape, Site

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def shape(settings: HardwareSection, _: Mapping[str, str]) -> Shape:
    if settings.hostfile is None:
        raise SiteError("hardware.launcher: deepspeed needs hardware.hostfile; add it")
    if settings.hosts is not None or settings.nodes is not None:
        raise SiteError("hardware.hostfile says which nodes there are; remove hardware.hosts and hardware.nodes")
    slots = read_hostfile(settings.hostfile)
    return Shape(nodes=len(slots), of_node=next(iter(slots.values())))


def read_hostfile(path: Path) -> dict[str, int]:
    """Return the slots of each host, in the order of the file: lines like `node-a slots=8`.

    Raise SiteError for a file that cannot be read, a line without slots, a name with characters that shells interpret,
    a host that is named twice, and numbers of slots that differ, since all nodes have equally many ranks.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SiteError(f"hardware.hostfile {path} cannot be read: {error}; name a text file") from error
    found: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line, where = text.partition("#")[0].strip(), f"hardware.hostfile {path}, line {number}"
        if not line:
            continue
        match = _LINE.fullmatch(line)
        if match is None or int(match[2]) == 0:
            raise SiteError(f"{where}: {line!r} has no slots; write HOST slots=NUMBER")
        host, slots = match[1], int(match[2])
        if not is_host(host):
            raise SiteError(f"{where}: {host!r} is no name or address of a host; use letters, digits and . _ : - alone")
        if host in found:
            raise SiteError(f"{where}: {host} is named twice; name each host once")
        found[host] = slots
    if not found:
        raise SiteError(f"hardware.hostfile {path} names no host; write lines like HOST slots=NUMBER")
    if len(set(found.values())) > 1:
        raise SiteError(
            f"hardware.hostfile {path} has hosts with {min(found.values())} and {max(found.values())} slots; all nodes "
            "need equally many, so lower the larger numbers"
        )
    return found


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    settings = place.settings
    assert settings.hostfile is not None, "`shape` has refused its absence"
    slots = read_hostfile(settings.hostfile)
    hosts = tuple(slots)
    address = address_of_agent(settings.address, hosts)
    check_first(hosts, f"hardware.hostfile {settings.hostfile}")
    tool = DeepSpeed(hosts, os.environ.get(_VISIBLE))
    starter = CommandStarter(
        tool, tuple(slots.values()), address, place.folder, hosts=hosts, reach=OverSsh(), show=place.show
    )
    with place.nodes(address, starter) as site:
        yield site


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """DeepSpeed's launcher of one node."""

    hosts: tuple[str, ...]
    visible: str | None
    """`CUDA_VISIBLE_DEVICES` of this machine, which is the first of the hosts; None where it is not set."""

    @property
    def uses_store(self) -> bool:
        return False

    def command(self, spot: Spot, program: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
        host, port = split(spot.rendezvous)
        world = {name: [*range(ranks)] for name, ranks in zip(self.hosts, spot.ranks, strict=False)}
        python = (sys.executable, "-P", "-u", "-m")
        return (
            *(*python, "deepspeed.launcher.launch"),
            f"--world_info={base64.urlsafe_b64encode(json.dumps(world).encode()).decode()}",
            f"--node_rank={spot.node}",
            f"--master_addr={host}",
            f"--master_port={port}",
            "--no_local_rank",
            "--no_python",
            *(("env", f"{_VISIBLE}={self.visible}") if spot.node == 0 and self.visible is not None else ()),
            *(python if is_module else ()),
            *program,
        )
