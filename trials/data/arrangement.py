"""Packs arranged into the steps of an epoch: rows of like packs across ranks, rows to steps, steps in random order."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials.data.records.sample import Ints

_NEGLIGIBLE = 0.005
"""Share of an epoch's time that is not worth less even tokens."""

Floats: TypeAlias = NDArray[np.float64]


def arrange(
    costs: Floats,
    samples: Ints,
    *,
    data_parallel: int,
    micro_batches: int,
    window_rows: int,
    random: np.random.Generator,
) -> Ints:
    """Return the numbers of packs, [rows, data ranks]: each `micro_batches` rows are a step, the last may have fewer.

    `costs` are those of units, tokens and attention, [packs, 3], of a multiple of `data_parallel` packs; `samples` are
    the samples of each pack. The packs of a row come from one random window of `window_rows` rows.
    """
    # Windows hold random packs: packers put like samples together, and a step should not.
    shuffled = random.permutation(len(costs))
    matched = shuffled[_matched(costs[shuffled], data_parallel, window_rows)]
    steps, rest = _steps(matched, samples, min(micro_batches, len(matched)), random)
    cost = costs.sum(axis=1)
    return np.concatenate([_ordered(_levelled(steps, cost)), _ordered(_levelled(rest, cost))])


def _matched(costs: Floats, data_parallel: int, window_rows: int) -> Ints:
    """Return positions in `costs`, [rows, data ranks]: in each window, rows of packs with like costs in every part.

    Language is compared by tokens, and by tokens and attention together only where that saves some waiting: the tokens
    are what a rank sends and keeps.
    """
    vision, tokens, attention = costs.T

    def takes(rows: Ints) -> float:
        return float(costs[rows].max(axis=1).sum())

    by_tokens = _striped(vision, tokens, data_parallel, window_rows)
    if takes(by_tokens) <= (1 + _NEGLIGIBLE) * float(costs.sum()) / data_parallel:  # hardly any waiting
        return by_tokens
    by_cost = _striped(vision, tokens + attention, data_parallel, window_rows)
    return by_tokens if takes(by_tokens) <= (1 + _NEGLIGIBLE) * takes(by_cost) else by_cost


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


def _steps(rows: Ints, samples: Ints, micro_batches: int, random: np.random.Generator) -> tuple[Ints, Ints]:
    """Return rows in random steps, [steps, micro-batches, data ranks], and the shorter last step, [1, few, data ranks].

    Rows are dealt to the steps by falling numbers of samples, those with most to the steps that have least so far, so
    that all steps have about as many. Chance decides between rows with equally many.
    """
    rows = random.permutation(rows)
    held = samples[rows].sum(axis=1)
    steps = len(rows) // micro_batches
    by_samples = np.argsort(-held[: steps * micro_batches], kind="stable").reshape(micro_batches, steps)
    dealt = np.empty((steps, micro_batches), dtype=np.int64)
    sums = np.zeros(steps, dtype=np.int64)
    for number, stratum in enumerate(by_samples):
        # `stratum` falls, and the steps with fewest samples take its first rows.
        dealt[np.argsort(sums, kind="stable"), number] = stratum
        sums += held[dealt[:, number]]
    return rows[random.permutation(dealt)], rows[steps * micro_batches :][None]


def _levelled(steps: Ints, cost: Floats) -> Ints:
    """Return the steps [steps, micro-batches, data ranks] with packs dealt to ranks so that the ranks' sums are alike.

    Rows go from the costliest on, and the rank with the least work so far takes the costliest pack of its row.
    """
    steps = np.take_along_axis(steps, _falling(cost[steps].sum(axis=2))[..., None], axis=1)
    levelled = np.empty_like(steps)
    load = np.zeros((steps.shape[0], steps.shape[2]))
    for row in range(steps.shape[1]):
        packs = np.take_along_axis(steps[:, row], _falling(cost[steps[:, row]]), axis=1)
        ranks = np.argsort(load, axis=1, kind="stable")
        np.put_along_axis(levelled[:, row], ranks, packs, axis=1)
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
