"""Seconds of each part of a step, measured on the device that does the work."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Stopwatch:
    """Sums of the seconds of named sections. On CUDA it records events, and waits for the last when it is read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Time what runs inside the context."""
        if self._device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start
            return
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    def read(self) -> dict[str, float]:
        """Return the seconds of each section since the last call."""
        if self._events:
            # It comes after all others: only the stream on which the sections ran has to get there.
            self._events[-1][2].synchronize()
        for name, first, last in self._events:
            self._seconds[name] += first.elapsed_time(last) / 1000
        seconds = dict(self._seconds)
        self._seconds.clear()
        self._events.clear()
        return seconds
