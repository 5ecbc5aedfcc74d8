"""The balance of the data before and after packing, as `autotune pack INPUT` shows it."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.epoch_balance import Balance, balance, mixing
from autotune.errors import PackError
from autotune.packing.material import Material, PackOptions
from autotune.search.space.capacities import OMNIBAL_SLACK, capacities
from trials.arrays import Ints
from trials.certification import Neutrality
from trials.data.epoch import BEST, Epoch, build_epoch
from trials.data.index import COLUMNS, DatasetIndex, profile
from trials.data.neutral import neutrality
from trials.errors import InvalidPlan
from trials.plan import Packed, Packing, Padded
from trials.units import number_of

UNPACKED = Padded(samples=4)
"""The packing to compare with: micro-batches of OmniBal's baseline."""
_TRIED_SAMPLES = 20_000
"""Most samples, drawn at random, on which capacities are compared."""
# A choice, as for packers (`_TIE` of trials/data/epoch.py): a difference of 0.5 % is below the noise of trials.
_ALIKE = 0.005
# Least share of steps near the global batch. A choice below the 99 % of a search, since capacities are compared on a
# draw.
_MOST_STEPS = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side:
    """Micro-batches of one packing, and their balance."""

    epoch: Epoch
    balance: Balance
    """By the cost of a training, by which packs are matched."""
    sample_flops: float
    """Forward floating-point operations of a sample on all data ranks, with waiting, padding and stand-ins."""
    neutrality: Neutrality
    """The steps next to steps in random order."""
    mixing: float
    """How far the next epoch is a fresh shuffle, as `autotune.epoch_balance.mixing` says."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Balanced:
    """Balance of the same samples as unpacked micro-batches and as packs."""

    material: Material
    number: int
    """Number of the epoch."""
    before: Side
    after: Side
    packing: Packed
    """Packing of `after`, with the packer that was chosen."""
    reason: str
    """Reason for the capacities."""

    @property
    def oversize(self) -> Ints:
        """Rows of the index above the capacities."""
        return np.flatnonzero(_are_above(self.material.index, self.packing))


def balanced(material: Material, wanted: PackOptions) -> Balanced:
    """Pack the material with the capacities that were asked for, else with the best candidate.

    Raise PackError for capacities that contradict each other and for more ranks than packs, UnknownName for a packer
    that is not there, and DataError like `build_epoch`.
    """
    packing, reason = _chosen(material, wanted)
    after = _side(material, packing, wanted.epoch)
    shown = material
    if material.settings.oversize == "skip":
        # The longest samples cost most, so that leaving them out of one side alone would look like a gain.
        shown = replace(material, index=material.index.keep(~_are_above(material.index, packing)))
    taken = after.epoch.packing
    assert isinstance(taken, Packed)  # as `packing` is
    return Balanced(
        material=material,
        number=wanted.epoch,
        before=_side(shown, UNPACKED, wanted.epoch),
        after=after,
        packing=taken,
        reason=reason,
    )


def _are_above(index: DatasetIndex, packing: Packed) -> NDArray[np.bool_]:
    """Return whether each sample of the index is above the capacities."""
    above: NDArray[np.bool_] = (index.vision_units > packing.qv) | (index.text_tokens > packing.qt)
    return above


def _side(material: Material, packing: Packing, number: int) -> Side:
    epoch, following = (_epoch(material, material.index, packing, each) for each in (number, number + 1))
    # Fewer packs than ranks: the only row was filled with halves of packs, or left empty.
    if len(epoch.assignment) == 1 and isinstance(packing, Packed):
        packs = len(_epoch(material, material.index, packing, number, data_parallel=1).packs)
        if packs < material.data_parallel:
            raise PackError(
                f"{material.data_parallel} data-parallel ranks are more than the {number_of(packs, 'pack')} of "
                f"qv={packing.qv} qt={packing.qt}; give at most --data-parallel {packs} (hardware.devices of a job), "
                "smaller capacities or more data"
            )
    return Side(
        epoch=epoch,
        balance=balance(epoch, material.settings.weights),
        sample_flops=balance(epoch, material.forward).cost_per_sample,
        neutrality=neutrality(epoch),
        mixing=mixing(epoch, following),
    )


def _epoch(
    material: Material, index: DatasetIndex, packing: Packing, number: int, data_parallel: int | None = None
) -> Epoch:
    ranks = data_parallel or material.data_parallel
    return build_epoch(index, packing, material.settings, data_parallel=ranks, number=number)


def _chosen(material: Material, wanted: PackOptions) -> tuple[Packed, str]:
    """Return the capacities that were asked for, else the best candidate, and the reason."""
    if wanted.qv is not None and wanted.qt is not None:
        return _packed(wanted.qv, wanted.qt, wanted), "as asked for"
    data = profile(material.index)
    most_samples = min(material.settings.global_batch_samples, data.samples) / material.data_parallel
    pairs = capacities(data, most_samples, hold_all=material.settings.oversize in ("skip", "fail"))
    # A mapping as an ordered set: with a fixed qv or qt, several pairs become the same packing.
    candidates = dict.fromkeys(
        _packed(pair.qv if wanted.qv is None else wanted.qv, pair.qt if wanted.qt is None else wanted.qt, wanted)
        for pair in pairs
    )
    packing, keeps_batch = _cheapest(candidates, material, wanted.epoch)
    reason = f"best of {len(candidates)} candidates"
    # The reason of a pair is of packs with both of its capacities.
    if own := next((pair for pair in pairs if (pair.qv, pair.qt) == (packing.qv, packing.qt)), None):
        reason += f" ({own.reason})"
    if not keeps_batch:
        reason += (
            f", though none keeps the global batch within {100 * material.settings.batch_tolerance:g} % as a search "
            "asks; give another global batch, or fewer ranks"
        )
    return packing, reason


def _packed(qv: int, qt: int, wanted: PackOptions) -> Packed:
    try:
        return Packed(
            qv=qv,
            qt=qt,
            qv_min=qv if wanted.qv_min is None else wanted.qv_min,
            qt_min=max(0, qt - OMNIBAL_SLACK) if wanted.qt_min is None else wanted.qt_min,
            packer=wanted.packer or BEST,
        )
    except InvalidPlan as error:
        raise PackError(f"{error}; lower --qv-min or --qt-min, or raise --qv or --qt") from error


def _cheapest(candidates: Iterable[Packed], material: Material, number: int) -> tuple[Packed, bool]:
    """Return a packing of least cost, and whether it keeps the global batch: in the mean, and in 90 % of the steps.

    Packings that do come first, then those that keep it in the mean alone.
    Costs per sample within 0.5 % count as equal. Among these, packs with about as many samples as the unpacked
    micro-batch come first, as in OmniBal: the cost ignores memory, and that many samples are known to fit. Then the
    fullest packs do.
    """
    index = material.index
    if index.repeats.sum() > _TRIED_SAMPLES:  # draw samples in proportion to their repeats
        share = index.repeats / index.repeats.sum()
        rows = np.sort(np.random.default_rng(material.settings.seed).choice(len(index), _TRIED_SAMPLES, p=share))
        # The draw has applied the repeats.
        columns: dict[str, Any] = {name: getattr(index, name)[rows] for name in COLUMNS}
        index = replace(index, files=tuple(replace(file, repeat=1.0) for file in index.files), **columns)
    tried = [(packing, _epoch(material, index, packing, number)) for packing in candidates]
    keeping = [(packing, epoch) for packing, epoch in tried if epoch.keeps_batch]
    found = [(packing, balance(epoch, material.settings.weights)) for packing, epoch in keeping or tried]
    near = [pair for pair in found if pair[1].steps_near >= _MOST_STEPS]
    found = near or found
    most = (1 + _ALIKE) * min(measured.cost_per_sample for _, measured in found)
    alike = [(packing, measured) for packing, measured in found if measured.cost_per_sample <= most]
    packing, _ = min(
        alike,
        key=lambda pair: (
            # Rounded, so that fullness decides between packs of about as many samples.
            round(abs(pair[1].samples_per_pack.mean - UNPACKED.samples)),
            pair[1].relaxation_missed or 0.0,
        ),
    )
    return packing, bool(keeping and near)
