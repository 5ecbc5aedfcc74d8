"""The nodes of a job, as their agent sees them: which have joined, which orders they have, and which are lost."""

import logging
import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trials import wire
from trials.channels.beats import BEAT_SECONDS, MISSED_BEATS, Heart
from trials.channels.message_queue import Inbox, Outbox
from trials.channels.store import StoreChannel, join_store, serve_store
from trials.errors import NodeRefused, NodesMissing, NotSigned, WireError
from trials.launchers.commands import Command
from trials.launchers.node_messages import (
    AGENT_NAME,
    COUNT,
    Leave,
    Left,
    News,
    NodeFacts,
    Order,
    RanksEnded,
    RanksState,
    Welcome,
    difference_of,
    node_name,
    shortage_of,
)

_log = logging.getLogger(__name__)
# A choice: short next to the beats of nodes, see `BEAT_SECONDS`.
_POLL_SECONDS = 0.05
_LEAVE_SECONDS = 15.0
"""For nodes to end their ranks and themselves: the ranks get SIGTERM, and two seconds later SIGKILL."""


class Starter(Protocol):
    """Starter of the program of a node, `trials.run.node`, once on every node: by ssh, or by a tool of the cluster."""

    def start(self, agent: str, token: str) -> None:
        """Begin to start all nodes, and say what the user has to do. `agent` is `HOST:PORT` of the store."""

    def revive(self, node: int) -> None:
        """Start a node again that is lost, or say what the user has to do."""

    def check(self, wanted: int) -> None:
        """Raise NodesMissing, with host and reason, when one of the first `wanted` nodes can no longer come."""

    def end(self) -> None:
        """End what is left of the processes that were started here."""

    def commands(self, places: Sequence[range], accelerator: str, request: Path, *, groups: int) -> tuple[Command, ...]:
        """Return commands that serve the request in a folder without an agent, by the ranks of each node."""


@dataclass(slots=True, kw_only=True)
class _Present:
    """A node that takes part."""

    name: str
    host: str
    orders: Outbox
    news: Inbox
    lost: str | None = None
    """Why it takes part no longer."""
    states: dict[str, RanksState] = field(default_factory=dict)
    """States of the node's ranks, by the name of their group."""
    ended: dict[str, RanksEnded] = field(default_factory=dict)


