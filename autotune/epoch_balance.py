"""Balance of an epoch: the ratios of OmniBal and HBP, and the cost of the waiting that is left.

Sources: OmniBal (ICML 2025) for pad and dist ratio; HBP (Hierarchical Balance Packing) for the attention balance ratio.
The load of a pack is what the model computes for it, padding and stand-ins included.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Floats, Ints
from trials.data.epoch import CostWeights, Epoch
from trials.plan import Padded


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpread:
    """Samples in the parts of an epoch."""

    mean: float
    least: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """An epoch in numbers. Ratios and shares lie in 0 to 1."""

    samples: int
    """Shown by the epoch, each as often as it is shown."""
    packs: int
    """Micro-batches of all data ranks."""
    steps: int
    data_parallel: int
    """N below."""
    pad_ratio: float
    """Share of the language model's tokens that is padding: the sum of t_max - t_i over the sum of t_max, for t_i the
    tokens of sample i and t_max the most of its micro-batch (OmniBal). That is OmniBal's ratio of a micro-batch of B
    samples, sum_i (t_max - t_i) / (t_max B), each weighted by its size, as OmniBal's code adds them up."""
    dist_ratio_vision: float
    """Share of vision units that ranks could have computed while they wait: sum_i (T_max - T_i) / (T_max N) over the N
    data ranks of a row of micro-batches, T_i being rank i's vision units; mean over rows (OmniBal)."""
    dist_ratio_language: float
    """The ratio above with T_i the rank's text tokens (OmniBal)."""
    dist_ratio_targets: float
    """The ratio above with T_i the rank's targets, on which alone the head runs."""
    attention_balance_ratio: float
    """The same with A_i, the sum of squared sample lengths, in place of T_i (HBP); 0 is even."""
    cost_efficiency: float
    """Cost of all packs over N times the sum over rows of the row's largest cost: 1 if no rank ever waits, when the
    ranks meet after every micro-batch."""
    step_cost_efficiency: float
    """The same with the sum of a rank's costs over a step: when the ranks meet at the end of a step alone."""
    cost: float
    """Sum over rows of the row's largest cost, in the unit of the weights: what an epoch costs one rank, with waiting,
    padding and stand-ins."""
    samples_per_pack: SampleSpread
    relaxation_missed: float | None
    """Share of packs that are not full enough: fewer units than Q'v and fewer tokens than Q't (OmniBal). None for
    padded micro-batches."""
    vision_fill: float | None
    """Mean share of Qv that a pack uses, over the packs without an over-size sample; None for padded, or a Qv of 0."""
    text_fill: float | None
    """Mean share of Qt that a pack uses, over the same packs."""
    samples_per_step: SampleSpread
    """Samples of full steps; of all steps when none is full."""
    steps_near: float
    """Share of those steps whose samples are as near to the global batch as `training.batch_tolerance` says; the last
    of the epoch may have fewer."""
    oversize: int
    """Samples above Qv or Qt, the skipped ones included."""
    skipped: int
    """Samples that the epoch leaves out because they are over-size."""

    @property
    def cost_per_sample(self) -> float:
        """`cost` of a sample on all data ranks, which is comparable between packings of the same samples."""
        return self.cost * self.data_parallel / self.samples


