"""Cutting stock: which kinds of packs, and how many of each, so that there are as few as possible.

Source: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961 and 1965 (two
constraints). Items of like size form a class. The linear program over all patterns of classes is solved by column
generation, its solution rounded down, and what is left packed by best fit. Only operations that are rounded alike on
every machine are used, no BLAS: all ranks must find the same packs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trials.arrays import Floats, Ints
from trials.data.packers import best_fit
from trials.plan import Packed

RELAXES = False

# Choices: powers of two, as long as there are at most `_CLASSES` classes.
_SPLITS = (1, 2, 4, 8)
"""Into how many classes of like tokens the items of a number of units are split, in turn."""
# Choices: the time grows with the classes and with the cells of a pack, units times tokens, in each iteration.
_UNIT_CLASSES = 16
_CLASSES = 32
_UNIT_CELLS = 64
_TOKEN_CELLS = 512
"""Cells that a pack's capacity is divided into."""
# A choice: column generation tails off, and best fit packs what a worse solution leaves.
_ITERATIONS = 150
_WORTH = 0.9995
"""A finer split is taken when it needs at most this share of packs: with few classes, packs are more alike."""
# Prices are sums of fractions of a pack: a gain below it is rounding, and would be chased for ever.
_EPSILON = 1e-9


def pack(units: Ints, tokens: Ints, packing: Packed, seed: int) -> tuple[Ints, Ints]:
    """Pack with cutting stock, or with best fit where that needs no more packs."""
    plain = best_fit.pack(units, tokens, packing, seed)
    if len(plain[1]) <= 2:
        return plain
    least = max(-(-int(units.sum()) // max(packing.qv, 1)), -(-int(tokens.sum()) // packing.qt))
    best = None
    for classes in _classes(units, tokens, packing):
        solution = _solve(classes)
        if best is None or solution.packs < _WORTH * best[1].packs:
            best = classes, solution
        if solution.packs <= least + 1:
            break
    assert best is not None  # there is always the coarsest split
    cut = _fill(*best, np.stack([units, tokens], axis=1), np.array([packing.qv, packing.qt]), seed)
    rest = np.ones(len(units), dtype=np.bool_)
    rest[cut[0]] = False
    left = np.flatnonzero(rest)
    samples, starts = best_fit.pack(units[left], tokens[left], packing, seed)
    if len(cut[1]) + len(starts) - 1 >= len(plain[1]) - 1:
        return plain
    counts = np.concatenate([cut[1], np.diff(starts)])
    return np.concatenate([cut[0], left[samples]]), np.concatenate([[0], np.cumsum(counts)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Classes:
    """Items by class, and the mean size of each class in cells of a pack."""

    members: tuple[Ints, ...]
    units: Ints
    tokens: Ints
    capacity: tuple[int, int]
    """Cells of a pack, (units, tokens)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solution:
    packs: float
    patterns: tuple[tuple[float, Ints], ...]
    """(how many packs, items of each class in one), most packs first."""


def _classes(units: Ints, tokens: Ints, packing: Packed) -> Iterator[_Classes]:
    """Yield classes of items, split more finely each time."""
    order = np.lexsort((tokens, units))
    several = len(np.unique(units)) > _UNIT_CLASSES
    # Few different numbers of units make one class each.
    changes = np.flatnonzero(np.diff(units[order])) + 1
    by_units = np.array_split(order, _UNIT_CLASSES if several else changes)
    cells = min(packing.qv, _UNIT_CELLS), min(packing.qt, _TOKEN_CELLS)
    for split in _SPLITS:
        if split > 1 and split * len(by_units) > _CLASSES:
            return
        parts = (part[np.argsort(tokens[part], kind="stable")] for part in by_units)
        members = tuple(piece for part in parts for piece in np.array_split(part, split) if len(piece))
        yield _Classes(
            members=members,
            units=np.array([_cells(units[piece], packing.qv, cells[0]) for piece in members]),
            tokens=np.array([max(1, _cells(tokens[piece], packing.qt, cells[1])) for piece in members]),
            capacity=cells,
        )


def _cells(sizes: Ints, capacity: int, cells: int) -> int:
    """Return the mean size, rounded up to whole cells."""
    return -(-int(sizes.sum()) * cells // (len(sizes) * max(capacity, 1)))


def _solve(classes: _Classes) -> _Solution:
    """Return the fewest packs for the classes, in fractions, by the revised simplex method with column generation."""
    demand = np.array([len(members) for members in classes.members], dtype=np.float64)
    number = len(demand)
    # The first basis has one pattern for each class: as many of its items as a pack holds.
    by_tokens = classes.capacity[1] // classes.tokens
    by_units = np.where(classes.units > 0, classes.capacity[0] // np.maximum(classes.units, 1), by_tokens)
    alone = np.maximum(np.minimum(by_units, by_tokens), 1).astype(np.float64)
    columns = np.diag(alone)
    inverse = np.diag(1 / alone)
    packs, cost = demand / alone, np.ones(number)
    for _ in range(_ITERATIONS):
        # Sums of products instead of `@`: BLAS rounds differently on different machines.
        prices = (inverse * cost[:, None]).sum(axis=0)
        column, price = _entering(prices, classes)
        if column is None:
            break
        change = (inverse.T * column[:, None]).sum(axis=0)
        positive = change > _EPSILON
        # The pattern that is used up first leaves the basis.
        ratios = np.where(positive, packs / np.where(positive, change, 1), np.inf)
        leaving = int(np.argmin(ratios))
        pivot = inverse[leaving] / change[leaving]
        inverse = inverse - change[:, None] * pivot
        inverse[leaving] = pivot
        step = ratios[leaving]
        packs = np.maximum(packs - step * change, 0)
        packs[leaving] = step
        columns[:, leaving], cost[leaving] = column, price
    used = [basic for basic in np.argsort(-packs, kind="stable").tolist() if cost[basic]]
    return _Solution(
        packs=sum(packs[used].tolist()),
        patterns=tuple((float(packs[basic]), np.rint(columns[:, basic]).astype(np.int64)) for basic in used),
    )


def _entering(prices: Floats, classes: _Classes) -> tuple[Floats | None, float]:
    """Return a column that lowers the number of packs, and its cost: surplus of a class, or the pattern worth most."""
    cheapest = int(np.argmin(prices))
    if prices[cheapest] < -_EPSILON:
        surplus = np.zeros(len(prices))
        surplus[cheapest] = -1
        return surplus, 0.0
    pattern = _knapsack(prices, classes)
    return (pattern, 1.0) if (pattern * prices).sum() > 1 + 1e-7 else (None, 0.0)


def _knapsack(prices: Floats, classes: _Classes) -> Floats:
    """Return the pattern of highest total price, [classes], by a dynamic program over cells of units and of tokens."""
    most_units, most_tokens = classes.capacity
    items = [
        (number, price, units, tokens)
        for number, (price, units, tokens) in enumerate(
            zip(prices.tolist(), classes.units.tolist(), classes.tokens.tolist(), strict=True)
        )
        if price > _EPSILON
    ]
    # worth[u, t] is the highest total price of items within u and t cells.
    worth = np.zeros((most_units + 1, most_tokens + 1))
    for _, price, units, tokens in items:
        # Blocks of cells that take one item more than those before: a class may be taken several times.
        if units:
            for start in range(units, most_units + 1, units):
                block = worth[start : start + units, tokens:]
                np.maximum(block, worth[start - units : start, :-tokens][: len(block)] + price, out=block)
        else:
            for start in range(tokens, most_tokens + 1, tokens):
                block = worth[:, start : start + tokens]
                np.maximum(block, worth[:, start - tokens : start][:, : block.shape[1]] + price, out=block)
    pattern = np.zeros(len(prices))
    row, column = most_units, most_tokens
    # Walk back through the table. A cell that others are computed from may have grown since, but by rounding alone.
    while worth[row, column] > 0:
        for number, price, units, tokens in items:
            fits = units <= row and tokens <= column
            if fits and worth[row - units, column - tokens] + price >= worth[row, column]:
                pattern[number] += 1
                row, column = row - units, column - tokens
                break
    return pattern


def _fill(classes: _Classes, solution: _Solution, sizes: Ints, capacity: Ints, seed: int) -> tuple[Ints, Ints]:
    """Return packs of the solution's whole parts: (items, items of each pack); sizes [items, 2] and capacity [2].

    Long items go where least is filled yet, so that packs of a pattern are alike. A class stands for its mean size, so
    a pack can come out above a capacity; its items are left out.
    """
    # Another stream than best fit's, which packs the rest with the same seed.
    random = np.random.default_rng([seed, 1])
    pools = [random.permutation(members) for members in classes.members]
    cursor = np.zeros(len(pools), dtype=np.int64)
    samples, counts = [pools[0][:0]], [pools[0][:0]]
    for packs, pattern in solution.patterns:
        kinds = np.flatnonzero(pattern)
        left = [(len(pools[kind]) - cursor[kind]) // pattern[kind] for kind in kinds]
        whole = min(int(packs + _EPSILON), *map(int, left))
        if not whole:
            continue
        filled = np.zeros((whole, 2), dtype=np.int64)
        slots = []
        for kind in sorted(kinds, key=lambda kind: -int(classes.tokens[kind])):
            for _ in range(int(pattern[kind])):
                drawn = pools[kind][cursor[kind] : cursor[kind] + whole]
                cursor[kind] += whole
                slot = np.empty_like(drawn)
                slot[np.argsort(-filled[:, 1], kind="stable")] = drawn[np.argsort(sizes[drawn, 1], kind="stable")]
                filled += sizes[slot]
                slots.append(slot)
        # A class stands for its mean size, so that some packs are too full: best fit packs their items again.
        packed = np.stack(slots, axis=1)[(filled <= capacity).all(axis=1)]
        samples.append(packed.ravel())
        counts.append(np.full(len(packed), len(slots), dtype=np.int64))
    return np.concatenate(samples), np.concatenate(counts)
