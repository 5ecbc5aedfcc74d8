"""Conditions during a trial, with real processes on the real CPU; NVIDIA's library is simulated."""

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import psutil
import pynvml
import pytest

from autotune.machine import conditions as machine_conditions
from autotune.machine.conditions import Conditions, Look, MachineWatch, StepEnd, conditions_of, disturbance
from autotune.machine.nvml import Activity
from tests.machines.simulated_nvml import simulate
from tests.values.storage import WORKLOAD

GPU = replace(WORKLOAD.hardware, devices=2, cpu_cores=16)
CPU = replace(GPU, accelerator="cpu", devices=2, cpu_cores=2)
QUIET = Conditions(cores=2, disturbing_cpu=0.0, own_cpu=1.5, disturbing_gpu=False, throttled=(), power_watts=None)
SPIN = "while True: pass"
SLEEP = "import time; time.sleep(60)"


@contextmanager
def child(program: str) -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def look(
    seconds: float = 0.0,
    *,
    busy: float = 0.0,
    own: float = 0.0,
    pids: tuple[int, ...] = (),
    slowdowns: tuple[str, ...] = (),
) -> Look:
    """Return a sample in which 1 and 2 are the own processes."""
    activity = Activity(pids=frozenset(pids), slowdowns=frozenset(slowdowns), energy_joules=None)
    return Look(seconds=seconds, busy_seconds=busy, own_seconds=own, own_pids=frozenset({1, 2}), activity=activity)


def test_what_others_use_is_what_is_left_of_the_busy_time() -> None:
    found = conditions_of([look(10, busy=100, own=5), look(11, busy=103, own=7), look(14, busy=107, own=9)], 2)
    assert (found.disturbing_cpu, found.own_cpu) == (3 / 4, 1.0)


def test_the_time_of_an_own_process_that_ends_is_not_counted_as_disturbing() -> None:
    found = conditions_of(
        [look(0, own=500), look(2, busy=3, own=503), look(3, busy=4, own=3), look(4, busy=6, own=5)], 2
    )
    assert found.disturbing_cpu == pytest.approx(1 / 4)


def test_disturbing_cpu_time_is_never_negative() -> None:
    assert conditions_of([look(), look(2, busy=1.9, own=2)], 2).disturbing_cpu == 0


def test_a_moment_is_too_short_to_count_time() -> None:
    found = conditions_of([look(), look(0.01, busy=0.02)], 2)
    assert (found.disturbing_cpu, found.own_cpu) == (0, 0)


@pytest.mark.parametrize(
    ("looks", "stranger"),
    [
        ([(), (1,), (1, 2)], False),
        ([(), (1, 3), (1,)], True),
        ([(7, 8), (7, 8)], False),
        ([(3,), (1,)], False),
    ],
    ids=["only ours", "a stranger for a moment", "numbers from outside a container", "gone before ours began"],
)
def test_another_process_on_our_devices_is_seen(looks: list[tuple[int, ...]], stranger: bool) -> None:
    assert conditions_of([look(pids=pids) for pids in looks], 2).disturbing_gpu is stranger


def test_every_slowdown_is_kept() -> None:
    looks = [look(), look(slowdowns=("thermal", "power brake")), look(slowdowns=("thermal",))]
    assert conditions_of(looks, 2).throttled == ("power brake", "thermal")


@pytest.mark.parametrize(
    ("energies", "expected"),
    [((100.5, 700.0, 350.5), 125.0), ((100.0, None, 200.0), 50.0), ((100.0, None), None), ((100.0,), None), ((), None)],
)
def test_power_is_that_of_the_timed_steps_whatever_starting_and_loading_take(
    energies: tuple[float | None, ...], expected: float | None
) -> None:
    steps = [StepEnd(seconds=60.0 + second, energy_joules=energy) for second, energy in enumerate(energies)]
    assert conditions_of([look(), look()], 2, steps).power_watts == expected


@pytest.mark.parametrize(
    ("cores", "ranks", "disturbing", "disturbed"),
    [
        (2, 2, 0.09, False),
        (2, 2, 0.2, True),
        (2, 4, 0.0, False),
        (2, 4, 0.2, True),
        (64, 2, 3.0, False),  # what a large machine does by itself
        (64, 2, 4.0, True),
        (8, 3, 2.0, False),  # three ranks of two threads leave two cores
        (8, 3, 2.5, True),
    ],
)
def test_on_a_cpu_others_count_when_they_take_cores_from_ranks(
    cores: int, ranks: int, disturbing: float, disturbed: bool
) -> None:
    conditions = replace(QUIET, cores=cores, disturbing_cpu=disturbing)
    reason = disturbance(conditions, replace(CPU, cpu_cores=cores, devices=ranks))
    assert reason == (f"other processes used {disturbing:.1f} of {cores} cores" if disturbed else None)


def test_cores_of_other_groups_of_ranks_are_not_free() -> None:
    half = replace(CPU, cpu_cores=4, devices=4)  # of 8 cores
    others = replace(QUIET, cores=8, disturbing_cpu=2.0)
    assert disturbance(others, half) is None
    assert disturbance(others, half, groups=2) == "other processes used 2.0 of 8 cores"


