"""The bytes of a stage's layers, in the order in which packs run through them."""

from collections.abc import Callable

from tests.values.search import by_size
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer import LayerCost
from trials.model.cut import Cut
from trials.stage import TOWERS


def stored_bytes(
    cost_of: Callable[[LayerKind], LayerCost], part: Cut, level: int = 0
) -> list[tuple[LayerKind, Floats, Floats | None]]:
    """Return for each layer its kind, what a pack stores in it, and what its backward pass needs if that is more.

    Both are coefficients of a pack's size; layers that keep everything need no more.
    """
    freed = part.levels[level]
    counts = (int(part.embeds), len(part.vision), int(part.projects), len(part.language), int(part.heads))
    found: list[tuple[LayerKind, Floats, Floats | None]] = []
    for kind, count in zip(KINDS, counts, strict=True):
        cost = cost_of(kind)
        whole, selective = (freed.whole(kind), freed.selective(kind)) if kind in TOWERS else (0, 0)
        ways = {
            "whole": (kind, by_size(kind, cost.output_bytes), by_size(kind, cost.kept_bytes)),
            "selective": (kind, by_size(kind, cost.selective_bytes), by_size(kind, cost.selective_peak_bytes)),
            "kept": (kind, by_size(kind, cost.kept_bytes), None),
        }
        for way, layers in (("whole", whole), ("selective", selective), ("kept", count - whole - selective)):
            found += [ways[way]] * layers
    return found
