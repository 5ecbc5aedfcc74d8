"""Packs, or rows of packs, dealt so that what each taker gets is as mixed as the whole."""

import numpy as np

from trials.arrays import Floats, Ints

_TURNS = 256
"""The last turns, which even out what those before leave to chance."""
# Choices. The direction need not be exact: turns that follow even out its error. Each swap round pairs all takers anew.
_ITERATIONS = 4
_SWAPS = 64
_LOOKED_AT = 4
"""Items of a taker that are looked at for a swap."""
# So that rounding, which differs between machines, decides no swap.
_GAIN = 1e-6
"""Least gain of a swap, far above rounding."""


def deal(traits: Floats, taken: Ints, random: np.random.Generator) -> Ints:
    """Return the taker of each item, [items], so that the sums of the traits of each taker's items are near 0.

    `traits` [items, traits] have a mean of about 0, and taker i takes `taken[i]` items. First each turn deals one item
    to each taker, the largest first; takers get the opposite of what they have, along the main axis of what all of them
    have (the greedy rule of vector balancing). Then pairs of takers swap what makes the sums smaller.
    """
    takers, turn = np.repeat(np.arange(len(taken)), taken), _turns(taken)
    if len(taken) == 1:
        return takers
    order = np.lexsort((random.permutation(len(takers)), turn))
    takers, turn = takers[order], turn[order]
    items = random.permutation(len(traits))
    first = int(np.searchsorted(turn, turn[-1] + 1 - _TURNS))
    late = items[first:]
    items[first:] = late[np.argsort(-(traits[late] ** 2).sum(axis=1), kind="stable")]
    sums = np.zeros((len(taken), traits.shape[1]))
    np.add.at(sums, takers[:first], traits[items[:first]])
    bounds = np.flatnonzero(np.diff(turn[first:], prepend=-1)) + first
    for start, end in zip(bounds.tolist(), [*bounds[1:].tolist(), len(items)], strict=True):
        who, what = takers[start:end], items[start:end]
        have, get = sums[who], traits[what]
        axis = _main_axis(have if have.any() else get)
        takers[start:end] = who[np.argsort((have * axis).sum(axis=1), kind="stable")]
        items[start:end] = what[np.argsort(-(get * axis).sum(axis=1), kind="stable")]
        sums[takers[start:end]] += traits[items[start:end]]
    by_taker = np.argsort(takers, kind="stable")
    items = _swapped(items[by_taker], traits, taken, sums, random)
    found = np.empty_like(takers)
    found[items] = takers[by_taker]
    return found


def _turns(taken: Ints) -> Ints:
    """Return the turn of each item: takers of most items have one in each turn, other takers in some, evenly."""
    place = np.arange(int(taken.sum())) - np.repeat(np.cumsum(taken) - taken, taken)
    turns: Ints = (2 * place + 1) * taken.max() // (2 * np.repeat(taken, taken))
    return turns


def _main_axis(vectors: Floats) -> Floats:
    """Return the direction in which vectors [vectors, traits] are longest, by power iteration, in any length."""
    moments: Floats = (vectors[:, :, None] * vectors[:, None, :]).sum(axis=0)
    axis: Floats = moments[int(np.argmax(np.diag(moments)))]
    for _ in range(_ITERATIONS):
        axis = axis / max(float(abs(axis).max()), float(np.finfo(np.float64).tiny))
        # A sum of products instead of `@`: BLAS rounds differently on different machines.
        axis = (moments * axis).sum(axis=1)
    return axis


def _swapped(items: Ints, traits: Floats, taken: Ints, sums: Floats, random: np.random.Generator) -> Ints:
    """Return the items, which are in order of their takers, after swaps that make the squares of the `sums` smaller."""
    firsts, takers = np.cumsum(taken) - taken, np.flatnonzero(taken)
    half = len(takers) // 2
    pairs = np.arange(half)
    for _ in range(_SWAPS):
        mixed = random.permutation(takers)
        one, other = mixed[:half], mixed[half : 2 * half]
        of_one, of_other = (
            firsts[each][:, None] + random.integers(taken[each][:, None], size=(half, _LOOKED_AT))
            for each in (one, other)
        )
        change = traits[items[of_one]][:, :, None] - traits[items[of_other]][:, None]
        # How much the squares of both sums fall when `change` moves from one to the other, halved.
        gain = (change * ((sums[one] - sums[other])[:, None, None] - change)).sum(axis=3).reshape(half, _LOOKED_AT**2)
        best = gain.argmax(axis=1)
        gains = gain[pairs, best] > _GAIN
        pair, (at, to) = pairs[gains], np.divmod(best[gains], _LOOKED_AT)
        here, there = of_one[pair, at], of_other[pair, to]
        sums[one[pair]] -= change[pair, at, to]
        sums[other[pair]] += change[pair, at, to]
        items[here], items[there] = items[there], items[here]
    return items
