"""A node: it starts ranks for an agent on another machine, passes requests on to them, and ends them.

The agent's store is all that both share. A node ends with its ranks when the agent says so, has ended, or is not heard.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trials import wire
from trials.channels.beats import BEAT_SECONDS, MISSED_BEATS, Heart, beat_key
from trials.channels.message_queue import Inbox, Outbox
from trials.channels.store import SignedStore, join_store
from trials.errors import NodeRefused, NotSigned
from trials.launchers.commands import rank_environments
from trials.launchers.node_messages import (
    AGENT,
    AGENT_NAME,
    COUNT,
    FILES,
    TOKEN,
    EndRanks,
    Leave,
    Left,
    News,
    NodeFacts,
    Order,
    RanksEnded,
    RanksState,
    ServeRequest,
    StartRanks,
    Welcome,
    node_name,
)
from trials.launchers.processes import Processes, crash_of

_TORCHRUN = "TORCHELASTIC_RUN_ID"
"""A variable of processes whose parent is torchrun."""
# A choice: a request begins 0.05 s late at most, next to trials of many seconds.
_POLL_SECONDS = 0.05
_LOG_BYTES = 1 << 16
"""Of the end of each log that the agent gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccess:
    """Where a node finds its agent, and what it has to present."""

    address: str
    """`HOST:PORT` of the store."""
    token: str = field(repr=False)
    number: int
    """Of the node, as the agent counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a node works with."""

    facts: NodeFacts
    address: str
    """At which its ranks meet others."""
    folder: Path
    """For the logs of the ranks, and files of the agent."""
    show: Callable[[str], None]
    """Shows what people should know."""
    stops: Callable[[], bool]
    """Returns whether the node was asked to end."""


def serve_agent(access: AgentAccess, around: Surroundings) -> None:
    """Serve until the agent has no more work, or this node is asked to end.

    Then its ranks get SIGTERM, on which a training ends after its step, with a checkpoint, and the node ends with them.
    Raise ConnectionError when the agent cannot be reached or has ended, NotSigned for a wrong token, and NodeRefused.
    """
    store, number = join_store(access.address, access.token), access.number
    name = node_name(number, store.take_number(f"comings/{number}"))
    try:
        is_agent = store.read(beat_key(AGENT_NAME)) is not None
    except NotSigned as error:
        store.put(f"{name}/facts", "")  # so that the agent can say what has happened here
        raise NodeRefused(
            f"the token of this node is not that of the agent at {access.address}; take the agent's, which is new for "
            "each command"
        ) from error
    if not is_agent:
        raise ConnectionError(f"there is no agent of autotune at {access.address}")
    if (count := store.get(COUNT)) is not None and number >= int(count):
        raise NodeRefused(
            f"there is no node {number}: the agent serves {count}, with numbers from 0; give one of these"
        )
    heart = _HeartBeat(access, name, around.show)
    store.put(f"{name}/facts", wire.encode(around.facts))
    around.show(f"Node {number} ({around.facts.host}) waits for the agent at {access.address}")
    with heart:
        while (answer := store.get(f"{name}/welcome")) is None:
            if around.stops():
                return
            time.sleep(_POLL_SECONDS)
        if reason := wire.decode(Welcome, answer).refusal:
            raise NodeRefused(reason)
        around.show(f"Node {number} ({around.facts.host}) takes part")
        node = _Node(access, store, name, around)
        heart.ranks = node
        try:
            node.serve()
            why = "it was asked to end" if around.stops() else "its work is done"
            node.leave(why)
            around.show(f"Node {number} ({around.facts.host}) leaves: {why}")
        except BaseException as error:
            node.leave(str(error) or type(error).__name__)
            raise
        finally:
            node.end()


class _Group:
    """The ranks of one group on this node."""

    def __init__(self, order: StartRanks, processes: Processes) -> None:
        self.order, self.processes = order, processes
        self.sent: RanksState | None = None

    @property
    def runs(self) -> bool:
        """Whether a rank still runs."""
        return len(self.processes.dead()) < self.order.ranks

    @property
    def state(self) -> RanksState:
        ended = self.processes.dead().items()
        first = self.order.first_rank
        return RanksState(
            group=self.order.group,
            pids=self.processes.pids,
            ended=tuple(
                crash_of(first + place, code, short_of_memory=self.processes.short_of_memory) for place, code in ended
            ),
        )


