"""Layouts beyond the usual ones, of which those are searched whose best plans are predicted to be fast enough."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autotune.search.solver.solver import Solver
from autotune.search.space.layouts import layout_name
from trials.plan import Layout, Packed, Packing, Plan

_WORTH = 1.05
"""Most that the best plan of such a layout may be predicted to take, as a multiple of the best plan without."""
_HOPELESS = 1.3
"""The same for the first packs that are looked at, above which no others are."""
_CLASSES, _FURTHER = 4, 2
"""Classes of sizes of packs, of each of which one is looked at, and further ones of the best class."""
_MOST = 4
"""Layouts that are searched, so that they take no more time than those without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherLayouts:
    """Layouts of one kind that may be searched in addition to the usual ones."""

    possible: tuple[Layout, ...]
    helps: Callable[[Packing, Layout], bool] | None = None
    """Return whether such a layout may help with a packing; None where each may."""
    searched: str
    """`Tensor degrees are`"""
    usual: str
    """`tensor degree 1`"""
    usual_alone: str
    """`Tensor degree 1 is best and the only one that is searched`"""
    cannot_help: str = ""
    """Why none can help where none `helps` with any packing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutOffer:
    """The layouts of a kind that are searched, and why, or why none is."""

    layouts: tuple[Layout, ...]
    reason: str | None
    """None where there are no such layouts."""


def offered_layouts(
    further: FurtherLayouts, solver: Solver, usual: Sequence[Packed], without: Sequence[Plan]
) -> LayoutOffer:
    """Return those of the layouts whose best plan is predicted to be nearly as fast as the plans `without`, or faster.

    Each is compared with a few of the `usual` packs. Where no plan of the usual layouts fits, the best one of these
    takes its place.
    """
    if not further.possible:
        return LayoutOffer(layouts=(), reason=None)
    of_packings: dict[Packing, float] = {}
    for plan, takes in zip(without, solver.epoch_seconds(without), strict=True):
        of_packings[plan.packing] = min(takes, of_packings.get(plan.packing, np.inf))
    least = min(of_packings.values(), default=np.inf)
    likely = sorted(usual, key=lambda packing: of_packings.get(packing, np.inf))
    helps = further.helps or (lambda *_: True)
    helped = {layout: [packing for packing in likely if helps(packing, layout)] for layout in further.possible}
    if not any(helped.values()):
        return LayoutOffer(layouts=(), reason=f"{further.usual_alone}: {further.cannot_help}")
    seconds = {layout: _least_seconds(layout, solver, helped[layout], _HOPELESS * least) for layout in helped}
    best = min(seconds, key=lambda layout: seconds[layout])
    most = _WORTH * min(least, seconds[best])
    found = sorted((layout for layout in seconds if seconds[layout] <= most), key=lambda layout: seconds[layout])
    if not found or seconds[best] == np.inf:
        return LayoutOffer(layouts=(), reason=_why_none(further, best, seconds[best], least))
    return LayoutOffer(layouts=tuple(found[:_MOST]), reason=_why(further, found[:_MOST], seconds[best], least))


def _least_seconds(layout: Layout, solver: Solver, likely: Sequence[Packed], hopeless: float) -> float:
    """Return the epoch seconds of the best plan with some of the packs, the best ones first; infinite if none fits.

    The best of each class of sizes is looked at, and the next ones of the best class unless it is `hopeless`. Where
    nothing is, as no other plan fits, all packs are looked at.
    """

    def take(packings: Iterable[Packed]) -> float:
        plans = (solver.solve(packing, layout) for packing in packings)
        return min(solver.epoch_seconds([plan for plan in plans if plan is not None]), default=np.inf)

    kept = [packing for packing in likely if solver.keeps_batch(packing, layout)]
    if hopeless == np.inf:
        return take(kept)
    by_size = sorted(kept, key=lambda packing: (packing.qt, packing.qv))
    edges = np.linspace(0, len(kept), _CLASSES + 1).round().astype(int).tolist()
    sizes = [sorted(by_size[slice(*each)], key=kept.index) for each in pairwise(edges)]
    firsts = [take(packings[:1]) for packings in sizes]
    best = min(firsts)
    return best if best > hopeless else min(best, take(sizes[firsts.index(best)][1 : 1 + _FURTHER]))


def _why(further: FurtherLayouts, found: Sequence[Layout], best: float, least: float) -> str:
    names = ", ".join(map(layout_name, found))
    if least == np.inf:
        return f"{further.searched} searched with {names}: no plan with {further.usual} fits the memory"
    return (
        f"{further.searched} searched with {names}: with the first packs that were compared, an epoch is predicted to "
        f"take {best / least:.2f} times as long as the best with {further.usual}"
    )


def _why_none(further: FurtherLayouts, layout: Layout, best: float, least: float) -> str:
    begin = f"{further.usual_alone}: "
    if best == np.inf:
        return f"{begin}no plan with a higher one fits the memory and keeps the global batch"
    return f"{begin}an epoch with {layout_name(layout)} is predicted to take {best / least:.2f} times as long"
