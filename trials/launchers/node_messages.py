"""Messages between the agent and its nodes. A node numbers what it receives and what it sends, from 1."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from trials.outcome import Crash
from trials.workload import Hardware, Software

AGENT, TOKEN, FILES = "AUTOTUNE_AGENT", "AUTOTUNE_TOKEN", "AUTOTUNE_FILES"
"""Variables of a rank on a node: the address of the agent's store, the token, and the folder of the agent's files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about a node, which it sends when it joins. Nodes that work together agree in all but the name."""

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
            return f"has {name.replace('_', ' ')} {found}, and {own.host} has {expected}; choose nodes of one kind"
    if facts.hardware.devices < devices:
        return (
            f"has {facts.hardware.devices} devices, but the job uses {devices} of each node; lower "
            "hardware.devices or search.parallel, or check CUDA_VISIBLE_DEVICES there"
        )
    return facts.problem


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

AGENT_NAME = "agent"


def node_name(number: int, coming: int) -> str:
    """Return the name of a node at the store. It may come several times, since it may be started again."""
    return f"node/{number}/{coming}"
