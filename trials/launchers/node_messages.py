"""Messages between the agent and its nodes. A node numbers what it receives and what it sends, from 1."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials.outcome import Crash
from trials.units import number_of
from trials.workload import Hardware, Software

AGENT, TOKEN, FILES = "AUTOTUNE_AGENT", "AUTOTUNE_TOKEN", "AUTOTUNE_FILES"
"""Variables of a rank on a node: the address of the agent's store, the token, and the folder of the agent's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node, which it sends when it joins. `difference_of` says in which of them nodes have to agree."""

    host: str
    """Name, for people."""
    package: str
    """Version of this package."""
    code: str
    """Digest of its source files."""
    software: Software
    hardware: Hardware
    """Hardware with the devices of this node alone."""
    problem: str | None = None
    """Why the node cannot take part now, such as others that use its devices."""


def difference_of(facts: NodeFacts, own: NodeFacts, devices: int) -> str | None:
    """Return why a node with these facts cannot work together with another one on `devices` ranks each."""
    versions = {"vlm-autotune": (facts.package, own.package)} | {
        each.name: (getattr(facts.software, each.name), getattr(own.software, each.name)) for each in fields(Software)
    }
    for name, (theirs, ours) in versions.items():
        if theirs != ours:
            return f"has {name} {theirs}, and {own.host} has {ours}; install the same on both"
    if facts.code != own.code:
        return f"has other files of vlm-autotune {own.package} than {own.host}; install the same on both"
    for name, found in facts.hardware.kind.items():
        if found != (expected := own.hardware.kind[name]):
            return (
                f"has {name.replace('_', ' ')} {found}, and {own.host} has {expected}; choose nodes of one kind, or "
                "devices of one kind with CUDA_VISIBLE_DEVICES"
            )
    if (theirs := facts.hardware.driver) != (ours := own.hardware.driver):
        return f"has driver {theirs}, and {own.host} has {ours}; install the same on both"
    if facts.hardware.devices < devices:
        return (
            f"has {facts.hardware.devices} devices, but the job uses {devices} of each node; lower "
            "hardware.devices or search.parallel, or check CUDA_VISIBLE_DEVICES there"
        )
    return _other_links(facts, own, devices) or facts.problem


def _other_links(facts: NodeFacts, own: NodeFacts, devices: int) -> str | None:
    theirs, ours = (_links(each.hardware, devices) for each in (facts, own))
    if theirs == ours or not (theirs and ours):
        return None
    return (
        f"has the connections {theirs} between its devices, and {own.host} has {ours}; choose nodes of one kind, or "
        "put the devices into the same order with CUDA_VISIBLE_DEVICES"
    )


def _links(hardware: Hardware, devices: int) -> str:
    """Return the connections among the first `devices`; empty where they are not known."""
    pairs = [pair for pair in (hardware.topology or "").split(", ") if pair]
    return ", ".join(pair for pair in pairs if int(pair.split()[0].rpartition("-")[2]) < devices)


def shortage_of(facts: NodeFacts, own: NodeFacts) -> str | None:
    """Return what a node has less of than this one, for which everything is planned: cores or memory of the host."""
    theirs, ours, less = facts.hardware, own.hardware, []
    if theirs.cpu_cores < ours.cpu_cores:
        less.append(f"{number_of(theirs.cpu_cores, 'CPU core')} where {own.host} has {ours.cpu_cores}")
    if theirs.ram_bytes < ours.ram_bytes:
        less.append(f"{theirs.ram_bytes >> 30} GiB of memory where {own.host} has {ours.ram_bytes >> 30} GiB")
    return " and ".join(less) or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The agent's answer to a node that has come."""

    refusal: str | None = None
    """Why the node cannot take part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """Order to start the ranks of a group that belong on this node."""

    group: str
    first_rank: int
    ranks: int
    world_size: int
    accelerator: str
    number: int
    """Number of the group among those that work at the same time, which decides its devices."""
    groups: int
    kind: Literal["start"] = "start"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """Order to give the ranks of a group their next request."""

    group: str
    channel: str
    """Name of the request in the store."""
    files: tuple[str, ...]
    """Names of the files that it needs."""
    kind: Literal["request"] = "request"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRanks:
    """Order to end the ranks of a group."""

    group: str
    kind: Literal["end"] = "end"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """Order to end: there is no more work."""

    kind: Literal["leave"] = "leave"


Order: TypeAlias = Annotated[StartRanks | ServeRequest | EndRanks | Leave, Field(discriminator="kind")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksState:
    """The ranks of a group on a node, whenever something about them has changed."""

    group: str
    pids: tuple[int, ...]
    ended: tuple[Crash, ...]
    kind: Literal["state"] = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksEnded:
    """All ranks of a group on a node have ended."""

    group: str
    logs: tuple[tuple[str, str], ...]
    """(name of a log, its end)."""
    kind: Literal["ended"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """The node ends."""

    reason: str
    kind: Literal["left"] = "left"


News: TypeAlias = Annotated[RanksState | RanksEnded | Left, Field(discriminator="kind")]

COUNT = "count"
"""Key of the number of nodes that the agent serves."""
AGENT_NAME = "agent"


def node_name(number: int, coming: int) -> str:
    """Return the name of a node at the store. It may come several times, since it may be started again."""
    return f"node/{number}/{coming}"
