"""The samples of an epoch, counted in its steps and compared with the data."""

import hashlib

import numpy as np

from trials.arrays import Ints
from trials.certification import EpochCount
from trials.data.epoch import Epoch
from trials.data.index import DatasetIndex
from trials.data.neutral import neutrality
from trials.plan import Padded
from trials.sampling import rounded_up


def count_epoch(epoch: Epoch) -> EpochCount:
    """Count the samples of every step, as the ranks get them.

    A sample with repeat 1.3 has to be there once or twice, and all samples of its file together 1.3 times their number,
    rounded up.
    """
    index = epoch.index
    digest, held = hashlib.sha256(), []
    shown = np.zeros(len(index), dtype=np.int64)
    for number in range(epoch.steps):
        packs = [pack for of_rank in epoch.step(number).packs for pack in of_rank]
        rows = np.concatenate(packs)
        np.add.at(shown, rows, 1)
        digest.update(np.array([len(pack) for pack in packs], dtype="<i8").tobytes() + rows.astype("<i8").tobytes())
        held.append(len(rows))
    full = np.array(held[:-1] if len(epoch.rows(epoch.steps - 1)) < epoch.micro_batches else held)
    full = full if len(full) else np.array(held)
    above = _above(epoch)
    left_out = above if epoch.packs.skipped else np.zeros_like(above)
    return EpochCount(
        samples=sum(held),
        wrong=_wrong(index, shown, left_out),
        skipped=epoch.packs.skipped,
        oversize=int(shown[above].sum()),
        steps=epoch.steps,
        mean_samples=sum(held) * epoch.micro_batches / len(epoch.assignment),
        samples_deviation=float(full.std()),
        fewest_samples=int(full.min()),
        most_samples=int(full.max()),
        last_samples=held[-1],
        neutrality=neutrality(epoch),
        arrangement=digest.hexdigest()[:16],
    )


def _above(epoch: Epoch) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which samples are above a capacity of the packing, [samples]."""
    index, packing = epoch.index, epoch.packing
    if isinstance(packing, Padded):
        return np.zeros(len(index), dtype=np.bool_)
    last = packing.levels[-1]
    return (index.vision_units > last.qv) | (index.text_tokens > last.qt)


def _wrong(index: DatasetIndex, shown: Ints, left_out: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
    """Return how many samples are shown too often or too rarely, or how far the sum of a file is off."""
    repeats = index.repeats
    least, most = np.floor(repeats), np.ceil(repeats)
    wrong = int(np.count_nonzero(np.where(left_out, shown != 0, (shown < least) | (shown > most))))
    for number, file in enumerate(index.files):
        of_file = index.file == number
        if not left_out[of_file].any():
            wrong = max(wrong, abs(int(shown[of_file].sum()) - rounded_up(file.repeat, int(of_file.sum()))))
    return wrong
