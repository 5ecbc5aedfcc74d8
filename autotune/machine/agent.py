"""Agents of a database: the heartbeat of this process, and whether the other processes are alive."""

import logging
import os
import platform
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Self
from uuid import uuid4

from autotune.errors import DeviceBusy
from storage.errors import DatabaseUnavailable, ResourceHeld, StorageError
from storage.records import AgentRecord, LaunchRecord
from storage.store import Store

# A choice: a heartbeat is one small transaction, and an agent that was killed is found after 30 s.
_BEAT_SECONDS = 5.0
_SILENT_BEATS = 6
"""An agent counts as ended when it sent no heartbeat during this many heartbeats of this process. Counting them needs
no common clock, and a lock that keeps the other process from writing also keeps this one from counting."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """Another agent as it was last seen."""

    record: AgentRecord
    silent: int
    """Beats of this process since its last one."""


class Agent:
    """Entry of this process in the store while the context lasts; a thread writes its heartbeat."""

    def __init__(self, store: Store, beat_seconds: float = _BEAT_SECONDS) -> None:
        self._store = store
        self._seconds = beat_seconds
        self._ended = Event()
        self._lock = Lock()
        self._seen: dict[str, _Sight] = {}
        self._thread = Thread(target=self._live, name="heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self.id = self._store.add_agent(machine(), process(os.getpid()) or "?").id
        self._look(0)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        try:
            self._store.end_agent(self.id)
        except DatabaseUnavailable as problem:  # others notice the missing heartbeat
            _log.warning("%s", problem)

    def take(self, resources: Collection[str]) -> None:
        """Lease the resources until this agent ends, including those of agents that have ended.

        Waits for the next heartbeat of a holder on another host, and raises DeviceBusy if it comes.
        """
        beats: dict[str, int] = {}  # of each holder when it was first seen
        while True:
            try:
                self._store.take_resources(self.id, resources, [other for other in self._seen if self.is_gone(other)])
                return
            except ResourceHeld as held:
                sight = None if self.is_gone(held.holder_id) else self._seen.get(held.holder_id)
                if sight is None:
                    continue
                record = sight.record
                if record.id not in beats:
                    _log.warning("%s; checking whether it is still running", _busy(held, record))
                if record.beats > beats.setdefault(record.id, record.beats):
                    raise DeviceBusy(f"{_busy(held, record)}; wait for it") from held
                self._ended.wait(self._seconds / 10)

    def another(self, among: Collection[str] | None = None) -> AgentRecord | None:
        """Return another agent that is alive, optionally one of those with given ids, or None.

        Waits for the next heartbeat of agents on other hosts.
        """
        self._look(0)
        others = self._seen.keys() - {self.id} if among is None else self._seen.keys() & set(among)
        first = {key: self._seen[key].record.beats for key in others}
        while True:
            present = [sight.record for key, sight in self._seen.items() if key in first and not self.is_gone(key)]
            for record in present:
                if lives(record) or record.beats > first[record.id]:
                    return record
            if not present:
                return None
            self._ended.wait(self._seconds / 10)

    def is_gone(self, agent_id: str | None) -> bool:
        """Return whether the agent has ended, its process on this host died, or its heartbeat stopped."""
        if agent_id is None:
            return True
        if agent_id not in self._seen:  # it may have started since the last beat
            self._look(0)
        sight = self._seen.get(agent_id)
        return sight is None or sight.silent >= _SILENT_BEATS or has_died(sight.record)

    @property
    def is_alone(self) -> bool:
        """Whether no other agent works with this database."""
        self._look(0)
        return all(other == self.id or self.is_gone(other) for other in tuple(self._seen))

    def _live(self) -> None:
        while not self._ended.wait(self._seconds):
            try:
                self._look(1)
            except StorageError as error:
                _log.info("the heartbeat could not be written: %s", error)

    def _look(self, beats: int) -> None:
        """Write a heartbeat, which counts as `beats`, and update what is known of the others."""
        with self._lock:
            seen: dict[str, _Sight] = {}
            for key, record in self._store.beat(self.id).items():
                before = self._seen.get(key)
                is_silent = before is not None and before.record.beats == record.beats
                seen[key] = _Sight(record=record, silent=before.silent + beats if before and is_silent else 0)
            self._seen = seen


def _busy(held: ResourceHeld, holder: AgentRecord) -> str:
    host, number = holder.machine.partition(" ")[0], holder.process.partition(" ")[0]
    return f"{held.resource.partition(' ')[0]} is used by process {number} on {host}"


def has_died(record: AgentRecord) -> bool:
    """Return whether its process is known to have ended; nothing is known of other hosts."""
    return record.machine == machine() and not lives(record) and not _is_hidden(_number(record))


def lives(record: AgentRecord) -> bool:
    """Return whether its process is known to run."""
    return record.machine == machine() and process(_number(record)) == record.process


def living(launch: LaunchRecord, agents: Mapping[str, AgentRecord]) -> AgentRecord | None:
    """Return the agent that runs the launch, or None if it is known to have ended."""
    agent = agents.get(launch.agent_id or "")
    return None if agent is None or has_died(agent) else agent


def place(record: AgentRecord) -> str:
    """Describe the process, and since when it sent no heartbeat."""
    where = f"process {record.process.partition(' ')[0]} on {record.machine.partition(' ')[0]}"
    silence = silent_minutes(record)
    return f"{where}, silent for {silence} min" if silence else where


def silent_minutes(record: AgentRecord) -> int:
    """Return the minutes since the last heartbeat; 0 for a process that is seen to run on this host."""
    return 0 if lives(record) else int((record.silent_seconds or 0) // 60)


def _number(record: AgentRecord) -> int:
    """Return the process number, or 0 where it is not known."""
    number = record.process.partition(" ")[0]
    return int(number) if number.isdigit() else 0


def _is_hidden(number: int) -> bool:
    """Return whether a process exists but cannot be inspected, as hosts may hide those of other users."""
    try:
        os.kill(number, 0)
    except PermissionError:
        return process(number) is None
    except (OSError, OverflowError):
        return False  # there is none
    return False


def machine() -> str:
    """Return a name for this boot of the host and this container: processes with equal names can see each other."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{platform.node()} {boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:  # no Linux: no process can be looked up
        return f"{platform.node()} {uuid4()}"


def process(number: int) -> str | None:
    """Return the number and the start time of a process, in ticks since boot; None when there is none."""
    try:
        # The start time tells a process from a later one that got its number.
        stat = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()  # proc_pid_stat(5): the name before may hold spaces
    return None if state == "Z" else f"{number} {fields[18]}"
