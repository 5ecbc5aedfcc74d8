"""The profile times a device and the host that enqueues its work apart."""

from dataclasses import dataclass

import pytest
import torch

from trials.tasks.profiling import ahead
from trials.tasks.profiling.probes import Probe, Run

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@dataclass
class Clock:
    now: float = 0.0

    def running(self, seconds: float) -> Run:
        def run(states: torch.Tensor) -> torch.Tensor:
            self.now += seconds
            return states * 2

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(ahead, "now", lambda _: clock.now)
    monkeypatch.setattr("trials.tasks.profiling.ahead.time.perf_counter", lambda: clock.now)
    return clock


def probes(clock: Clock) -> list[Probe]:
    """A small and a large vision probe, and one of a kind of which a stage has one."""
    states = torch.ones(2)
    return [
        Probe(layer="vision", units=9, states=states, run=clock.running(50.0), twice=clock.running(100.0)),
        Probe(layer="vision", units=1, states=states, run=clock.running(1.0), twice=clock.running(2.5)),
        Probe(layer="head", tokens=3, states=states, run=clock.running(7.0)),
    ]


def states_of(probe: Probe) -> torch.Tensor:
    return probe.states.clone().requires_grad_()


def test_the_host_takes_what_a_second_small_layer_adds(clock: Clock) -> None:
    assert ahead.host_seconds(probes(clock), states_of, CUDA, repeats=3) == {"vision": 1.5}


def test_a_cpu_computes_itself(clock: Clock) -> None:
    assert ahead.host_seconds(probes(clock), states_of, CPU, repeats=3) == {}
    assert clock.now == 0


def test_a_device_is_kept_busy_for_as_long_as_the_host_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(ahead, "_cycles_per_second", lambda: 1e9)
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append)
    start = ahead.HeadStart(CUDA)
    start.give("vision")  # not known yet
    for seconds in (0.004, 0.003, 0.008):
        start.took("vision", seconds)
    start.give("vision")
    start.took("head", 10.0)
    start.give("head")
    assert cycles == [4_500_000, 50_000_000]
    at_once = ahead.HeadStart(CPU)
    at_once.took("vision", 0.003)
    at_once.give("vision")
    assert len(cycles) == 2
