"""Ranks on the nodes of a job. Requests and answers pass through the agent's store."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from uuid import uuid4

from trials.launchers.channel_ranks import ChannelRanks
from trials.launchers.commands import Command
from trials.launchers.copies import copy_digest
from trials.launchers.node_messages import EndRanks, ServeRequest, StartRanks
from trials.launchers.nodes import Nodes
from trials.outcome import Crash
from trials.tasks.answer import Answer, FailureReport, error_name
from trials.tasks.request import Request

# A choice: an answer is seen 0.05 s late at most.
_POLL_SECONDS = 0.05
_END_SECONDS = 10.0
"""For a node to end its ranks, which get SIGTERM, and two seconds later SIGKILL."""


class NodeLauncher:
    """Launcher of the ranks of a group on as many nodes as they need; the first ranks are on the first node."""

    def __init__(
        self, nodes: Nodes, folder: Path, world_size: int, accelerator: str, *, group: int = 0, groups: int = 1
    ) -> None:
        """Write the errors and the ends of the logs of ranks that fail to `folder`.

        Of several `groups` that work at the same time, the first has the first devices of each node, and so on.
        """
        self._nodes, self._folder, self._accelerator = nodes, folder, accelerator
        self._group, self._groups = group, groups
        self._numbers = count(1)
        self.world_size = world_size

    def start(self) -> "NodeRanks":
        """Start the ranks once all of their nodes are there. Raise what `Nodes.require` raises."""
        name, places = uuid4().hex[:16], self._nodes.places(self.world_size)
        self._nodes.require(len(places))
        for node, ranks in enumerate(places):
            self._nodes.order(
                node,
                StartRanks(
                    group=name,
                    first_rank=ranks.start,
                    ranks=len(ranks),
                    world_size=self.world_size,
                    accelerator=self._accelerator,
                    number=self._group,
                    groups=self._groups,
                ),
            )
        return NodeRanks(self._nodes, name, places, self._folder, self._numbers)


@dataclass(frozen=True, slots=True)
class NodeSite:
    """The nodes of a job, as the place where its ranks are started."""

    nodes: Nodes
    accelerator: str
    groups: int

    def launcher(self, folder: Path, world_size: int, *, group: int = 0) -> NodeLauncher:
        return NodeLauncher(self.nodes, folder, world_size, self.accelerator, group=group, groups=self.groups)

    def commands(self, world_size: int, request: Path) -> tuple[Command, ...]:
        places = self.nodes.places(world_size)
        return self.nodes.starter.commands(places, self.accelerator, request, groups=self.groups)


class NodeRanks(ChannelRanks):
    """A group of ranks on some nodes."""

    aftermath_seconds = 20.0
    """Until the nodes miss a lost one: longer than its signs of life may be missed."""

    def __init__(self, nodes: Nodes, name: str, places: list[range], folder: Path, numbers: Iterator[int]) -> None:
        super().__init__(places[-1].stop)
        self._nodes, self._name, self._places, self._folder, self._numbers = nodes, name, places, folder, numbers
        self._request = folder

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    def send(self, request: Request) -> None:
        number = next(self._numbers)
        self._request = self._folder / f"request-{number}-{self._name[:8]}"
        channel = self._nodes.channel(f"{self._key}{number}")
        files = [request.index, *([request.held_out] if request.held_out else [])]
        for file in files:
            self._nodes.give_file(file)
        self._exchange(channel, replace(request, model_digest=copy_digest(request.job.model)))
        for node in range(len(self._places)):
            order = ServeRequest(group=self._name, channel=channel.name, files=tuple(file.name for file in files))
            self._nodes.order(node, order)

    def answers(self) -> dict[int, Answer]:
        known = set(self._answers)
        # New answers alone: the log of a failed rank is fetched once.
        for rank in [rank for rank in super().answers() if rank not in known]:
            report = self._answers[rank].report
            if isinstance(report, FailureReport):
                self._keep(f"{self._request.name}/{error_name(rank)}", self._channel.get(error_name(rank)) or "")
                if isinstance(report.cause, Crash):
                    node = next(node for node, ranks in enumerate(self._places) if rank in ranks)
                    cause = self._on_node(node, report.cause)
                    self._answers[rank] = replace(self._answers[rank], report=FailureReport(cause=cause))
        return dict(self._answers)

    def ended(self) -> dict[int, Crash]:
        self._nodes.look()
        found: dict[int, Crash] = {}
        for node, ranks in enumerate(self._places):
            # Its machine ended these ranks, so the failure is the machine's and the plan may be tried again.
            if reason := self._nodes.lost(node):
                found |= {rank: Crash(rank=rank, detail=reason, of_machine=True) for rank in ranks}
            elif state := self._nodes.state(node, self._name):
                found |= {each.rank: self._on_node(node, each) for each in state.ended}
        return found

    def end(self) -> None:
        there = [node for node in range(len(self._places)) if not self._nodes.lost(node)]
        for node in there:
            self._nodes.order(node, EndRanks(group=self._name))
        deadline = time.monotonic() + _END_SECONDS
        while waiting := [n for n in there if not self._nodes.lost(n) and not self._nodes.ending(n, self._name)]:
            if time.monotonic() > deadline:
                break
            self._nodes.look()
            time.sleep(_POLL_SECONDS if waiting else 0)
        for node in there:
            if end := self._nodes.ending(node, self._name):
                for name, text in end.logs:
                    self._keep(f"logs/node-{node}-{name}", text)
        self._nodes.forget(self._key)

    @property
    def _key(self) -> str:
        return f"request/{self._name}/"

    def _on_node(self, node: int, crash: Crash) -> Crash:
        """Name the node in the detail."""
        return replace(crash, detail=f"on {self._nodes.host(node)}: {crash.detail}")

    def _keep(self, name: str, text: str) -> None:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as stream:
            stream.write(text)
