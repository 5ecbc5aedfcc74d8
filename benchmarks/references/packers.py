"""Packers to compare with, written afresh from their sources and kept apart from ours.

Each takes units and tokens of the samples, all within (qv, qt), and returns how many packs it needs.
"""

from bisect import insort
from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Capacity: TypeAlias = tuple[int, int]
"""(qv, qt)"""


def isf(units: Ints, tokens: Ints, capacity: Capacity, rounds: int) -> int:
    """Sample and filter iteratively, and lose no sample (OmniBal, algorithm 1; `iter_random_groups` in its code)."""
    qv, qt = capacity
    random = np.random.default_rng(0)
    pool, kept = list(range(len(units))), 0
    for number in range(rounds):
        random.shuffle(pool)
        groups: list[list[int]] = []
        used_units, used_tokens = qv + 1, qt + 1
        for sample in pool:
            used_units += int(units[sample])
            used_tokens += int(tokens[sample])
            if used_units > qv or used_tokens > qt:
                groups.append([])
                used_units, used_tokens = int(units[sample]), int(tokens[sample])
            groups[-1].append(sample)
        if number == rounds - 1:
            return kept + len(groups)
        pool = []
        for group in groups:
            if units[group].sum() == qv or tokens[group].sum() >= qt - 128:
                kept += 1
            else:
                pool += group
        if not pool:
            break
    return kept


def first_fit_decreasing(units: Ints, tokens: Ints, capacity: Capacity) -> int:
    """Put samples, by falling larger share of the two capacities, each into the first pack that has room for it."""
    qv, qt = capacity
    free_units, free_tokens = np.full(len(units), qv), np.full(len(units), qt)
    packs = first = 0
    for sample in np.argsort(-np.maximum(units / qv, tokens / qt), kind="stable").tolist():
        size, length = units[sample], tokens[sample]
        room = (free_units[first:packs] >= size) & (free_tokens[first:packs] >= length)
        place = first + int(np.argmax(room)) if room.any() else packs
        packs = max(packs, place + 1)
        free_units[place] -= size
        free_tokens[place] -= length
        while first < packs and (free_units[first] < units.min() or free_tokens[first] < tokens.min()):
            first += 1
    return packs


Score: TypeAlias = Callable[[float, float], float]

SCORES: dict[str, Score] = {"product": lambda v, t: v * t, "sum": lambda v, t: v + t, "largest": max}


def histogram(units: Ints, tokens: Ints, capacity: Capacity, bucket: int, score: Score) -> int:
    """Pack a histogram longest first with two constraints, after Graphcore's DLPFHP: tokens rounded up to buckets.

    Sizes by falling score; each joins the open kind of pack that it leaves with the least room by the same score.
    """
    qv, qt = capacity
    rounded = np.minimum(-(-tokens // bucket) * bucket, qt)
    keys, counts = np.unique(np.stack([units, rounded], axis=1), axis=0, return_counts=True)
    order = sorted(range(len(keys)), key=lambda k: -score(keys[k, 0] / qv, keys[k, 1] / qt))
    opened: dict[tuple[int, int], int] = defaultdict(int)
    by_room: list[tuple[float, tuple[int, int]]] = []
    packs = 0

    def add(room: tuple[int, int], number: int) -> None:
        if room not in opened:
            insort(by_room, (score(room[0] / qv, room[1] / qt), room))
        opened[room] += number

    for key in order:
        size, length = (int(value) for value in keys[key])
        left = int(counts[key])
        while left:
            fitting = (room for _, room in by_room if room[0] >= size and room[1] >= length)
            room = min(fitting, key=lambda r: score((r[0] - size) / qv, (r[1] - length) / qt), default=None)
            if room is None:
                packs += left
                add((qv - size, qt - length), left)
                break
            moved = min(left, opened[room])
            opened[room] -= moved
            if not opened[room]:
                del opened[room]
                by_room.remove((score(room[0] / qv, room[1] / qt), room))
            add((room[0] - size, room[1] - length), moved)
            left -= moved
    return packs


def best_histogram(units: Ints, tokens: Ints, capacity: Capacity) -> int:
    """Return the fewest packs over three scores and three widths of buckets."""
    return min(histogram(units, tokens, capacity, bucket, score) for bucket in (64, 16, 1) for score in SCORES.values())
