"""The times of a device and of the host that enqueues its work, apart.

A step takes as long as the slower of both, which is the device for all but small packs. Alone on an idle device, a
layer takes as long as the host needs to launch its kernels.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from trials.costs.coefficients import LayerKind
from trials.tasks.profiling.pace import now
from trials.tasks.profiling.probes import Probe, Run

_CYCLES = 20_000_000
"""About 10 ms."""
# A choice: hosts enqueue a layer in some milliseconds, and a host that was interrupted once shall not hold up each
# repeat.
_LONGEST_SECONDS = 0.05
_SPARE = 1.5
"""Time for which the device is kept busy, over that which the host took before."""


class HeadStart:
    """Head starts of the host before the device, so that events around what it enqueues time the device alone."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host: dict[str, float] = {}

    def give(self, name: str) -> None:
        """Keep the device busy for as long as the host needs to enqueue `name`. Nothing for a CPU."""
        if self._device.type == "cuda" and name in self._host:
            seconds = min(_SPARE * self._host[name], _LONGEST_SECONDS)
            torch.cuda._sleep(round(seconds * _cycles_per_second()))

    def took(self, name: str, seconds: float) -> None:
        """Remember the seconds in which the host has enqueued `name`."""
        self._host[name] = min(seconds, self._host.get(name, seconds))


@lru_cache
def _cycles_per_second() -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one may raise the clock
        first.record()
        torch.cuda._sleep(_CYCLES)
        last.record()
        last.synchronize()
    milliseconds: float = first.elapsed_time(last)
    return 1000 * _CYCLES / milliseconds


def host_seconds(
    probes: Sequence[Probe], states: Callable[[Probe], torch.Tensor], device: torch.device, repeats: int
) -> dict[LayerKind, float]:
    """Return the seconds in which the host enqueues both passes of a further layer of each kind; none for a CPU.

    `states` returns the input of a probe. The smallest probes are taken, so that the device does not keep the host
    waiting.
    """
    smallest: dict[LayerKind, Probe] = {}
    for probe in sorted(probes, key=lambda each: each.units + each.tokens) if device.type == "cuda" else ():
        if probe.twice is not None:
            smallest.setdefault(probe.layer, probe)
    found: dict[LayerKind, list[float]] = {kind: [] for kind in smallest}
    for _ in range(1 + repeats):
        for kind, probe in smallest.items():
            assert probe.twice is not None
            one, two = (_enqueued(states(probe), run, device) for run in (probe.run, probe.twice))
            found[kind].append(max(0.0, two - one))
    # The first ones are a warm-up.
    return {kind: statistics.median(seconds[1:]) for kind, seconds in found.items()}


def _enqueued(states: torch.Tensor, run: Run, device: torch.device) -> float:
    began = now(device)
    output = run(states)
    if output.requires_grad:
        output.backward(torch.ones_like(output))
    return time.perf_counter() - began
