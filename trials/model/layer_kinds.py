"""Kinds of layers: layers of one kind differ in their weights, factors and number only."""

import re
from collections import Counter
from collections.abc import Hashable, Sequence

from torch import nn

_NUMBER_OF_LAYER = re.compile(r"idx|index|layer_id|layer_number")


def layers_of_every_kind(layers: Sequence[nn.Module]) -> int:
    """Return how many of the first layers, at least two where there are, show every kind that there is."""
    kinds = [_kind(layer) for layer in layers]
    return min(len(layers), max([2, *(kinds.index(kind) + 1 for kind in kinds)]))


def kinds_of(layers: Sequence[nn.Module]) -> tuple[tuple[int, int], ...]:
    """Return (number of the first layer, number of layers) of each kind, the most frequent first.

    DeepSeek-V3 begins with three dense layers, and has experts in the other 58.
    """
    kinds = [_kind(layer) for layer in layers]
    return tuple((kinds.index(kind), count) for kind, count in Counter(kinds).most_common())


def _kind(module: nn.Module) -> Hashable:
    """Return the modules and plain settings of a layer."""
    return tuple(
        (
            name,
            type(part),
            *(
                # A factor may follow from the number, but none at all is a switch.
                (key, bool(value) if isinstance(value, float) else value)
                for key, value in sorted(vars(part).items())
                # A layer's own number is no difference; sizes, names and switches are.
                if isinstance(value, bool | int | float | str) and not _NUMBER_OF_LAYER.search(key)
            ),
        )
        for name, part in module.named_modules()
    )
