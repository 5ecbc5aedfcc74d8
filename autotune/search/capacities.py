"""Packing capacities to try, from the data's own lengths."""

import math

from trials.plan import Packed
from trials.workload import DataProfile

_PACKED_SAMPLES = (1.5, 2, 3, 4, 5, 6, 8, 10, 12, 16)
_VISION_SHARES = (0.85, 1.0, 1.25)
_TOKEN_STEP = 16
OMNIBAL_SLACK = 128
"""Q't = Qt - 128 (OmniBal, balanced dynamic mini-batches)."""


def capacities(data: DataProfile, most_samples: float, *, hold_all: bool) -> tuple[tuple[int, int], ...]:
    """Pairs (qv, qt) that hold from 1.5 to `most_samples` mean samples, or a single one where less is allowed.

    qt follows from the mean tokens of so many samples; qv lies below, on and above what those samples bring in images,
    so that either of the two may be what fills a pack. With `hold_all` each pair holds the longest sample too: for jobs
    that would lose a sample above the capacities, or fail on it.
    """
    tokens, units = data.text_tokens / data.samples, data.vision_units / data.samples
    least = _longest(data) if hold_all else (0, 0)
    pairs = {
        (max(1, round(count * units * share), least[0]), max(_up(count * tokens), least[1]))
        for count in [count for count in _PACKED_SAMPLES if count <= most_samples] or [1]
        for share in _VISION_SHARES
    }
    return tuple(sorted(pairs, key=lambda pair: (pair[1], pair[0])))


def omnibal_capacities(data: DataProfile, samples_per_pack: int, *, hold_all: bool) -> tuple[Packed, ...]:
    """OmniBal's candidates: qt = k qv, with k the mean tokens per vision unit, for packs of so many samples or more.

    Q'v = Qv and Q't = Qt - 128 (OmniBal, balanced dynamic mini-batches). `hold_all` as for `capacities`.
    """
    units, tokens = data.vision_units / data.samples, data.text_tokens / data.samples
    least = max(1, round(samples_per_pack * units))
    most = max(least, round((samples_per_pack + 1) * units))
    ray = [(qv, _up(tokens * (qv / units if units else samples_per_pack))) for qv in range(least, most + 1)]
    longest = _longest(data) if hold_all else (0, 0)
    return tuple(_packed(max(qv, longest[0]), max(qt, longest[1])) for qv, qt in ray)


def _packed(qv: int, qt: int) -> Packed:
    return Packed(qv=qv, qt=qt, qv_min=qv, qt_min=max(0, qt - OMNIBAL_SLACK), packer="isf")


def _longest(data: DataProfile) -> tuple[int, int]:
    """(qv, qt) that every sample fits."""
    return data.most_vision_units, _up(data.longest_text_tokens)


def _up(tokens: float) -> int:
    return max(1, math.ceil(tokens / _TOKEN_STEP)) * _TOKEN_STEP