def test_cores_beyond_a_quota_are_free_for_others() -> None:
    under_quota = replace(CPU, cpu_cores=4, devices=4)  # of 16 cores
    assert disturbance(replace(QUIET, cores=16, disturbing_cpu=12.5), under_quota) is None
    reason = disturbance(replace(QUIET, cores=16, disturbing_cpu=13.0), under_quota)
    assert reason == "other processes used 13.0 of 16 cores"


@pytest.mark.parametrize(
    ("own", "disturbing", "disturbed"), [(2.0, 12.0, False), (2.0, 13.0, True), (15.9, 0.1, False), (15.0, 1.0, True)]
)
def test_with_accelerators_other_processes_count_when_nearly_all_cores_are_busy(
    own: float, disturbing: float, disturbed: bool
) -> None:
    reason = disturbance(replace(QUIET, cores=16, own_cpu=own, disturbing_cpu=disturbing), GPU)
    assert (reason is not None) is disturbed


def test_every_reason_is_named() -> None:
    disturbed = replace(QUIET, disturbing_cpu=1.31, disturbing_gpu=True, throttled=("power brake", "thermal"))
    assert disturbance(disturbed, CPU) == (
        "other processes used 1.3 of 2 cores; another process computed on the devices; "
        "the devices were slowed down: power brake, thermal"
    )


def test_a_busy_process_is_disturbing_unless_it_is_an_own_process() -> None:
    """Two watches at the same time see the same other load."""
    with child(SLEEP) as idle, child(SPIN) as busy:
        inside, outside = MachineWatch(CPU), MachineWatch(CPU, root=idle.pid)
        before, began = cpu_seconds(busy), time.monotonic()
        with inside, outside:
            time.sleep(3)
        used = (cpu_seconds(busy) - before) / (time.monotonic() - began)
    ours, theirs = inside.conditions, outside.conditions
    assert ours.own_cpu == pytest.approx(used, abs=0.15)
    assert theirs.own_cpu < 0.1
    assert theirs.disturbing_cpu >= used - 0.15
    assert theirs.disturbing_cpu - ours.disturbing_cpu == pytest.approx(used, abs=0.15)
    assert used < 0.3 or disturbance(theirs, CPU) is not None
    assert (ours.disturbing_gpu, ours.throttled, ours.power_watts) == (False, (), None)


@pytest.mark.parametrize(
    ("shown", "usable", "seen"),
    [((0, 2, 4), {0, 4}, 2 * 30.0), ((0, 1), {8, 9}, 2 * 30.0), ((0, 1, 2), {1}, 30.0)],
    ids=["cores between are offline", "a container counts its own from 0", "one of three"],
)
def test_busy_cores_are_found_by_their_number(
    shown: tuple[int, ...], usable: set[int], seen: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, ticks = tmp_path / "stat", os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(machine_conditions, "_STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable)

    def show(seconds: int) -> None:
        every = (f"cpu{core} {seconds * ticks} 0 0 9 9 9 9 0 0 0" for core in shown)
        stat.write_text("\n".join(["cpu  99 0 0 9 9 9 9 0 0 0", *every, "intr 99"]))

    show(0)
    with MachineWatch(CPU, interval_seconds=60.0) as watch:
        show(30)
        began = time.monotonic()
        time.sleep(1.1)
    seconds = time.monotonic() - began
    assert watch.conditions.disturbing_cpu * seconds == pytest.approx(seen, rel=0.1)


def test_children_that_end_meanwhile_count_as_own_processes() -> None:
    watch, before, began = MachineWatch(CPU), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
    with watch:
        for _ in range(3):
            with child(SPIN):
                time.sleep(0.5)
        time.sleep(0.1)
    used = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    assert watch.conditions.own_cpu >= 0.7 * used / (time.monotonic() - began)


def test_the_energy_of_one_node_is_not_taken_for_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    energies = count(1000)
    simulate(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda _: next(energies))
    here, both = MachineWatch(replace(GPU, devices=2)), MachineWatch(replace(GPU, devices=4, nodes=2))
    for watch in (here, both):
        with watch:
            watch.step()
            watch.step()
    assert here.conditions.power_watts is not None
    assert both.conditions.power_watts is None


def test_a_watch_on_accelerators_reads_what_they_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    def processes(handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=psutil.Process().pid if handle == "0" else 1)]

    energies = iter([1000, 2000, 4000, 5000, 34000, 45000, 90000, 90000])
    simulate(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetComputeRunningProcesses", processes)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", lambda handle: next(energies))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    watch = MachineWatch(GPU)
    with watch:
        began = time.monotonic()
        watch.step()
        watch.step()
        took = time.monotonic() - began
    found = watch.conditions
    assert (found.disturbing_gpu, found.throttled) == (True, ())
    assert found.power_watts is not None
    assert found.power_watts >= 70.0 / took
