"""Load and clocks of the machine during a trial, which decide whether its measurement can be trusted."""

import os
import re
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Protocol, Self

import psutil

from autotune.machine.hardware import accelerators_of
from autotune.machine.nvml import Activity, activity_of
from trials.workload import Hardware

# A choice: a trial of a few seconds still has several samples.
_INTERVAL_SECONDS = 0.5
_STAT = Path("/proc/stat")
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
_LEAST_SECONDS = 1.0
"""The kernel counts CPU time in ticks of up to 10 ms on every core, too coarse for shorter times."""
_CORES_SHARE = 0.05
"""Share of the cores that others may take. Spread evenly it makes a step 5 % longer, and more when it slows down one
rank, for which the others wait. An idle machine needs much less: 0.01 of 2 cores were counted on a Linux virtual
machine, with idle and with busy ranks."""
_FULL_SHARE = 0.9
"""Share of the cores in use above which processes sometimes wait for a core. Ranks on accelerators need a core only to
launch the next kernels, so below it other processes do not slow them down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """Load, clocks and power of the machine over some time."""

    cores: int
    """Number that this process may run on; a quota may allow it to keep fewer busy."""
    disturbing_cpu: float
    """Mean number of cores that other processes used, or other virtual machines took (`steal`)."""
    own_cpu: float
    """Mean number of cores that the processes of this search used."""
    disturbing_gpu: bool
    """Whether another process computed on the devices."""
    throttled: tuple[str, ...]
    """Reasons for which the devices ran slower than they should, at any time."""
    power_watts: float | None
    """Mean power of all devices from the end of the first timed step to the end of the last one; None where they do not
    count energy, on several nodes, and without two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The machine at one moment."""

    seconds: float
    """On time.monotonic's clock."""
    busy_seconds: float
    """CPU time since the start of the machine, of all processes, on the cores that this process may use."""
    own_seconds: float
    """CPU time of the processes of this search and of their ended children."""
    own_pids: frozenset[int]
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd:
    """The moment at which a timed step has ended."""

    seconds: float
    """On time.monotonic's clock."""
    energy_joules: float | None
    """Of `Activity`."""