class Nodes:
    """All nodes of a job. They come when they are first required, and have left when the context is."""

    def __init__(
        self,
        count: int,
        devices: int,
        address: str,
        facts: NodeFacts,
        starter: Starter,
        *,
        groups: int = 1,
        patience_seconds: float,
    ) -> None:
        """Serve `count` nodes with `devices` ranks each at an `address` of this machine, which is node 0.

        Of such ranks there are `groups` at the same time, each with devices of its own. `facts` are those of this
        machine. A node may take `patience_seconds` to come.
        """
        self.devices = devices
        self._groups = groups
        self._facts, self.starter, self._address = facts, starter, address
        self._patience_seconds = patience_seconds
        self._token = secrets.token_hex(32)
        self._seen = dict.fromkeys(range(count), 0)
        """How often each node has come."""
        self._present: dict[int, _Present] = {}
        self._strangers: dict[int, str] = {}
        """Why the last process that came as a node was not let in: it had another token."""
        self._refused: dict[int, str] = {}
        """Why the last one that had the token was not let in."""
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._open = ExitStack()
        self._has_started = False

    def __enter__(self) -> "Nodes":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _start(self) -> None:
        self._store = serve_store(self._address, self._token)
        self._store.put(COUNT, str(len(self._seen)))
        # A connection of its own: signs of life must not wait behind a file on the other one.
        heart = Heart(join_store(self._store.address, self._token), AGENT_NAME)
        heart.beat(())
        # Callbacks run in reverse: nodes are dismissed while the thread still listens, and their starter ends last.
        self._open.callback(self.starter.end)
        thread = threading.Thread(target=self._listen, args=(heart,), name="nodes", daemon=True)
        thread.start()
        self._open.callback(thread.join)
        self._open.callback(self._stopped.set)
        self._open.callback(self._dismiss)
        self.starter.start(self._store.address, self._token)
        self._has_started = True

    def require(self, wanted: int) -> None:
        """Wait until the first `wanted` nodes take part.

        Raise NodesMissing when one does not come in time or cannot come, and NodeRefused for one with other devices or
        software.
        """
        with self._lock:
            if not self._has_started:
                self._start()
            for node in range(wanted):
                if (known := self._present.get(node)) and known.lost:
                    self.starter.revive(node)
        deadline = time.monotonic() + self._patience_seconds
        while missing := [node for node in range(wanted) if node not in self._present or self._present[node].lost]:
            self.look()
            for node in missing:
                if reason := self._refused.get(node):
                    raise NodeRefused(reason)
            self.starter.check(wanted)
            if time.monotonic() > deadline:
                raise NodesMissing(self._missing_text(missing))
            time.sleep(_POLL_SECONDS)

    def places(self, world_size: int) -> list[range]:
        """Return the ranks on each of the nodes that they need; the first are on the first node."""
        size = self.devices
        return [range(first, min(first + size, world_size)) for first in range(0, world_size, size)]

    def channel(self, name: str) -> StoreChannel:
        """Return a channel for the messages of one request."""
        return StoreChannel(self._store, name, Path())

    def give_file(self, path: Path) -> None:
        """Offer a file to the nodes."""
        with self._lock:
            self._store.give_file(path)

    def forget(self, prefix: str) -> None:
        """Delete the messages whose keys begin with `prefix`."""
        self._store.forget(prefix)

    def order(self, node: int, order: Order) -> None:
        """Send an order to a node; it is in vain for one that is lost."""
        with self._lock:
            self._present[node].orders.send(wire.encode(order, Order))

    def host(self, node: int) -> str:
        return self._present[node].host

    def lost(self, node: int) -> str | None:
        """Return why a node takes part no longer; None while it does."""
        return self._present[node].lost

    def state(self, node: int, group: str) -> RanksState | None:
        """Return what a node has said last of the ranks of a group."""
        return self._present[node].states.get(group)

    def ending(self, node: int, group: str) -> RanksEnded | None:
        """Return what a node has said at the end of a group."""
        return self._present[node].ended.get(group)

    def look(self) -> None:
        """Let in nodes that have come, and read the messages of all nodes.

        One that is refused matters once it is required: a plan may need fewer nodes than the job has.
        """
        with self._lock:
            for number in self._seen:
                self._let_in(number)
            for node in self._present.values():
                self._read(node)

    def _let_in(self, number: int) -> None:
        known, coming = self._present.get(number), self._seen[number] + 1
        if known and not known.lost:
            return  # one that comes in place of a node that is there has to wait
        # Keys of each coming, so that messages of a lost process are never taken for those of its successor.
        name = node_name(number, coming)
        try:
            text = self._store.get(f"{name}/facts")
        except NotSigned:
            self._seen[number] = coming
            self._strangers[number] = "a process with another token has come in its place"
            return
        if text is None:
            return
        self._seen[number] = coming
        reason, host = self._refusal(number, text)
        self._store.put(f"{name}/welcome", wire.encode(Welcome(refusal=reason)))
        if reason is not None:
            self._refused[number] = reason
            return
        self._refused.pop(number, None)
        self._present[number] = _Present(
            name=name, host=host, orders=Outbox(self._store, f"{name}/orders"), news=Inbox(self._store, f"{name}/news")
        )

    def _refusal(self, number: int, text: str) -> tuple[str | None, str]:
        """Return (why the node cannot take part, its name)."""
        try:
            facts = wire.decode(NodeFacts, text)
        except WireError as error:
            return f"node {number} runs another version of vlm-autotune than this one; install the same ({error})", ""
        difference = difference_of(facts, self._facts, self.devices * self._groups)
        if difference is None and (less := shortage_of(facts, self._facts)):
            _log.warning(
                "node %d (%s) has %s, for which plans are made: all ranks wait for the slowest ones, and ranks are "
                "killed where memory is short; choose nodes of one kind, or start the command on the smallest one",
                number,
                facts.host,
                less,
            )
        return (f"node {number} ({facts.host}) {difference}" if difference else None), facts.host

    def _read(self, node: _Present) -> None:
        while node.lost is None and (text := node.news.next()) is not None:
            match wire.decode(News, text):
                case RanksState() as state:
                    node.states[state.group] = state
                case RanksEnded() as end:
                    node.ended[end.group] = end
                    node.states.pop(end.group, None)
                case Left(reason=reason):
                    node.lost = f"node {node.host} has left: {reason}"

    def _listen(self, heart: Heart) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            # Without the lock, which a large file to give may hold for longer than the nodes wait for a sign of life.
            there = {node.name: node for node in tuple(self._present.values()) if node.lost is None}
            try:
                missed = heart.beat(there)
            except NotSigned as error:
                missed = {}
                self._strangers[0] = str(error)
            for name, count in missed.items():
                if count > MISSED_BEATS:
                    node = there[name]
                    node.lost = f"node {node.host} is lost: it gave no sign of life {MISSED_BEATS} times in a row"
                    # Once it goes on, as after a suspension, it would hold its devices for its successor in vain.
                    heart.give_up(name)

    def _missing_text(self, missing: list[int]) -> str:
        reasons = [
            (known.lost if (known := self._present.get(node)) else None)
            or f"node {node} has not come within {self._patience_seconds:g} s"
            + (f" ({self._strangers[node]})" if node in self._strangers else "")
            for node in missing
        ]
        return f"{'; '.join(reasons)}; its own output says why, and hardware.start_timeout is how long it may take"

    def _dismiss(self) -> None:
        """Tell all nodes to leave, and wait until they have."""
        with self._lock:
            staying = [node for node in self._present.values() if node.lost is None]
            for node in staying:
                node.orders.send(wire.encode(Leave(), Order))
        deadline = time.monotonic() + _LEAVE_SECONDS
        while time.monotonic() < deadline and any(node.lost is None for node in staying):
            with self._lock:
                for node in staying:
                    self._read(node)
            time.sleep(_POLL_SECONDS)