class _Node:
    def __init__(self, access: AgentAccess, store: SignedStore, name: str, around: Surroundings) -> None:
        self._access, self._store, self._around = access, store, around
        self._orders, self._news = Inbox(store, f"{name}/orders"), Outbox(store, f"{name}/news")
        self._groups: dict[str, _Group] = {}

    def serve(self) -> None:
        """Follow the orders of the agent, and send it states of ranks, until it says to leave or all have stopped."""
        is_stopping = False
        while not is_stopping or any(group.runs for group in self._groups.values()):
            if self._around.stops() and not is_stopping:
                is_stopping = True
                for group in self._groups.values():
                    group.processes.stop()
            text = self._orders.next()
            match None if text is None else wire.decode(Order, text):
                case StartRanks() as order:
                    self._groups[order.group] = _Group(order, self._started(order))
                case ServeRequest() as order:
                    self._pass_on(order)
                case EndRanks() as order:
                    self._end(order.group)
                case Leave():
                    return
                case None:
                    time.sleep(_POLL_SECONDS)
            self._send_states()

    def leave(self, reason: str) -> None:
        """Tell the agent that this node ends, where it can be reached."""
        with suppress(ConnectionError):
            self._send(Left(reason=reason))

    def end(self) -> None:
        """End all ranks."""
        for group in tuple(self._groups.values()):
            group.processes.end()

    def _started(self, order: StartRanks) -> Processes:
        environments = rank_environments(
            order.world_size,
            order.accelerator,
            group=order.number,
            groups=order.groups,
            ranks=range(order.first_rank, order.first_rank + order.ranks),
            address=self._around.address,
        )
        of_node = {AGENT: self._access.address, TOKEN: self._access.token, FILES: str(self._files)}
        return Processes([{**each, **of_node} for each in environments], self._logs(order.group))

    def _pass_on(self, order: ServeRequest) -> None:
        self._files.mkdir(exist_ok=True)
        for name in order.files:
            self._store.take_file(name, self._files)
        with suppress(ConnectionError):  # a rank has ended: the agent gets to know by the state
            self._groups[order.group].processes.send(order.channel)

    def _end(self, group: str) -> None:
        self._groups.pop(group).processes.end()
        logs = sorted(self._logs(group).glob("*.log"))
        self._send(RanksEnded(group=group, logs=tuple((log.name, _end_of(log)) for log in logs)))

    def _send_states(self) -> None:
        for group in self._groups.values():
            if (state := group.state) != group.sent:
                group.sent = state
                self._send(state)

    def _send(self, news: News) -> None:
        self._news.send(wire.encode(news, News))

    @property
    def _files(self) -> Path:
        return self._around.folder / "files"

    def _logs(self, group: str) -> Path:
        return self._around.folder / group


class _HeartBeat:
    """Signs of life in one thread, and in another the end of this process once the agent gives none any more.

    While the network is cut, calls of the store wait, also those of the node itself.
    """

    def __init__(self, access: AgentAccess, name: str, show: Callable[[str], None]) -> None:
        self._access, self._name, self._show = access, name, show
        self._missed = 0
        self._parent = os.getppid()
        self._stopped = threading.Event()
        self.ranks: _Node | None = None

    def __enter__(self) -> None:
        for work in (self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def _beat(self) -> None:
        try:
            heart = Heart(join_store(self._access.address, self._access.token), self._name)
            while not self._stopped.wait(BEAT_SECONDS):
                if heart.beat([AGENT_NAME])[AGENT_NAME] == 0:
                    self._missed = 0
                if heart.is_given_up:
                    self._give_up("has given up this node, which gave no sign of life")
        except (ConnectionError, NotSigned):  # the agent has ended: its signs of life stay away
            return

    def _watch(self) -> None:
        while not self._stopped.wait(BEAT_SECONDS):
            # Counted in a thread that never calls the store, where it would wait as well.
            self._missed += 1
            if self._missed > MISSED_BEATS:
                self._give_up("is not heard any more")

    def _give_up(self, why: str) -> None:
        try:
            with suppress(OSError):  # the process that reads this output may have ended
                self._show(f"The agent at {self._access.address} {why}; this node ends its ranks")
            if self.ranks is not None:
                self.ranks.end()
            # While the network is cut, torchrun would wait for the others for minutes. Once it has ended, the parent of
            # this process is one that has nothing to do with it.
            if _TORCHRUN in os.environ and os.getppid() == self._parent:
                os.kill(self._parent, signal.SIGKILL)
        finally:
            # Not `sys.exit`: the main thread may wait in a call of the store for as long as the network is cut.
            os._exit(os.EX_UNAVAILABLE)


def _end_of(log: Path) -> str:
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _LOG_BYTES))
        return stream.read().decode(errors="replace")
