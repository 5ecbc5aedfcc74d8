"""Rungs by which the layers of a stage free memory: recomputed selectively first, and then as a whole."""

from dataclasses import replace
from typing import TypeAlias

from trials.stage import TOWERS, Recomputed, Stage, Tower

Rungs: TypeAlias = tuple[int, int]
"""Rungs of a vision layer and of a language layer. With one it is recomputed, or offloads. With two it is recomputed
selectively first, and as a whole only where all layers of its kind on the stage are recomputed by then. With none all
layers of its kind on the stage are recomputed, or none."""
TOWER: Rungs = (0, 0)
"""Rungs where each tower of a stage is recomputed whole, or not at all."""
Counts: TypeAlias = tuple[tuple[int, int], ...]
"""Rungs of the (vision, language) layers of a stage for packs of each level."""


def has_rungs(stage: Stage, rungs: Rungs) -> bool:
    """Return whether the layers of a stage are recomputed in the order of these rungs, for packs of each level."""
    return all(
        (each == 1 or level.whole(tower) in (0, layers - level.selective(tower)))
        and (each == 2 or not level.selective(tower))
        for level in stage.recomputed
        for tower, layers, each in zip(TOWERS, (stage.vision, stage.language), rungs, strict=True)
    )


def rungs_of(recomputed: Recomputed, tower: Tower, each: int) -> int:
    """Return the rungs of a stage's layers of this kind, of which a layer that is recomputed as a whole has `each`."""
    whole, selective = recomputed.whole(tower), recomputed.selective(tower)
    if not each:
        return min(whole + selective, 1)
    return 2 * whole + selective if each == 2 else whole


def with_rungs(recomputed: Recomputed, tower: Tower, layers: int, each: int, more: int) -> Recomputed:
    """Return the counts with `more` rungs for the `layers` of this kind, with up to `each`, as far as there are any."""
    rungs = min(max(rungs_of(recomputed, tower, each) + more, 0), each * layers if each else 1)
    whole = max(rungs - layers, 0) if each == 2 else rungs if each else rungs * layers
    selective = min(rungs, layers) - whole if each == 2 else 0
    if tower == "vision":
        return replace(recomputed, vision=whole, selective_vision=selective)
    return replace(recomputed, language=whole, selective_language=selective)
