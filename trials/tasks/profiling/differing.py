"""Layers of a tower that differ, such as those with a window and those without: one timing for the whole tower."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import groupby
from typing import Any

from trials.tasks.answer import LayerTiming
from trials.tasks.profiling.probes import Probe

_MOST = frozenset({"shared_bytes", "transient_bytes", "selective_peak_bytes", "spread"})
"""What one layer at a time needs, or all of a stage once, and how far repeats spread. Of all else there is a mean."""


def of_tower(probes: Sequence[Probe], timings: Iterable[LayerTiming]) -> Iterator[LayerTiming]:
    """Yield one timing for the probes of a kind that have one input: times the layers of the tower, their sum."""
    pairs = zip(probes, timings, strict=True)
    for _, same in groupby(pairs, key=lambda pair: (pair[0].layer, id(pair[0].states))):
        probed, timed = zip(*same, strict=True)
        yield timed[0] if len(timed) == 1 else _mean(timed, [probe.share for probe in probed])


def _mean(timings: Sequence[LayerTiming], shares: Sequence[float]) -> LayerTiming:
    found: dict[str, Any] = {}
    for name in (field.name for field in fields(LayerTiming) if field.name.endswith(("_seconds", "_bytes", "spread"))):
        values = [getattr(timing, name) for timing in timings]
        mean = sum(value * share for value, share in zip(values, shares, strict=True))
        found[name] = max(values) if name in _MOST else round(mean) if name.endswith("_bytes") else mean
    return replace(timings[0], **found)
