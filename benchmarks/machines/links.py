"""Messages between ranks of nodes: links inside a node are faster, and links between nodes are shared."""

from dataclasses import dataclass

import numpy as np

from benchmarks.machines.dials import Dials
from trials.grid import Grid

_INSIDE = 0.12
"""Time of a message inside a node, as a share of that between nodes."""
_ADAPTERS = 2
"""Messages that leave a node at full speed at the same time."""
_SHARING = 0.8
"""Exponent with which further messages slow each other down: they do not all come at once."""
_HIDDEN = 0.4
"""Share of messages that overlaps with passes, at dial 1."""
_MOST_HIDDEN = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Nodes of devices, as a layout uses them."""

    node_devices: int
    latency_seconds: float
    seconds_per_byte: float
    """Of one message between nodes, alone."""

    def message_factor(self, grid: Grid, dials: Dials, stage: int) -> float:
        """Return by how much a message from `stage` to the next takes longer than a lone one between nodes."""
        ranks = grid.stage_ranks(stage)
        leaving = sum(self._node(rank) != self._node(rank + grid.data) for rank in ranks)
        return float(self._shared(leaving) ** dials.communication)

    def ring_seconds(self, grid: Grid, dials: Dials, stage: int) -> float:
        """Return the seconds of averaging a byte over the data ranks of a stage, while the other stages do the same.

        In a ring each rank sends nearly every byte twice (Patarasuk and Yuan 2009).
        """
        nodes = {self._node(rank) for rank in grid.stage_ranks(stage)}
        rings = sum(self._is_spread(grid, other) for other in range(grid.pipeline)) if len(nodes) > 1 else 0
        shared = self._shared(min(rings, self.node_devices))
        factor: float = (shared * (grid.data - 1) / grid.data) ** dials.communication
        return 2 * self.seconds_per_byte * factor

    def _is_spread(self, grid: Grid, stage: int) -> bool:
        ranks = grid.stage_ranks(stage)
        return self._node(ranks[0]) != self._node(ranks[-1])

    def _node(self, rank: int) -> int:
        return rank // self.node_devices

    @staticmethod
    def _shared(leaving: int) -> float:
        return max(1.0, leaving / _ADAPTERS) ** _SHARING if leaving else _INSIDE


def drawn_network(seed: int) -> Network:
    """Return nodes of 4 or 8 devices, the same for the same seed."""
    random = np.random.default_rng([seed, 3])
    return Network(
        node_devices=int(random.choice((4, 8))),
        latency_seconds=float(random.uniform(2e-5, 8e-5)),
        seconds_per_byte=1 / float(random.uniform(10e9, 40e9)),
    )


def overlap(dials: Dials) -> float:
    """Return the share of messages and reductions that overlaps with passes."""
    return min(_HIDDEN * dials.communication, _MOST_HIDDEN)
