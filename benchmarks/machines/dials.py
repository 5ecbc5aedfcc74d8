"""Dials: the kinds of distortion by which a simulated machine differs from a linear one."""

from dataclasses import dataclass, fields

import numpy as np

_VARIATION = 0.3
"""Share of the level by which the dials of machines differ from it."""
_MOST = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dials:
    """Strength of each distortion: 0 for none, 1 for what a GPU shows, at most 2."""

    efficiency: float = 0.0
    """Matrix products in whole waves of tiles, with an efficiency that grows with their size."""
    launch: float = 0.0
    """Host time of launching kernels, which bounds the passes of small packs."""
    cache: float = 0.0
    """Speed of memory-bound operations, which rises where their values fit the cache."""
    communication: float = 0.0
    """Links by topology and number of users, and messages that overlap with passes."""
    fixed: float = 0.0
    """Time of each pass and step outside the layers."""
    structure: float = 0.0
    """Error that similar layouts, capacities and splits share."""
    own: float = 0.0
    """Error of each plan's own."""
    profile: float = 0.0
    """Error of each factor of the profile: a factor of 1.3 at 1."""
    decoding: float = 0.0
    """Time to decode samples. At 1, a pipeline of four stages waits for decoding longer than it computes."""
    memory: float = 0.0
    """Error of each stage's peak of each plan: 5 % at 1."""


def drawn_dials(level: float, seed: int) -> Dials:
    """Return dials around the level, the same for the same seed. The error of the profile is exactly at the level.

    Those of a form alone, decoding and memory, are 0.
    """
    random = np.random.default_rng([seed, 1])
    values = {
        field.name: min(level * float(random.uniform(1 - _VARIATION, 1 + _VARIATION)), _MOST) for field in fields(Dials)
    }
    return Dials(**{**values, "profile": level, "decoding": 0.0, "memory": 0.0})
