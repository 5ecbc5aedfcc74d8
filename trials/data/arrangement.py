"""Packs arranged into the steps of an epoch: rows of like packs across ranks, rows to steps, steps in random order."""

from collections.abc import Sequence
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials.data.records.sample import Ints

LEVELS_VERSION = 2
"""Of the rows of plans with levels: a training cannot go on with those of another version."""
_NEGLIGIBLE = 0.005
"""Share of an epoch's time that is not worth less even tokens, nor, between levels, less even attention."""
_STRIPS = (1, 2, 4, 8)
"""Numbers of strips of like tokens that are tried between levels."""

Floats: TypeAlias = NDArray[np.float64]


def arrange(
    costs: Floats,
    samples: Ints,
    levels: Ints,
    degrees: Sequence[int],
    *,
    data_parallel: int,
    micro_batches: int,
    window_rows: Sequence[int],
    random: np.random.Generator,
    whole_steps: bool = False,
) -> Ints:
    """Return the numbers of packs, [rows, data ranks]: each `micro_batches` rows are a step, the last may have fewer.

    `costs` are those of `PackSizes.costs` on each of the ranks that share a pack, in any unit, [packs, 3];
    `samples` and `levels` are those of each pack; `degrees` says how many ranks share a pack of each level. The packs
    of a row are of one level, of which there are whole rows, and come from one random window, of the level's
    `window_rows` rows. A pack that ranks share has neighbouring entries. Each step has the levels in proportion to the
    epoch, to less than a row; with `whole_steps` as many steps as possible have one level.
    """
    # Windows hold random packs: packers put like samples together, and a step should not.
    shuffled = random.permutation(len(costs))
    of_levels, match = [], _matched if len(degrees) == 1 else _evened
    for level, degree in enumerate(degrees):
        members = shuffled[levels[shuffled] == level]
        if len(members):
            rows = members[match(costs[members], data_parallel // degree, window_rows[level])]
            of_levels.append(np.repeat(rows, degree, axis=1))
    rows = np.concatenate(of_levels)
    degree_of_pack = np.array(degrees, dtype=np.int64)[levels]
    held = samples[rows].sum(axis=1) // degree_of_pack[rows[:, 0]]
    order = random.permutation(len(rows))
    rows, held, level_of_row = rows[order], held[order], levels[rows[order, 0]]
    size = min(micro_batches, len(rows))
    if whole_steps:
        steps, rest = _whole_steps(held, level_of_row, size, random)
    else:
        inside = len(rows) // size * size
        steps, rest = _steps(held[:inside], level_of_row[:inside], size, random), np.arange(inside, len(rows))
    cost = costs.sum(axis=1)
    parts = (rows[steps], rows[rest][None])
    return np.concatenate([_ordered(_levelled(part, cost, degree_of_pack)) for part in parts])


def _matched(costs: Floats, data_parallel: int, window_rows: int) -> Ints:
    """Return positions in `costs`, [rows, data ranks]: in each window, rows of packs with like costs in every part.

    Language is compared by tokens, and by tokens and attention together only where that saves some waiting: the tokens
    are what a rank sends and keeps.
    """
    vision, tokens, attention = costs.T
    by_tokens = _striped(vision, tokens, data_parallel, window_rows)
    if _takes(costs, by_tokens) <= (1 + _NEGLIGIBLE) * float(costs.sum()) / data_parallel:  # hardly any waiting
        return by_tokens
    by_cost = _striped(vision, tokens + attention, data_parallel, window_rows)
    return by_tokens if _takes(costs, by_tokens) <= (1 + _NEGLIGIBLE) * _takes(costs, by_cost) else by_cost


def _evened(costs: Floats, data_parallel: int, window_rows: int) -> Ints:
    """Return the same for long samples, whose attention counts: rows of packs that are also alike in attention (HBP).

    Rows by vision and the sum of tokens and attention wait least. Of those that hardly wait longer, the rows with the
    least idle shares of vision, tokens and attention are taken.
    """
    vision, language = costs[:, 0], costs[:, 1] + costs[:, 2]
    cube_root = round(min(window_rows, len(costs) // data_parallel) ** (1 / 3))
    of_vision = (1, cube_root) if np.ptp(vision) else (1,)
    found = [_striped(vision, language, data_parallel, window_rows)]
    strips = dict.fromkeys(product(of_vision, (*_STRIPS, cube_root)))
    found += (_nested(costs, each, data_parallel, window_rows) for each in strips)
    seconds = [_takes(np.stack([vision, language], axis=1), rows) for rows in found]
    near = (rows for rows, takes in zip(found, seconds, strict=True) if takes <= (1 + _NEGLIGIBLE) * min(seconds))
    return min(near, key=lambda rows: _idle(costs, rows))


def _takes(costs: Floats, rows: Ints) -> float:
    """Return the sum over rows of the largest cost of each part."""
    return float(costs[rows].max(axis=1).sum())


def _idle(costs: Floats, rows: Ints) -> float:
    """Return the idle share of the mean rank, summed over the parts, in the mean row."""
    of_rows = costs[rows]
    most = np.maximum(of_rows.max(axis=1), np.finfo(float).tiny)
    # Further digits depend on the order of the rows, and on the machine.
    return round(float((1 - of_rows.mean(axis=1) / most).sum(axis=1).mean()), 9)


def _nested(costs: Floats, strips: Sequence[int], data_parallel: int, window_rows: int) -> Ints:
    """Return rows of packs that are near in attention, [rows, data ranks].

    A window is cut into strips of like vision cost, and each into strips of like tokens: `strips` are their numbers.
    """
    vision, tokens, attention = costs.T
    places = np.arange(len(costs))
    order, group, turn = places, places // (window_rows * data_parallel), np.ones(len(costs))
    for keys, count in zip(((tokens, vision), (attention, tokens), (attention,)), (*strips, 1), strict=True):
        # Up and down in turns, so that packs on both sides of a strip's border are alike.
        order = order[np.lexsort((*(turn * key[order] for key in keys), group))]
        inside, size = places - np.searchsorted(group, group), np.bincount(group)[group]
        strip = inside * count // size
        group, turn = group * count + strip, np.where(strip % 2, -1.0, 1.0)
    return order.reshape(-1, data_parallel)


def _striped(vision: Floats, language: Floats, data_parallel: int, window_rows: int) -> Ints:
    """Return rows of packs that are near in both, [rows, data ranks].

    A window is cut into strips of like vision cost, and each strip is sorted by language cost, up and down in turns.
    One strip is best where packs are full of units, about the root of the rows where they are not: the one with less
    waiting is taken.
    """
    window, inside = np.divmod(np.arange(len(vision)), window_rows * data_parallel)
    size = np.bincount(window)[window]
    by_vision = np.lexsort((language, vision, window))
    found = []
    for strips in (1, round(min(window_rows, len(vision) // data_parallel) ** 0.5)):
        strip = inside * strips // size
        # Up and down in turns, so that packs on both sides of a strip's border are alike.
        turned = np.where(strip % 2 == 0, language[by_vision], -language[by_vision])
        found.append(by_vision[np.lexsort((turned, strip, window))].reshape(-1, data_parallel))
    return min(found, key=lambda rows: float(vision[rows].max(axis=1).sum() + language[rows].max(axis=1).sum()))


def _steps(held: Ints, levels: Ints, micro_batches: int, random: np.random.Generator) -> Ints:
    """Return numbers of rows in random steps, [steps, micro-batches], from the samples and the level of each row.

    Rows are dealt to the steps by falling numbers of samples, those with most to the steps that have least so far, so
    that all steps have about as many. Where a level has no multiple of the steps, the rows that are left over go to
    steps in turns, so that no step has two of them.
    """
    steps = len(held) // micro_batches
    by_samples = np.lexsort((-held, levels))
    counts = np.bincount(levels)
    # Places of the rows inside their level, which are in the order of the levels.
    places = np.arange(len(held)) - np.repeat(np.cumsum(counts) - counts, counts)
    is_dealt = places < np.repeat(counts // steps * steps, counts)
    over = by_samples[~is_dealt].reshape(-1, steps)
    strata = by_samples[is_dealt].reshape(-1, steps)
    strata = strata[np.argsort(-held[strata].sum(axis=1), kind="stable")]
    dealt = np.empty((steps, micro_batches), dtype=np.int64)
    dealt[:, : len(over)] = over.T
    sums = held[over].sum(axis=0)
    for number, stratum in enumerate(strata, start=len(over)):
        # `stratum` falls, and the steps with fewest samples take its first rows.
        dealt[np.argsort(sums, kind="stable"), number] = stratum
        sums += held[dealt[:, number]]
    return dealt[random.permutation(steps)]


def _whole_steps(held: Ints, levels: Ints, micro_batches: int, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Return numbers of rows in random steps of one level each, [steps, micro-batches], and those of the last step.

    The rows that a level has beyond whole steps make up mixed ones.
    """
    steps, left = [], []
    for level in np.unique(levels):
        of_level = np.flatnonzero(levels == level)
        inside = len(of_level) // micro_batches * micro_batches
        steps.append(of_level[:inside])
        left.append(of_level[inside:])
    over = random.permutation(np.concatenate(left))
    inside = len(over) // micro_batches * micro_batches
    steps.append(over[:inside])
    dealt = [
        rows[_steps(held[rows], np.zeros_like(rows), micro_batches, random)]
        if len(rows)
        else rows.reshape(0, micro_batches)
        for rows in steps
    ]
    return random.permutation(np.concatenate(dealt)), over[inside:]


def _levelled(steps: Ints, cost: Floats, degrees: Ints) -> Ints:
    """Return the steps [steps, micro-batches, data ranks] with packs dealt to ranks so that the ranks' sums are alike.

    Rows go from the costliest on, and the ranks with the least work so far take the costliest pack of their row.
    """
    steps = np.take_along_axis(steps, _falling(cost[steps].sum(axis=2))[..., None], axis=1)
    if steps.shape[2] == 1:
        return steps
    steps = np.take_along_axis(steps, _falling(cost[steps]), axis=2)
    shared_by = degrees[steps[..., 0]]
    different = np.unique(shared_by).tolist()
    levelled = np.empty_like(steps)
    load = np.zeros((steps.shape[0], steps.shape[2]))
    for row in range(steps.shape[1]):
        for degree in different:
            chosen = np.flatnonzero(shared_by[:, row] == degree)
            # The ranks that share a pack stay together: their sum counts.
            sums = load[chosen].reshape(len(chosen), steps.shape[2] // degree, degree).sum(axis=2)
            groups = np.argsort(sums, axis=1, kind="stable")
            ranks = (groups[..., None] * degree + np.arange(degree)).reshape(len(chosen), steps.shape[2])
            levelled[chosen[:, None], row, ranks] = steps[chosen, row]
        load += cost[levelled[:, row]]
    return levelled


def _ordered(steps: Ints) -> Ints:
    """Return the rows [steps x micro-batches, data ranks] of each step in the order small, large, small.

    The first and the last pack of a step pass a pipeline alone, so they should be small, and neighbours alike, so that
    no stage waits for a longer one.
    """
    rows = np.concatenate([steps[:, 1::2][:, ::-1], steps[:, ::2]], axis=1)
    return rows.reshape(-1, steps.shape[2])


def _falling(values: Floats) -> Ints:
    """Return the indices that sort the last axis from the largest on."""
    return np.argsort(-values, axis=-1, kind="stable")
