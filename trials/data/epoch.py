"""One epoch: packs arranged into optimizer steps, so that the data-parallel ranks of a step have the same work."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np

from trials import plugins
from trials.arrays import Floats, Ints
from trials.certification import Mixed
from trials.data.index import DatasetIndex
from trials.data.order import epoch_order
from trials.data.packers import PACKERS
from trials.data.packs import Oversize, Packs, build_packs
from trials.data.steps.arrangement import arrange
from trials.data.steps.traits import Traits
from trials.errors import DataError
from trials.grid import Grid
from trials.job import Job
from trials.plan import Levelled, Packed, Packing
from trials.sharing.share import ALONE, Share

BEST = "best"
"""In place of a packer's name: the packer that is best for the epoch."""
# A choice: less than trials can tell, and fewer packs cost less of what predictions leave out.
_TIE = 0.005
"""Between packers whose costs differ by less than this share, the one with fewest packs is best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """Cost of a pack, in any unit: floating-point operations of the model's shape, or measured seconds."""

    unit: float
    """Cost of one vision unit."""
    token: float
    """Cost of one text token, attention excluded."""
    square: float
    """Cost of attention, per squared sample length."""
    target: float = 0.0
    """Cost of one target in the head, in addition; 0 where `token` has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochSettings:
    """What all epochs of a training have in common, whatever its plan."""

    global_batch_samples: int
    weights: CostWeights
    """Weights of a pack's sizes in its cost, by which packs are matched across ranks."""
    seed: int = 0
    oversize: Oversize = "own-pack"
    batch_tolerance: float = 0.1
    """Share of the global batch by which the samples of a step may differ from it."""
    step_variance: float = 2.0
    """Most variance between steps, over that of steps in random order."""

    @classmethod
    def of_job(cls, job: Job, weights: CostWeights) -> "EpochSettings":
        return cls(
            global_batch_samples=job.training.global_batch_samples,
            weights=weights,
            seed=job.training.seed,
            oversize=job.data.oversize,
            batch_tolerance=job.training.batch_tolerance,
            step_variance=job.training.step_variance,
        )

    @property
    def mixed(self) -> Mixed:
        """What the steps have to keep."""
        return Mixed(samples=self.global_batch_samples, tolerance=self.batch_tolerance, variance=self.step_variance)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackSizes:
    """Sizes of what the model computes for each pack, as columns [packs]: padding and stand-in units included."""

    units: Ints
    """At least 1: a pack without images carries one zero unit."""
    tokens: Ints
    """At least 1: an empty pack carries one pad token."""
    squares: Ints
    """Sum of the squared lengths of its samples, which attend to themselves alone."""
    targets: Ints
    """Tokens with a label, on which alone the head runs; 0 for an empty pack."""
    samples: Ints

    def costs(self, weights: CostWeights) -> Floats:
        """Return the costs of vision units, of tokens with the targets among them, and of attention, [packs, 3]."""
        tokens = weights.token * self.tokens + weights.target * self.targets
        return np.stack((weights.unit * self.units, tokens, weights.square * self.squares), axis=1)

    def cost(self, weights: CostWeights) -> Floats:
        """Return the cost of each pack, [packs]."""
        cost: Floats = self.costs(weights).sum(axis=1)
        return cost


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackPart:
    """What one rank computes of a pack."""

    rows: Ints
    """Samples of the whole pack, as rows of the index."""
    share: Share = ALONE
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One optimizer step; the totals are over all data ranks, without padding."""

    packs: tuple[tuple[Ints, ...], ...]
    """For each data rank its micro-batches, each the rows of its samples in the index. A pack that several ranks share
    stands at the first of its ranks alone."""
    micro_batches: int
    """Micro-batches of each rank, shared ones included."""
    samples: int
    vision_units: int
    text_tokens: int
    targets: Ints
    """Target tokens of each sample, [samples]."""

    @property
    def target_tokens(self) -> int:
        return int(self.targets.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """The pack that each data rank trains on at each micro-batch; packs are arranged when this is asked for."""

    index: DatasetIndex
    packing: Packing
    """Packing of the epoch; where the job asks for the best packer, with the one that was chosen."""
    packs: Packs
    data_parallel: int
    micro_batches: int
    """Rows of a step; the last step may have fewer."""
    settings: EpochSettings
    arranged: Callable[[], Ints]
    """Return `assignment`; called once."""

    @cached_property
    def assignment(self) -> Ints:
        """Numbers of packs, [rows, data ranks]; step i is rows[i * micro_batches : (i + 1) * micro_batches].

        Neighbouring ranks with the same pack share it.
        """
        return self.arranged()

    @cached_property
    def height(self) -> int:
        """Number of rows."""
        return int(self.degrees.sum()) // self.data_parallel

    @property
    def steps(self) -> int:
        return -(-self.height // self.micro_batches)

    @property
    def batch_samples(self) -> float:
        """Mean number of samples in a full step."""
        return len(self.packs.samples) / self.height * self.micro_batches

    @property
    def batch_deviation(self) -> float:
        """How far a full step's mean number of samples is from what the job asks: 0.1 is 10 %, either way."""
        return abs(self.batch_samples / self.settings.global_batch_samples - 1)

    @property
    def keeps_batch(self) -> bool:
        """Whether that is as near as every plan has to be."""
        return self.batch_deviation <= self.settings.batch_tolerance

    def rows(self, step: int) -> Ints:
        """Return the numbers of the step's packs, [micro-batches, data ranks]. Raise IndexError past the last."""
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} of an epoch of {self.steps} steps")
        return self.assignment[step * self.micro_batches : (step + 1) * self.micro_batches]

    def step(self, number: int) -> Step:
        rows = self.rows(number)
        packs = tuple(
            tuple(self.packs.pack(pack) for pack in of_rank if not self.part(int(pack), rank).share.index)
            for rank, of_rank in enumerate(rows.T)
        )
        samples = np.concatenate([pack for of_rank in packs for pack in of_rank])
        return Step(
            packs=packs,
            micro_batches=len(rows),
            samples=len(samples),
            vision_units=int(self.index.vision_units[samples].sum()),
            text_tokens=int(self.index.text_tokens[samples].sum()),
            targets=self.index.target_tokens[samples].astype(np.int64),
        )

    @property
    def degrees(self) -> Ints:
        """Number of ranks that share each pack, [packs]."""
        degrees = np.array(self.packing.degrees, dtype=np.int64)
        return np.broadcast_to(degrees, len(self.packs)) if len(degrees) == 1 else degrees[self.packs.level_of_pack]

    def part(self, pack: int, data_rank: int) -> PackPart:
        """Return the part of a pack that one of its data ranks computes."""
        level = 0 if self.packs.levels is None else int(self.packs.levels[pack])
        degree = self.packing.degrees[level]
        share = Share(index=Grid.sharing_place(data_rank, degree), degree=degree)
        return PackPart(rows=self.packs.pack(pack), share=share, level=level)

    def pack_sizes(self) -> PackSizes:
        return pack_sizes(self.index, self.packs)


