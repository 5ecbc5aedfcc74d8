"""Iterative sampling and filtering: shuffle, fill packs one after the other, keep the full ones, repeat with the rest.

Source: OmniBal (ICML 2025), iterative sampling and filtering. Unlike its published code, it loses no tail and no
sample, shuffles again in each round and stops when a round fills hardly a pack.
"""

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.plan import Packed

RELAXES = True

MAX_ROUNDS = 50
"""The paper sees no change after about 5; few and odd lengths need more."""
# A choice; the early exit of the published code never fires (docs/methods.md).
_WORTHWHILE = 0.001
"""A round that fills a smaller share of its packs is the last."""


def pack(units: Ints, tokens: Ints, packing: Packed, seed: int) -> tuple[Ints, Ints]:
    """Return packs with at least `qv_min` units or `qt_min` tokens, except those of the last round."""
    random = np.random.default_rng(seed)
    pool = np.arange(len(units), dtype=np.int64)
    samples, lengths = [pool[:0]], [pool[:0]]
    for number in range(1, MAX_ROUNDS + 1):
        if not len(pool):
            break
        # Shuffled again in each round: with the same order, the same packs would miss again.
        pool = random.permutation(pool)
        drawn, sizes = _next_fit(units[pool], tokens[pool], packing)
        if number == MAX_ROUNDS or drawn.mean() < _WORTHWHILE:
            drawn[:] = True
        of_drawn = np.repeat(drawn, sizes)
        samples.append(pool[of_drawn])
        lengths.append(sizes[drawn])
        pool = pool[~of_drawn]
    return np.concatenate(samples), np.concatenate([[0], np.cumsum(np.concatenate(lengths))])


def _next_fit(units: Ints, tokens: Ints, packing: Packed) -> tuple[NDArray[np.bool_], Ints]:
    """Cut the items into packs in their order; return which packs are full, and how many items each holds."""
    unit_sums = np.concatenate([[0], np.cumsum(units, dtype=np.int64)])
    token_sums = np.concatenate([[0], np.cumsum(tokens, dtype=np.int64)])
    # Where a pack ends that begins at item i, for every i: as far as both running sums allow.
    by_units = np.searchsorted(unit_sums, unit_sums + packing.qv, side="right") - 1
    by_tokens = np.searchsorted(token_sums, token_sums + packing.qt, side="right") - 1
    end_of = np.minimum(by_units, by_tokens).tolist()
    bounds, end, last = [0], 0, len(units)
    append = bounds.append  # the loop runs millions of times
    while end < last:
        end = end_of[end]
        append(end)
    full = np.diff(token_sums[bounds]) >= packing.qt_min
    if packing.qv:  # else no pack is full of units
        full |= np.diff(unit_sums[bounds]) >= packing.qv_min
    return full, np.diff(bounds)