class Watch(Protocol):
    """Observer of the machine while its context lasts."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def step(self) -> None:
        """Note that a timed step has just ended."""

    @property
    def conditions(self) -> Conditions:
        """Conditions over the whole time; available once the context is left."""


class MachineWatch:
    """Sample the state of the machine in a thread while the context lasts.

    `root` and its descendants are the own processes. Two samples a second take a few milliseconds of own CPU time.
    All samples are kept, a kilobyte each.
    """

    def __init__(
        self,
        hardware: Hardware,
        root: int | None = None,
        *,
        group: int = 0,
        interval_seconds: float = _INTERVAL_SECONDS,
    ) -> None:
        """`root` is by default this process; `group` is the number of the group of devices in use."""
        self._hardware = hardware
        self._interval_seconds = interval_seconds
        self._group = group
        self._root = psutil.Process(root)
        self._cores = os.sched_getaffinity(0)
        self._shown = shown_cores(self._cores, busy_seconds(_STAT.read_text()))
        self._looks: list[Look] = []
        self._steps: list[StepEnd] = []
        self._ended = Event()
        self._thread = Thread(target=self._look_on, name="conditions", daemon=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            uuids = [one.uuid for one in accelerators_of(self._hardware, self._group)]
            self._activity = stack.enter_context(activity_of(uuids))
            self._look()
            self._thread.start()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._open:
            self._ended.set()
            self._thread.join()
            self._look()

    def step(self) -> None:
        # The devices of other nodes count as well, and only those of this one can be read.
        energy = self._activity().energy_joules if self._hardware.nodes == 1 else None
        self._steps.append(StepEnd(seconds=time.monotonic(), energy_joules=energy))

    @property
    def conditions(self) -> Conditions:
        return conditions_of(self._looks, len(self._cores), self._steps)

    def _look_on(self) -> None:
        while not self._ended.wait(self._interval_seconds):
            self._look()

    def _look(self) -> None:
        activity = self._activity()
        own = _family(self._root)  # after the devices, so that a rank that has just started is known
        seconds = time.monotonic()
        busy = busy_seconds(_STAT.read_text())
        own_seconds = 0.0
        for process in own:
            with suppress(psutil.NoSuchProcess):  # it has just ended, and its parent has its time
                spent = process.cpu_times()
                own_seconds += spent.user + spent.system + spent.children_user + spent.children_system
        self._looks.append(
            Look(
                seconds=seconds,
                busy_seconds=sum(seconds for core, seconds in busy.items() if core in self._shown),
                own_seconds=own_seconds,
                own_pids=frozenset(process.pid for process in own),
                activity=activity,
            )
        )


def busy_seconds(stat: str) -> dict[int, float]:
    """Return the CPU time of all processes on each core, by its number, from the text of /proc/stat.

    Interrupts are left out: they are charged to no process, and own processes cause them too.
    """
    lines = (line.split() for line in stat.splitlines() if re.match(r"cpu\d", line))
    ticks = {int(name[3:]): list(map(int, times)) for name, *times in lines}
    # user, nice, system and steal; see proc_stat(5)
    return {core: (sum(times[:3]) + sum(times[7:8])) / _TICKS_PER_SECOND for core, times in ticks.items()}


def shown_cores(cores: Collection[int], shown: Mapping[int, float]) -> frozenset[int]:
    """Return the numbers under which /proc/stat shows the `cores` that this process may use.

    In some containers (lxcfs) it shows the container's cores alone, counted from 0.
    """
    return frozenset(cores if shown.keys() >= set(cores) else shown)


def conditions_of(looks: Sequence[Look], cores: int, steps: Sequence[StepEnd] = ()) -> Conditions:
    """Summarize samples, one or more in order of time as `steps` are, of processes that may run on these `cores`."""
    first, last = looks[0], looks[-1]
    seconds = last.seconds - first.seconds
    # The time of a process disappears from the sum if it ends before its parent waits for it; that is no negative use.
    own = sum(max(0.0, later.own_seconds - earlier.own_seconds) for earlier, later in pairwise(looks))
    disturbing = max(0.0, last.busy_seconds - first.busy_seconds - own)
    # In some containers NVML reports process numbers of the host. None of them is an own process, so nothing is known.
    ours: frozenset[int] = frozenset().union(*(look.own_pids for look in looks))
    return Conditions(
        cores=cores,
        disturbing_cpu=disturbing / seconds if seconds >= _LEAST_SECONDS else 0.0,
        own_cpu=own / seconds if seconds >= _LEAST_SECONDS else 0.0,
        disturbing_gpu=any(look.activity.pids & ours and look.activity.pids - ours for look in looks),
        throttled=tuple(sorted(frozenset().union(*(look.activity.slowdowns for look in looks)))),
        power_watts=_power_watts(steps[0], steps[-1]) if len(steps) > 1 else None,
    )


def _power_watts(first: StepEnd, last: StepEnd) -> float | None:
    if first.energy_joules is None or last.energy_joules is None:
        return None
    return (last.energy_joules - first.energy_joules) / (last.seconds - first.seconds)


def disturbance(conditions: Conditions, hardware: Hardware, groups: int = 1) -> str | None:
    """Return why a measurement under these conditions should not be trusted; None when it can be.

    `groups` groups of ranks worked at the same time.
    """
    cores, disturbing = conditions.cores, conditions.disturbing_cpu
    if hardware.accelerator == "cpu":
        # Ranks share the cores evenly, as threads; the remainder is free for others, and so is what a quota forbids.
        unused = hardware.cpu_cores % hardware.of_node if hardware.of_node < hardware.cpu_cores else 0
        free = max(0, cores - groups * (hardware.cpu_cores - unused))
        takes_cores = disturbing - free > _CORES_SHARE * cores
    else:
        takes_cores = disturbing > _CORES_SHARE * cores and disturbing + conditions.own_cpu > _FULL_SHARE * cores
    reasons = []
    if takes_cores:
        reasons.append(f"other processes used {disturbing:.1f} of {cores} cores")
    if conditions.disturbing_gpu:
        reasons.append("another process computed on the devices")
    if conditions.throttled:
        reasons.append(f"the devices were slowed down: {', '.join(conditions.throttled)}")
    return "; ".join(reasons) or None


def _family(root: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return [root, *root.children(recursive=True)]
    return []