def pack_sizes(index: DatasetIndex, packs: Packs) -> PackSizes:
    """Return the sizes of every pack, padding included."""
    counts = packs.counts
    if packs.padded:
        longest = packs.largest(index.text_tokens)
        tokens, squares = counts * longest, counts * longest**2
    else:
        tokens, squares = packs.sums(index.text_tokens), packs.sums(index.text_tokens.astype(np.int64) ** 2)
    # What stands in for nothing is computed too: one zero unit, one pad token.
    units = np.maximum(packs.sums(index.vision_units), 1)
    return PackSizes(
        units=units,
        tokens=np.maximum(tokens, 1),
        squares=np.maximum(squares, 1),
        targets=packs.sums(index.target_tokens),  # padding has none
        samples=counts,
    )


def build_epoch(
    index: DatasetIndex,
    packing: Packing,
    settings: EpochSettings,
    *,
    data_parallel: int,
    number: int = 0,
    order: Ints | None = None,
) -> Epoch:
    """Return the steps of epoch `number`. Equal arguments give equal steps, on every rank and after every restart.

    `order` has the samples to pack, as rows of the index: by default all of the epoch, in its random order. Packs of
    the whole epoch are cached, for other numbers of data ranks.

    Raise DataError like `build_packs`.
    """
    weights, oversize = settings.weights, settings.oversize

    def build(packing: Packing) -> Epoch:
        # Another stream than that of the order, which is drawn from [seed, number].
        random = np.random.default_rng([settings.seed, number, 1])
        packs_seed = int(random.integers(2**31))
        if order is None:
            packs = _packs(index, packing, packs_seed, oversize, (settings.seed, number))
        else:
            packs = build_packs(index, order, packing, packs_seed, oversize)
        columns = [_columns(data_parallel, degree) for degree in packing.degrees]
        for level, of_level in enumerate(columns):
            packs = _divisible(index, packs, level, of_level, weights)
        rows = sum(len(packs.of_level(level)) // of_level for level, of_level in enumerate(columns))
        # Rows have different numbers of samples; their mean decides how many make up the global batch.
        micro_batches = max(1, round(settings.global_batch_samples * rows / len(packs.samples)))
        arranged = partial(
            _arranged,
            index,
            packing,
            packs,
            rows=rows,
            data_parallel=data_parallel,
            micro_batches=micro_batches,
            settings=settings,
            random=random,
        )
        return Epoch(
            index=index,
            packing=packing,
            packs=packs,
            data_parallel=data_parallel,
            micro_batches=micro_batches,
            settings=settings,
            arranged=arranged,
        )

    if not isinstance(packing, Packed) or packing.packer != BEST:
        return build(packing)
    built = [build(replace(packing, packer=name)) for name in plugins.names(PACKERS)]
    # On one rank, which waits at each row for the rank with the costliest pack.
    of_packs = (_costs(index, packing, each.packs, weights).sum(axis=1)[each.assignment] for each in built)
    costs = [float(cost.max(axis=1).sum()) for cost in of_packs]
    tied = (each for each, cost in zip(built, costs, strict=True) if cost <= (1 + _TIE) * min(costs))
    return min(tied, key=lambda epoch: len(epoch.packs))


def _costs(index: DatasetIndex, packing: Packing, packs: Packs, weights: CostWeights) -> Floats:
    """Return the costs of `PackSizes.costs` on each of the ranks that share a pack, [packs, 3].

    They are times the largest degree: exact where all packs have one degree, so that ties stay ties.
    """
    degrees = np.array(packing.degrees, dtype=np.int64)[packs.level_of_pack]
    return pack_sizes(index, packs).costs(weights) * (max(packing.degrees) / degrees)[:, None]


def _arranged(
    index: DatasetIndex,
    packing: Packing,
    packs: Packs,
    *,
    rows: int,
    data_parallel: int,
    micro_batches: int,
    settings: EpochSettings,
    random: np.random.Generator,
) -> Ints:
    """Return the numbers of the packs, [rows, data ranks]."""
    if packs.padded:
        # Padded micro-batches are the usual training, which does not match them across ranks.
        return np.arange(len(packs), dtype=np.int64).reshape(rows, data_parallel)
    return arrange(
        _costs(index, packing, packs, settings.weights),
        packs.counts,
        Traits.of(index, packs.samples).deviations(packs.starts),
        packs.level_of_pack,
        packing.degrees,
        data_parallel=data_parallel,
        micro_batches=micro_batches,
        mixed=settings.mixed,
        random=random,
        whole_steps=isinstance(packing, Levelled) and packing.whole_steps,
    )


@lru_cache(maxsize=64)
def _packs(index: DatasetIndex, packing: Packing, seed: int, oversize: Oversize, shown: tuple[int, int]) -> Packs:
    """Return the packs of an epoch's own order, which `shown` draws: (seed, epoch)."""
    return build_packs(index, epoch_order(index, *shown), packing, seed, oversize)


def _columns(data_parallel: int, degree: int) -> int:
    """Return the packs of a row; raise DataError where ranks would be left over."""
    if data_parallel % degree:
        raise DataError(
            f"packs are shared by {degree} ranks, which do not divide {data_parallel} data ranks; give "
            f"{-(-data_parallel // degree) * degree}"
        )
    return data_parallel // degree


def _divisible(index: DatasetIndex, packs: Packs, level: int, columns: int, weights: CostWeights) -> Packs:
    """Return a multiple of `columns` packs of a level: halve the costliest, or add empty ones if none can be halved.

    Of padded micro-batches only those of the last row are cut again, so that as usual the last step alone is short.
    """
    if packs.padded:
        return packs.with_even_end(columns)
    while missing := -len(members := packs.of_level(level)) % columns:
        divisible = members[packs.counts[members] > 1]
        cost = pack_sizes(index, packs).cost(weights)
        chosen = divisible[np.argsort(-cost[divisible], kind="stable")[:missing]]
        # A new start in the middle of a pack makes two of it; one at the end adds an empty pack.
        halves = packs.starts[chosen] + packs.counts[chosen] // 2
        more = halves if len(chosen) else np.full(missing, packs.starts[-1])
        packs = packs.with_starts(more, level)
    return packs
