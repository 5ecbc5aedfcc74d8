"""Sizes of the packs of an epoch, in the columns that layer costs depend on."""

import copy
from functools import cached_property

import numpy as np
from typing_extensions import override

from autotune.prediction.columns import EVERY, SQUARES, TARGETS, TOKENS, holding_all
from trials.arrays import Floats, Ints
from trials.costs.layer import LayerCost
from trials.data.epoch import Epoch

_TOGETHER = 32
"""Rows that all others are compared with before those that are left are copied; a choice."""
_PARTS = 1 << 10
"""Parts of a target; a power of two, so that they have no rounding."""


class EpochSizes:
    """Sizes of an epoch's packs, in the columns of `autotune.prediction.columns`."""

    def __init__(self, epoch: Epoch, tensor: int = 1) -> None:
        self.epoch = epoch
        self.tensor = tensor
        """Ranks that hold a copy of a stage together, and compute each of its packs."""
        self._heaviest: dict[tuple[int, tuple[int, ...]], Floats] = {}
        self._in_chunks: dict[tuple[int, float], EpochSizes] = {}

    def held_by(self, tensor: int) -> "EpochSizes":
        """Return the sizes of the same packs where `tensor` ranks hold a copy of a stage together."""
        if tensor == self.tensor:
            return self
        other = type(self)(self.epoch, tensor)
        other.whole, other.degrees, other.levels = self.whole, self.degrees, self.levels
        return other

    @cached_property
    def table(self) -> Floats:
        """The part of each pack that the fullest of the ranks that share it computes, [packs, 5]."""
        whole, ranks = self.whole, self.ranks[:, None]
        if (ranks == 1).all():
            return whole
        table = whole.copy()
        # Units and tokens cannot be cut; attention is shared by heads.
        table[:, :SQUARES] = np.ceil(whole[:, :SQUARES] / ranks)
        table[:, SQUARES] /= ranks[:, 0]
        table[:, TARGETS] = _fullest_targets(self.epoch, table[:, TOKENS], int(ranks.max()))
        return table

    @cached_property
    def whole(self) -> Floats:
        """Whole packs, [packs, 5]."""
        sizes = self.epoch.pack_sizes()
        columns = (sizes.units, sizes.tokens, sizes.squares, np.ones(len(sizes.units)), sizes.targets)
        table: Floats = np.stack([column.astype(np.float64) for column in columns], axis=1)
        return table

    @cached_property
    def evenly(self) -> "EpochSizes":
        """The same packs, where the ranks that share a pack have equally many of its targets: the least of the fullest.

        These sizes themselves where each pack is that of one rank.
        """
        if (self.ranks == 1).all():
            return self
        return self._with_targets(np.ceil(self.whole[:, TARGETS] / self.ranks))

    def in_chunks(self, head: LayerCost) -> "EpochSizes":
        """The same packs with the targets that count for bytes, where this head holds the logits of some at once.

        These sizes themselves where it holds those of each pack.
        """
        if not head.chunk_targets or self.table[:, TARGETS].max() <= head.chunk_targets:
            return self
        chunks = head.chunk_targets, head.further_share
        if chunks not in self._in_chunks:
            # Of whole parts, so that differences of sums stay exact.
            counted = np.ceil(_PARTS * holding_all(self.table[:, TARGETS], head)) / _PARTS
            self._in_chunks[chunks] = self._with_targets(counted)
        return self._in_chunks[chunks]

    def _with_targets(self, targets: Floats) -> "EpochSizes":
        other = copy.copy(self)
        for derived in ("_before", "_levels_apart", "evenly", "mean"):
            other.__dict__.pop(derived, None)
        other._heaviest, other._in_chunks, other.table = {}, {}, self.table.copy()
        other.table[:, TARGETS] = targets
        return other

    @cached_property
    def degrees(self) -> Ints:
        """Number of data ranks that share each pack, [packs]."""
        return self.epoch.degrees

    @property
    def ranks(self) -> Ints:
        """Number of ranks that compute each pack, [packs]."""
        return self.degrees * self.tensor

    @cached_property
    def levels(self) -> Ints:
        """Level of each pack, [packs]."""
        return self.epoch.packs.level_of_pack

    @cached_property
    def samples_alone(self) -> Floats:
        """A rank's part without padding, and without placeholders in packs without image or sample, [packs, 5]."""
        packs, index = self.epoch.packs, self.epoch.index
        lengths = index.text_tokens.astype(np.int64)  # their squares exceed 32 bits
        columns = (
            packs.sums(index.vision_units),
            packs.sums(lengths),
            packs.sums(lengths**2),
            packs.counts > 0,
            packs.sums(index.target_tokens),
        )
        table: Floats = np.stack([column.astype(np.float64) for column in columns], axis=1)
        return table / self.ranks[:, None]

    @cached_property
    def equal_parts(self) -> Floats:
        """A rank's part if those that share a pack divided all of it evenly, [packs, 5]."""
        parts: Floats = self.whole / self.ranks[:, None]
        return parts

    @cached_property
    def mean(self) -> Floats:
        """Mean of all packs, [1, 5]."""
        mean: Floats = self.table.mean(axis=0, keepdims=True)
        return mean

    @property
    def of_levels(self) -> tuple["EpochSizes", ...]:
        """The packs of each level by themselves; these sizes where there is one level."""
        # Sizes that hold themselves would be kept until the next collection of garbage.
        return (self,) if len(self.epoch.packing.degrees) == 1 else self._levels_apart

    @cached_property
    def _levels_apart(self) -> "tuple[LevelSizes, ...]":
        return tuple(LevelSizes(self, level) for level in range(len(self.epoch.packing.degrees)))

    @cached_property
    def degree(self) -> int:
        """Number of data ranks that share each pack, where all packs are of one level."""
        (degree,) = self.epoch.packing.degrees
        return degree

    @cached_property
    def row_share(self) -> float:
        """Share of the rows of the epoch that have these packs."""
        return 1.0

    @cached_property
    def blocks(self) -> tuple[Ints, ...]:
        """Numbers of packs [steps, micro-batches, data ranks] of the full steps, then of the shorter last one."""
        rows, count = self.epoch.assignment, self.epoch.micro_batches
        full = len(rows) // count * count
        blocks = (rows[:full].reshape(-1, count, rows.shape[1]), rows[full:][None])
        return tuple(block for block in blocks if block.size)

    @property
    def epoch_steps(self) -> float:
        """Steps of the epoch, a shorter last one included."""
        return float(self.epoch.steps)

    @property
    def timed_blocks(self) -> tuple[Ints, ...]:
        """Blocks whose mean step takes as long as the mean step of the epoch."""
        return self.blocks

    @cached_property
    def pack_samples(self) -> Ints:
        """[packs]"""
        return self.epoch.pack_sizes().samples

    @cached_property
    def step_samples(self) -> Ints:
        """Samples of each step, over all ranks, [steps]."""
        # Whole numbers divided by the ranks that share a pack, which each count it.
        parts = self.pack_samples / self.degrees
        counts = np.concatenate([parts[block].sum(axis=(1, 2)) for block in self.blocks])
        samples: Ints = np.rint(counts).astype(np.int64)
        return samples

    def heaviest(self, in_flight: int, columns: tuple[int, ...] = EVERY) -> Floats:
        """Return packs in flight of a rank's step that may cost most, [candidates, 2, 5].

        They are the pack whose backward pass runs, and the sum of those that follow it: `in_flight` packs together, or
        fewer at the end of a step. For any non-negative costs of the columns of either that are 0 for all but these
        columns, the largest sum is among them.
        """
        if (in_flight, columns) not in self._heaviest:  # every solved plan of the epoch asks again
            sizes = []
            for before in self._before:
                some, packs = before[[*columns]], before.shape[2] - 1
                ends = np.minimum(np.arange(packs) + in_flight, packs)
                running, behind = some[:, :, 1:] - some[:, :, :-1], some[:, :, ends] - some[:, :, 1:]
                sizes.append(np.concatenate([running, behind]).reshape(2 * len(columns), -1))
            found = _not_dominated(np.concatenate(sizes, axis=1))
            every = np.zeros((len(found), 2, len(EVERY)))
            every[:, :, columns] = found.reshape(-1, 2, len(columns))
            self._heaviest[in_flight, columns] = every
        return self._heaviest[in_flight, columns]

    @cached_property
    def _before(self) -> tuple[Floats, ...]:
        """Sums of the packs before each of a rank's step, and of all, [5, steps, micro-batches + 1, data ranks]."""
        # Sizes are whole numbers, so that differences of these sums are exact.
        sizes = (self.table.T[:, block] for block in self.blocks)
        return tuple(np.cumsum(np.pad(each, ((0, 0), (0, 0), (1, 0), (0, 0))), axis=2) for each in sizes)


