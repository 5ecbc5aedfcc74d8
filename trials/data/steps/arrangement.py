"""Packs arranged into steps: rows of packs of like cost across ranks, in steps whose samples are mixed."""

from collections.abc import Sequence

import numpy as np

from trials.arrays import Floats, Ints
from trials.certification import Mixed
from trials.data.steps.dealing import deal
from trials.data.steps.rows import evened, matched
from trials.data.steps.traits import sums_of_steps, variance_ratios

ARRANGEMENT_VERSION = 4
"""Version of the samples in steps, of packs and padded: a training cannot go on with steps of another version."""
# Measured in docs/benchmarks/packing.md.
_WINDOW_ROWS = 64
"""Rows in which packs are matched at most; with more, waiting is below the noise."""
_NARROWER = 2
"""Times by which a window is narrowed while its steps are not mixed enough."""
_MARGIN = 0.6
"""Share of the allowed variance at which steps are mixed enough: other measures of a length differ a little."""
# A choice: 1.2 % of normally distributed steps are outside, about the share that a certificate allows.
_SPREADS = 2.5
"""Standard deviations of the samples of a step within what is allowed."""


def arrange(
    costs: Floats,
    samples: Ints,
    traits: Floats,
    levels: Ints,
    degrees: Sequence[int],
    *,
    data_parallel: int,
    micro_batches: int,
    mixed: Mixed,
    random: np.random.Generator,
    whole_steps: bool = False,
) -> Ints:
    """Return the numbers of packs, [rows, data ranks]: each `micro_batches` rows are a step, the last may have fewer.

    `costs` are those of `PackSizes.costs` on each of the ranks that share a pack, in any unit, [packs, 3]; `samples`,
    `traits` (those of `Traits.deviations`, [packs, traits]) and `levels` are those of each pack; `degrees` says how
    many ranks share a pack of each level. The packs of a row are of one level, of which there are whole rows. A pack
    that ranks share has neighbouring entries. Each step has the levels in proportion to the epoch, to less than a row;
    with `whole_steps` as many steps as possible have one level.

    Packs are dealt to windows, matched in rows there, and the rows dealt to the steps, so that the samples of each
    window and step are like those of the epoch. Wide windows have more even rows; windows of a step, more even steps.
    The widest are taken whose steps are `mixed` enough.
    """
    degree_of_pack = np.array(degrees, dtype=np.int64)[levels]
    columns = data_parallel // np.array(degrees, dtype=np.int64)
    counts = np.bincount(levels, minlength=len(degrees)) // columns
    size = min(micro_batches, int(counts.sum()))
    plan = _rows_of_steps(counts, size, random, whole_steps=whole_steps)
    # As far from their share of the samples as from the mean of another trait.
    weight = max(1.0, _SPREADS * np.sqrt(mixed.samples) / mixed.allowed)
    ranks = degree_of_pack / max(degrees)
    held = samples - ranks * (int(samples.sum()) / float(ranks.sum()))
    every = np.concatenate([weight * held[:, None], traits], axis=1)
    # Packs of levels have to be alike in attention as well, which needs more of them.
    width = max(1, -(-_WINDOW_ROWS // size)) if len(degrees) == 1 else len(plan)
    while True:
        rows = _arranged(
            costs,
            every,
            levels,
            degrees,
            data_parallel=data_parallel,
            plan=plan,
            window=np.arange(len(plan)) // width,
            random=random,
        )
        inside = len(rows) // size * size
        of_steps = rows[:inside].reshape(-1, size * data_parallel)
        if width == 1 or _is_mixed(samples, traits, degree_of_pack, of_steps, mixed):
            break
        width = -(-min(width, _WINDOW_ROWS * _NARROWER) // _NARROWER)
    cost = costs.sum(axis=1)
    parts = (rows[:inside].reshape(-1, size, data_parallel), rows[inside:][None])
    return np.concatenate([_ordered(_levelled(part, cost, degree_of_pack)) for part in parts])


def _rows_of_steps(counts: Ints, size: int, random: np.random.Generator, *, whole_steps: bool) -> Ints:
    """Return how many rows of each level each step has, [steps, levels]; the last step may have fewer rows than `size`.

    `counts` are the rows of each level. Where a level has no multiple of the steps, the rows that are left over go to
    steps in turns, so that no step has two of them.
    """
    total = int(counts.sum())
    steps, rest = divmod(total, size)
    last = counts * rest // total
    last[np.argsort(-(counts * rest % total), kind="stable")[: rest - int(last.sum())]] += 1
    left, numbers = counts - last, np.arange(len(counts))
    if whole_steps:
        own = np.repeat(np.diag(np.full(len(counts), size)), left // size, axis=0)
        over = random.permutation(np.repeat(numbers, left % size)).reshape(-1, size)
        plan = np.concatenate([own, (over[:, :, None] == numbers).sum(axis=1)])
    else:
        over = np.repeat(numbers, left % steps).reshape(-1, steps).T
        plan = left // steps + (over[:, :, None] == numbers).sum(axis=1)
    plan = random.permutation(plan)
    return np.concatenate([plan, last[None]]) if rest else plan


def _arranged(
    costs: Floats,
    traits: Floats,
    levels: Ints,
    degrees: Sequence[int],
    *,
    data_parallel: int,
    plan: Ints,
    window: Ints,
    random: np.random.Generator,
) -> Ints:
    """Return the numbers of packs, [rows, data ranks], by steps: with matched rows in each `window` of steps [steps].

    `plan` are the rows of each level in each step.
    """
    match = matched if len(degrees) == 1 else evened
    found, steps = [], []
    for level, degree in enumerate(degrees):
        members = random.permutation(np.flatnonzero(levels == level))
        if not len(members):
            continue
        of_windows = np.bincount(window, weights=plan[:, level]).astype(np.int64)
        width = data_parallel // degree
        taken = deal(traits[members], of_windows * width, random)
        order = np.argsort(taken, kind="stable")
        rows = members[order][match(costs[members[order]], width, taken[order])]
        # A window of one step has the rows of its step.
        is_dealt = len(of_windows) == len(plan)
        steps.append(taken[order][::width] if is_dealt else deal(traits[rows].sum(axis=1), plan[:, level], random))
        found.append(np.repeat(rows, degree, axis=1))
    return np.concatenate(found)[np.argsort(np.concatenate(steps), kind="stable")]


def _is_mixed(samples: Ints, traits: Floats, degrees: Ints, steps: Ints, mixed: Mixed) -> bool:
    """Return whether the steps [steps, packs] keep what they have to."""
    held = sums_of_steps(samples, degrees, steps)
    if not mixed.is_near(held).all():
        return False
    ratios = variance_ratios(sums_of_steps(traits, degrees, steps), held)
    return bool((ratios <= _MARGIN * mixed.variance).all())


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
