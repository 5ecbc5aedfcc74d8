"""Packs: the samples of each micro-batch, in compressed sparse rows."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trials import plugins
from trials.data.index import DatasetIndex
from trials.data.packers import PACKERS
from trials.data.records.sample import Ints
from trials.errors import DataError
from trials.plan import Packed, Packing, Padded

Oversize: TypeAlias = Literal["own-pack", "truncate", "skip", "fail"]
"""`data.oversize` of the job. `truncate` cuts samples before packs are built, and is `own-pack` here."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packs:
    """Pack i holds the rows `samples[starts[i] : starts[i + 1]]` of the index; it may hold none."""

    samples: Ints
    """Rows of the index in order of packs, [shown samples]."""
    starts: Ints
    """[packs + 1]"""
    padded: bool
    """Samples of a pack are padded to its longest, not joined."""
    skipped: int = 0
    """Samples left out because they are above the pack's capacity."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def counts(self) -> Ints:
        """Samples of each pack, [packs]."""
        return np.diff(self.starts)

    def pack(self, number: int) -> Ints:
        """Return the rows of one pack."""
        return self.samples[self.starts[number] : self.starts[number + 1]]

    def sums(self, column: NDArray[np.integer]) -> Ints:
        """Sum over each pack of a column of the index, [packs]."""
        return self._reduced(np.add, column)

    def largest(self, column: NDArray[np.integer]) -> Ints:
        """Largest entry in each pack of a column of the index, [packs]; 0 for an empty pack."""
        return self._reduced(np.maximum, column)

    def _reduced(self, function: np.ufunc, column: NDArray[np.integer]) -> Ints:
        result = np.zeros(len(self), dtype=np.int64)
        # reduceat has no notion of an empty stretch; leaving those out does not move the ends of the others.
        filled = self.counts > 0
        result[filled] = function.reduceat(column[self.samples].astype(np.int64), self.starts[:-1][filled])
        return result


def build_packs(index: DatasetIndex, order: Ints, packing: Packing, seed: int, oversize: Oversize) -> Packs:
    """Return packs of the rows in `order`, each as often as it is there, unless it is skipped as over-size.

    Raise DataError for an over-size sample under `oversize: fail`, and when there is nothing to pack.
    """
    if not len(order):
        raise DataError("the epoch contains no sample; raise `repeat` under data.sources")
    match packing:
        case Padded(samples=size):
            starts = np.append(np.arange(0, len(order), size, dtype=np.int64), len(order))
            return Packs(samples=order, starts=starts, padded=True)
        case Packed():
            return _packed(index, order, packing, seed, oversize)


def _packed(index: DatasetIndex, order: Ints, packing: Packed, seed: int, oversize: Oversize) -> Packs:
    units, tokens = index.vision_units[order].astype(np.int64), index.text_tokens[order].astype(np.int64)
    fits = (units <= packing.qv) & (tokens <= packing.qt)
    if oversize == "fail" and not fits.all():
        first = int(order[~fits][0])
        lengths, samples = index.lengths(first), len(np.unique(order[~fits]))
        raise DataError(
            f"{index.where(first)}: {lengths.vision_units} vision units and {lengths.text_tokens} text tokens are "
            f"above the pack's qv={packing.qv} qt={packing.qt}, as in {samples} samples; raise the capacities or set "
            "data.oversize to own-pack or skip"
        )
    if oversize == "skip" and not fits.any():
        raise DataError(f"every sample is above qv={packing.qv} qt={packing.qt} and skipped; raise them")
    packer = plugins.load(PACKERS, packing.packer)
    packed, starts = packer.pack(units[fits], tokens[fits], packing, seed)
    # What is above a capacity is a pack of its own, behind the others.
    alone = order[:0] if oversize == "skip" else order[~fits]
    return Packs(
        samples=np.concatenate([order[fits][packed], alone]),
        starts=np.concatenate([starts, starts[-1] + np.arange(1, len(alone) + 1)]),
        padded=False,
        skipped=int(np.count_nonzero(~fits)) if oversize == "skip" else 0,
    )