class ExcerptSizes(EpochSizes):
    """Sizes of the first steps of a longer epoch, of which the last step may be cut short."""

    @property
    @override
    def epoch_steps(self) -> float:
        return self.epoch.height / self.epoch.micro_batches

    @property
    @override
    def timed_blocks(self) -> tuple[Ints, ...]:
        # A step that is cut short would count as much as all short steps of a long epoch.
        return self.blocks[:1]


class LevelSizes(EpochSizes):
    """Sizes of the packs of one level by themselves, numbered from 0."""

    def __init__(self, whole: EpochSizes, level: int) -> None:
        super().__init__(whole.epoch, whole.tensor)
        packs = np.flatnonzero(whole.levels == level)
        self.row_share = float(whole.degrees[packs].sum() / whole.degrees.sum())
        self.degree = whole.epoch.packing.degrees[level]
        found = [whole.whole[packs], whole.table[packs], whole.samples_alone[packs]]
        if not len(packs):  # a level that no sample needs has one pack, of nothing
            found = [np.zeros((1, each.shape[1])) for each in found]
        self.whole, self.table, self.samples_alone = found
        self.degrees, self.levels = np.full(len(self.table), self.degree), np.full(len(self.table), level)

    @cached_property
    def blocks(self) -> tuple[Ints, ...]:
        """Each pack as a step of its own: which of them follow each other in a step depends on the other levels."""
        return (np.arange(len(self.table))[:, None, None],)


