"""Kinds of layers: layers of one kind differ in their weights and their number only."""

import re
from collections import Counter
from collections.abc import Hashable, Sequence

from torch import nn

_NUMBER_OF_LAYER = re.compile(r"idx|index|layer_id|layer_number")


def layers_of_every_kind(layers: Sequence[nn.Module]) -> int:
    """Return how many of the first layers, at least two where there are, show every kind that there is."""
    kinds = [_kind(layer) for layer in layers]
    return min(len(layers), max([2, *(kinds.index(kind) + 1 for kind in kinds)]))


def usual_layer(layers: Sequence[nn.Module]) -> range:
    """Return the number of the first layer of the most frequent kind, and no number where there is no layer.

    DeepSeek-V3 begins with three dense layers, and has experts in the other 58.
    """
    kinds = [_kind(layer) for layer in layers]
    usual = [kinds.index(kind) for kind, _ in Counter(kinds).most_common(1)]
    return range(usual[0], usual[0] + 1) if usual else range(0)


def _kind(module: nn.Module) -> Hashable:
    """Return the modules and plain settings of a layer."""
    return tuple(
        (
            name,
            type(part),
            *(
                (key, value)
                for key, value in sorted(vars(part).items())
                # A layer's own number is no difference; sizes, names and switches are.
                if isinstance(value, bool | int | float | str) and not _NUMBER_OF_LAYER.search(key)
            ),
        )
        for name, part in module.named_modules()
    )
