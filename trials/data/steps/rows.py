"""Rows of packs: one pack for each data rank, alike in cost, so that no rank waits."""

from collections.abc import Sequence
from itertools import product

import numpy as np

from trials.arrays import Floats, Ints

_NEGLIGIBLE = 0.005
"""Share of an epoch's time that is not worth less even tokens, nor, between levels, less even attention."""
# Choices: powers of two. The cube root of the number of rows is tried as well.
_STRIPS = (1, 2, 4, 8)
"""Numbers of strips of like tokens that are tried between levels."""


def matched(costs: Floats, data_parallel: int, window: Ints) -> Ints:
    """Return positions in `costs`, [rows, data ranks]: in each window, rows of packs with like costs in every part.

    `costs` are [packs, 3] and `window` the ascending window of each pack, which has whole rows. Language is compared by
    tokens, and by tokens and attention together only where that saves some waiting: the tokens are what a rank sends
    and keeps.
    """
    vision, tokens, attention = costs.T
    by_tokens = _striped(vision, tokens, data_parallel, window)
    if _takes(costs, by_tokens) <= (1 + _NEGLIGIBLE) * float(costs.sum()) / data_parallel:  # hardly any waiting
        return by_tokens
    by_cost = _striped(vision, tokens + attention, data_parallel, window)
    return by_tokens if _takes(costs, by_tokens) <= (1 + _NEGLIGIBLE) * _takes(costs, by_cost) else by_cost


def evened(costs: Floats, data_parallel: int, window: Ints) -> Ints:
    """Return the same for long samples, whose attention counts: rows of packs that are also alike in attention (HBP).

    Rows by vision and the sum of tokens and attention wait least. Of those that hardly wait longer, the rows with the
    least idle shares of vision, tokens and attention are taken.
    """
    vision, language = costs[:, 0], costs[:, 1] + costs[:, 2]
    cube_root = max(1, round(_rows_of_window(window, data_parallel) ** (1 / 3)))
    of_vision = (1, cube_root) if np.ptp(vision) else (1,)
    found = [_striped(vision, language, data_parallel, window)]
    strips = dict.fromkeys(product(of_vision, (*_STRIPS, cube_root)))
    found += (_nested(costs, each, data_parallel, window) for each in strips)
    seconds = [_takes(np.stack([vision, language], axis=1), rows) for rows in found]
    near = (rows for rows, takes in zip(found, seconds, strict=True) if takes <= (1 + _NEGLIGIBLE) * min(seconds))
    return min(near, key=lambda rows: _idle(costs, rows))


def _rows_of_window(window: Ints, data_parallel: int) -> float:
    """Return the mean."""
    return len(window) / data_parallel / len(np.unique(window))


def _takes(costs: Floats, rows: Ints) -> float:
    """Return the sum over rows of the largest cost of each part."""
    return float(costs[rows].max(axis=1).sum())


def _idle(costs: Floats, rows: Ints) -> float:
    """Return the idle share of the mean rank, summed over the parts, in the mean row."""
    of_rows = costs[rows]
    most = np.maximum(of_rows.max(axis=1), np.finfo(float).tiny)
    # Further digits depend on the order of the rows, and on the machine.
    return round(float((1 - of_rows.mean(axis=1) / most).sum(axis=1).mean()), 9)


def _nested(costs: Floats, strips: Sequence[int], data_parallel: int, window: Ints) -> Ints:
    """Return rows of packs that are near in attention, [rows, data ranks].

    A window is cut into strips of like vision cost, and each into strips of like tokens: `strips` are their numbers.
    """
    vision, tokens, attention = costs.T
    places = np.arange(len(costs))
    order, group, turn = places, np.unique(window, return_inverse=True)[1], np.ones(len(costs))
    for keys, count in zip(((tokens, vision), (attention, tokens), (attention,)), (*strips, 1), strict=True):
        # Up and down in turns, so that packs on both sides of a strip's border are alike.
        order = order[np.lexsort((*(turn * key[order] for key in keys), group))]
        inside, size = places - np.searchsorted(group, group), np.bincount(group)[group]
        strip = inside * count // size
        group, turn = group * count + strip, np.where(strip % 2, -1.0, 1.0)
    return order.reshape(-1, data_parallel)


def _striped(vision: Floats, language: Floats, data_parallel: int, window: Ints) -> Ints:
    """Return rows of packs that are near in both, [rows, data ranks].

    A window is cut into strips of like vision cost, and each strip is sorted by language cost, up and down in turns.
    One strip is best where packs are full of units, about the root of the rows where they are not: the one with less
    waiting is taken.
    """
    inside, size = np.arange(len(window)) - np.searchsorted(window, window), np.bincount(window)[window]
    by_vision = np.lexsort((language, vision, window))
    found = []
    for strips in (1, max(1, round(_rows_of_window(window, data_parallel) ** 0.5))):
        strip = inside * strips // size
        # Up and down in turns, so that packs on both sides of a strip's border are alike.
        turned = np.where(strip % 2 == 0, language[by_vision], -language[by_vision])
        found.append(by_vision[np.lexsort((turned, strip, window))].reshape(-1, data_parallel))
    return min(found, key=lambda rows: float(vision[rows].max(axis=1).sum() + language[rows].max(axis=1).sum()))
