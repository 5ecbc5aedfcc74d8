"""Sizes of some steps of an epoch, for predictions of the steps that a trial ran."""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from autotune.prediction.sizes import EpochSizes
from trials.arrays import Ints


class ChosenSteps(EpochSizes):
    """Sizes of the packs of these steps, which are ordered by length; the packs are numbered from 0."""

    def __init__(self, whole: EpochSizes, steps: Sequence[int]) -> None:
        super().__init__(whole.epoch, whole.tensor)
        rows = {step: self.epoch.rows(step) for step in steps}
        self.steps = tuple(sorted(steps, key=lambda step: (-len(rows[step]), step)))
        self._packs = np.unique(np.concatenate([of_step.ravel() for of_step in rows.values()]))
        self._rows = [np.searchsorted(self._packs, rows[step]) for step in self.steps]
        self.whole, self.table = whole.whole[self._packs], whole.table[self._packs]
        self.samples_alone, self.degrees = whole.samples_alone[self._packs], whole.degrees[self._packs]
        self.levels = whole.levels[self._packs]

    @cached_property
    def blocks(self) -> tuple[Ints, ...]:
        return tuple(np.stack(list(rows)) for _, rows in groupby(self._rows, key=len))

    @cached_property
    def pack_samples(self) -> Ints:
        of_whole: Ints = super().pack_samples[self._packs]
        return of_whole