def _fullest_targets(epoch: Epoch, part_tokens: Floats, parts: int) -> Floats:
    """Return the most targets in a part of each pack, [packs]: `part_tokens` [packs] long, at most `parts` to a pack.

    Where targets lie is not known: each sample is taken to end with them, which is so for one question and answer, and
    puts them closer together than several answers are.
    """
    packs, index = epoch.packs, epoch.index
    lengths, targets = (column[packs.samples].astype(np.int64) for column in (index.text_tokens, index.target_tokens))
    pack = np.repeat(np.arange(len(packs)), packs.counts)
    widths = packs.largest(index.text_tokens)[pack] if packs.padded else lengths
    before = np.cumsum(widths) - widths
    starts = before - before[packs.starts[:-1][pack]]
    # The row of a token has the label of the next one.
    first = np.maximum(starts, starts + lengths - 1 - targets)
    most = np.zeros(len(packs))
    for part in range(parts):
        begin, end = part * part_tokens[pack], (part + 1) * part_tokens[pack]
        inside = np.maximum(np.minimum(first + targets, end) - np.maximum(first, begin), 0)
        most = np.maximum(most, np.bincount(pack, inside, minlength=len(packs)))
    return most


def _not_dominated(columns: Floats) -> Floats:
    """Return the rows that no other row reaches or exceeds in every column, [candidates, columns]; given transposed."""
    # By descending sums of shares, a row is dominated by earlier ones alone.
    scale = np.maximum(columns.max(axis=1), np.finfo(float).tiny)
    columns = columns[:, np.argsort(-((1 / scale) @ columns), kind="stable")]
    kept = []
    while columns.shape[1]:
        first, others = columns[:, :_TOGETHER], columns[:, _TOGETHER:]
        reaches = (first[:, :, None] >= first[:, None, :]).all(axis=0)  # [one, other]
        tops = first[:, ~np.triu(reaches, 1).any(axis=0)]
        kept.append(tops)
        is_reached = np.ones((tops.shape[1], others.shape[1]), dtype=bool)
        for of_tops, of_others in zip(tops, others, strict=True):
            is_reached &= of_tops[:, None] >= of_others
        columns = others[:, ~is_reached.any(axis=0)]
    return np.concatenate(kept, axis=1).T