def balance(epoch: Epoch, weights: CostWeights) -> Balance:
    """Return the balance of an epoch."""
    sizes, ranks = epoch.pack_sizes(), epoch.assignment.shape[1]

    def of_ranks(column: Ints | Floats) -> Floats:
        """Return the load of each rank, [rows, data ranks]: ranks that share a pack have equal parts of it."""
        return np.asarray((column / epoch.degrees)[epoch.assignment], dtype=np.float64)

    cost = of_ranks(sizes.cost(weights))
    ideal, slowest = float(cost.sum()) / ranks, float(cost.max(axis=1).sum())
    # Rounded, since the equal parts of ranks that share packs add up to whole numbers but for the error of floats.
    samples = np.rint(step_sums(epoch, of_ranks(sizes.samples)).sum(axis=1))
    # The last step may have fewer rows. Without a full step all of them count: a slice to None is whole.
    samples = samples[: len(epoch.assignment) // epoch.micro_batches or None]
    missed, vision_fill, text_fill = _fullness(epoch)
    skipped, tokens = epoch.packs.skipped, epoch.index.text_tokens
    computed = int((epoch.packs.counts * epoch.packs.largest(tokens)).sum())
    return Balance(
        samples=len(epoch.packs.samples),
        packs=len(epoch.packs),
        steps=epoch.steps,
        data_parallel=ranks,
        pad_ratio=1 - int(epoch.packs.sums(tokens).sum()) / computed if epoch.packs.padded else 0.0,
        dist_ratio_vision=float(dist_ratios(of_ranks(sizes.units)).mean()),
        dist_ratio_language=float(dist_ratios(of_ranks(sizes.tokens)).mean()),
        dist_ratio_targets=float(dist_ratios(of_ranks(sizes.targets)).mean()),
        attention_balance_ratio=float(dist_ratios(of_ranks(sizes.squares)).mean()),
        cost_efficiency=ideal / slowest,
        step_cost_efficiency=ideal / float(step_sums(epoch, cost).max(axis=1).sum()),
        cost=slowest,
        samples_per_pack=_spread(sizes.samples),
        relaxation_missed=missed,
        vision_fill=vision_fill,
        text_fill=text_fill,
        samples_per_step=_spread(samples),
        steps_near=epoch.settings.mixed.share_near(samples, to_end=len(samples) == epoch.steps),
        oversize=int(np.count_nonzero(oversize(epoch))) + skipped,
        skipped=skipped,
    )


def dist_ratios(load: Ints | Floats) -> Floats:
    """Return the idle share of each row of [rows, data ranks]: sum_i (max - load_i) / (max N) = 1 - mean / max.

    It is 0 where no rank has a load, as of targets.
    """
    most = load.max(axis=1)
    ratios: Floats = 1 - np.where(most > 0, load.mean(axis=1) / np.where(most > 0, most, 1), 1)
    return ratios


def step_sums(epoch: Epoch, load: Ints | Floats) -> Floats:
    """Return the sums of [rows, data ranks] over the rows of each step, [steps, data ranks]."""
    sums: Floats = np.add.reduceat(load, np.arange(0, len(load), epoch.micro_batches), axis=0).astype(np.float64)
    return sums


def oversize(epoch: Epoch) -> NDArray[np.bool_]:
    """Return whether each shown sample, in order of packs, is above the capacities; a padded micro-batch has none."""
    units, tokens = (column[epoch.packs.samples] for column in (epoch.index.vision_units, epoch.index.text_tokens))
    if isinstance(packing := epoch.packing, Padded):
        return np.zeros(len(units), dtype=np.bool_)
    above: NDArray[np.bool_] = (units > packing.levels[-1].qv) | (tokens > packing.levels[-1].qt)
    return above


def mixing(epoch: Epoch, following: Epoch) -> float:
    """Return how far the following epoch's steps are a fresh shuffle: 1 if so, 0 for steps of the same samples.

    1 - (observed - expected) / (1 - expected), with `observed` the share of the pairs of samples in a step of `epoch`
    that are in one step of `following` too, and `expected` that share for random steps of the same sizes. Chance
    moves it a little, also above 1. Both epochs must show the same samples.
    """
    first, second = _step_of_samples(epoch), _step_of_samples(following)
    # One number for each pair of steps, since `np.unique` of integers is much faster than of rows.
    _, both = np.unique(first * following.steps + second, return_counts=True)
    expected = _pairs(np.bincount(second)) / max(_pairs(np.array([len(second)])), 1)
    in_first = _pairs(np.bincount(first))
    if expected == 1 or not in_first:  # one step, or steps of one sample: there is nothing to mix
        return 1.0
    return 1 - (_pairs(both) / in_first - expected) / (1 - expected)


def _pairs(counts: Ints) -> float:
    return float((counts * (counts - 1) / 2).sum())


def _step_of_samples(epoch: Epoch) -> Ints:
    """Return the step of each shown sample, in order of the index's rows; one that is shown twice comes twice."""
    rows, ranks = epoch.assignment.shape
    step_of_pack = np.empty(len(epoch.packs), dtype=np.int64)
    step_of_pack[epoch.assignment.ravel()] = np.repeat(np.arange(rows) // epoch.micro_batches, ranks)
    steps: Ints = np.repeat(step_of_pack, epoch.packs.counts)[np.argsort(epoch.packs.samples, kind="stable")]
    return steps


def _fullness(epoch: Epoch) -> tuple[float | None, float | None, float | None]:
    """Return (share of packs that miss the relaxation, mean fill of Qv, of Qt)."""
    if isinstance(packing := epoch.packing, Padded):
        return None, None, None
    units, tokens = epoch.packs.sums(epoch.index.vision_units), epoch.packs.sums(epoch.index.text_tokens)
    limits = np.array([(each.qv, each.qt, each.qv_min, each.qt_min) for each in packing.levels], dtype=np.int64)
    qv, qt, qv_min, qt_min = limits[epoch.packs.level_of_pack].T
    missed = float(np.mean(((units < qv_min) | (qv == 0)) & (tokens < qt_min)))
    within = (units <= qv) & (tokens <= qt)
    if not within.any():
        return missed, None, None
    vision_fill = float((units[within] / qv[within]).mean()) if limits[:, 0].all() else None
    return missed, vision_fill, float((tokens[within] / qt[within]).mean())


def _spread(samples: Ints | Floats) -> SampleSpread:
    return SampleSpread(mean=float(samples.mean()), least=int(samples.min()), most=int(samples.max()))
