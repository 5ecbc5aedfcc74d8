"""The agent's end of the nodes, without any."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest

from autotune.machine.node import node_facts
from tests.programs.processes import wait_for
from trials import wire
from trials.channels.beats import beat_key
from trials.channels.store import SignedStore, join_store
from trials.errors import NodeRefused, NodesMissing
from trials.launchers.commands import Command
from trials.launchers.node_messages import AGENT_NAME, node_name
from trials.launchers.nodes import Nodes


class NoNodes:
    """A starter of nodes that never come. It joins the agent's store in their place."""

    store: SignedStore

    def start(self, agent: str, token: str) -> None:
        self.store = join_store(agent, token)

    def revive(self, node: int) -> None:
        raise NotImplementedError

    def check(self, wanted: int) -> None:
        pass

    def end(self) -> None:
        pass

    def commands(self, places: Sequence[range], accelerator: str, request: Path, *, groups: int) -> tuple[Command, ...]:
        raise NotImplementedError


def test_nodes_hear_the_agent_while_it_gives_a_file_that_takes_long(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    os.mkfifo(slow := tmp_path / "index.npz")
    starter = NoNodes()
    with Nodes(1, 1, "127.0.0.1", node_facts(), starter, patience_seconds=0) as nodes:
        with pytest.raises(NodesMissing):
            nodes.require(1)
        giving = Thread(target=nodes.give_file, args=(slow,))
        giving.start()
        with slow.open("wb") as stream:  # both ends are open, and the file has no end yet
            first = beats(starter)
            wait_for(lambda: beats(starter) > first + 1)
            stream.write(b"the end")
        giving.join()
        # A write is not confirmed: another connection may find it later.
        wait_for(lambda: starter.store.read(f"files/{slow.name}"))
        assert starter.store.take_file(slow.name, tmp_path / "node").read_bytes() == b"the end"


def beats(starter: NoNodes) -> int:
    return int(starter.store.read(beat_key(AGENT_NAME)) or 0)


class TooSmall(NoNodes):
    """A starter of a node that has devices for one group of ranks."""

    def start(self, agent: str, token: str) -> None:
        super().start(agent, token)
        facts = node_facts()
        facts = replace(facts, hardware=replace(facts.hardware, devices=2))
        self.store.put(f"{node_name(0, 1)}/facts", wire.encode(facts))


def test_a_node_needs_devices_for_all_groups_that_work_at_once() -> None:
    expected = "has 2 devices, but the job uses 4 of each node; lower hardware.devices or search.parallel"
    with (
        Nodes(1, 2, "127.0.0.1", node_facts(), TooSmall(), groups=2, patience_seconds=60) as nodes,
        pytest.raises(NodeRefused, match=expected),
    ):
        nodes.require(1)


class OneUnfit(NoNodes):
    """A starter of two nodes, the second of which cannot take part."""

    def start(self, agent: str, token: str) -> None:
        super().start(agent, token)
        for number, problem in enumerate((None, "cannot take part: others use its devices")):
            self.store.put(f"{node_name(number, 1)}/facts", wire.encode(replace(node_facts(), problem=problem)))


def test_a_node_that_a_plan_does_not_need_may_be_unfit() -> None:
    starter = OneUnfit()
    with Nodes(2, 1, "127.0.0.1", node_facts(), starter, patience_seconds=60) as nodes:
        nodes.require(1)
        wait_for(lambda: starter.store.get(f"{node_name(1, 1)}/facts"))
        nodes.look()
        with pytest.raises(NodeRefused, match=r"node 1 \(.*\) cannot take part: others use its devices"):
            nodes.require(2)
        starter.store.put(f"{node_name(1, 2)}/facts", wire.encode(node_facts()))
        wait_for(lambda: starter.store.get(f"{node_name(1, 2)}/facts"))
        nodes.require(2)
