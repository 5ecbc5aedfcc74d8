"""Layouts beyond the usual ones, of which those are searched whose best plans are predicted to be fast enough."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.dimensions.dimension import FurtherLayouts
from autotune.dimensions.folds import layout_name
from autotune.search.solver.solver import Solver
from autotune.search.space.origins import Origin, by_bound
from trials.plan import Layout, Packing

# A choice: predictions of layouts that no trial corrected err by some per cent.
_WORTH = 1.05
"""Largest predicted time of a further layout's best plan, as a multiple of the best plan of all."""
_SOLVED = 4
"""Plans of each layout that are solved."""
_MOST = 4
"""Most further layouts that are searched, so that they take no more time than the usual ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOffer:
    """The layouts of a kind that are searched, and why, or why none is."""

    layouts: tuple[Layout, ...]
    reason: str | None
    """Why layouts are offered or not, in words; None where there are no further layouts."""


def offered_layouts(further: FurtherLayouts, solver: Solver, usual: Sequence[Packing], without: float) -> LayoutOffer:
    """Return those of the layouts whose best plan is predicted to be nearly as fast as the best `without`, or faster.

    `without` are epoch seconds with the usual layouts; infinite where none of their plans fits, so that the best of
    these layouts takes their place. Of the `usual` packs a few are solved that may be in a plan that is fast enough,
    those with the least bound first.
    """
    if not further.possible:
        return LayoutOffer(layouts=(), reason=None)
    seconds: dict[Layout, float] = {}
    solved: Counter[Layout] = Counter()
    asked = helped = False
    slower: list[tuple[float, Layout]] = []
    origins = (Origin(layout=layout, packings=(packing,)) for layout in further.possible for packing in usual)
    for bound, origin in by_bound(origins, solver.least_seconds):
        layout, (packing,) = origin.layout, origin.packings
        # Bounds ascend, so all further ones are too large as well.
        if bound > _WORTH * min((without, *seconds.values())):
            slower.append((bound, layout))
            break
        if bound < seconds.get(layout, math.inf) and solved[layout] < _SOLVED:
            asked, helps = True, further.helps is None or further.helps(packing, layout)
            helped |= helps
            if helps and (plan := solver.solve(packing, layout)):
                solved[layout] += 1
                seconds[layout] = min(seconds.get(layout, math.inf), *solver.epoch_seconds((plan,)))
    if without == math.inf and not seconds:
        return LayoutOffer(layouts=(), reason=None)  # nothing can be said to be best where nothing fits
    if asked and not helped:
        return LayoutOffer(layouts=(), reason=f"{further.usual_alone}: {further.cannot_help}")
    ordered = sorted(((takes, layout) for layout, takes in seconds.items()), key=lambda pair: pair[0])
    most = _WORTH * min((without, *seconds.values()))
    if found := tuple(layout for takes, layout in ordered[:_MOST] if takes <= most):
        return LayoutOffer(layouts=found, reason=_why(further, found, ordered[0][0], without))
    nearest = min((*ordered, *slower), key=lambda pair: pair[0], default=None)
    return LayoutOffer(layouts=(), reason=_why_none(further, nearest, without))


def _why(further: FurtherLayouts, found: Sequence[Layout], best: float, least: float) -> str:
    names = ", ".join(map(layout_name, found))
    if least == math.inf:
        return f"{further.searched} searched with {names}: no plan with {further.usual} fits the memory"
    return (
        f"{further.searched} searched with {names}: an epoch is predicted to take {best / least:.2f} times as long as "
        f"the best with {further.usual}"
    )


def _why_none(further: FurtherLayouts, nearest: tuple[float, Layout] | None, least: float) -> str:
    """Return why no layout is offered; `nearest` has the least seconds with one of them, and that layout."""
    begin = f"{further.usual_alone}: "
    if nearest is None or nearest[0] == math.inf:
        return f"{begin}no plan with a higher one fits the memory and keeps the global batch"
    name, price = layout_name(nearest[1]), nearest[0] / least
    return f"{begin}an epoch with {name} is predicted to take at least {price:.2f} times as long"
