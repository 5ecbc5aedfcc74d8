"""Rungs by which the layers of a stage free memory: recomputed selectively first, and then as a whole."""

from dataclasses import replace
from typing import TypeAlias

from trials.plan import Recomputed, Tower

Rungs: TypeAlias = tuple[int, int]
"""Rungs of a vision layer and of a language layer. With one it is recomputed, or offloads. With two it is recomputed
selectively first, and as a whole only where all layers of its kind on the stage are recomputed by then."""
Counts: TypeAlias = tuple[tuple[int, int], ...]
"""Rungs of the (vision, language) layers of a stage for packs of each level."""


def rungs_of(recomputed: Recomputed, tower: Tower, *, two: bool) -> int:
    """Return the rungs of a stage's layers of this kind; with `two`, a layer that is recomputed as a whole has both."""
    whole = recomputed.whole(tower)
    return 2 * whole + recomputed.selective(tower) if two else whole


def with_rungs(recomputed: Recomputed, tower: Tower, layers: int, more: int) -> Recomputed:
    """Return the counts with `more` rungs for the `layers` of this kind that a stage has, as far as there are any.

    A layer has two where the kind is recomputed selectively.
    """
    two = recomputed.selective(tower) > 0
    rungs = min(max(rungs_of(recomputed, tower, two=two) + more, 0), (1 + two) * layers)
    whole = max(rungs - layers, 0) if two else rungs
    selective = min(rungs, layers) - whole if two else 0
    if tower == "vision":
        return replace(recomputed, vision=whole, selective_vision=selective)
    return replace(recomputed, language=whole, selective_language=selective)
