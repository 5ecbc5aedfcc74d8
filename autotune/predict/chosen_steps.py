"""Some steps of an epoch, for predictions of what was run of it."""

from collections.abc import Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from autotune.predict.sizes import EpochSizes
from trials.data.sample import Ints


class ChosenSteps(EpochSizes):
    """The sizes of these steps alone, in their order by length."""

    def __init__(self, whole: EpochSizes, steps: Sequence[int]) -> None:
        super().__init__(whole.epoch)
        self.table, self.samples_alone = whole.table, whole.samples_alone
        self.steps = tuple(sorted(steps, key=lambda step: (-len(self._rows(step)), step)))

    def _rows(self, step: int) -> Ints:
        """Numbers of the step's packs, [micro-batches, data ranks]."""
        rows: Ints = self.epoch.rows(step)
        return rows

    @cached_property
    def blocks(self) -> tuple[Ints, ...]:
        alike = groupby(map(self._rows, self.steps), key=len)
        return tuple(np.stack(list(rows)) for _, rows in alike)

    def packs_of_rank(self, data_rank: int) -> Ints:
        """All of that data rank's packs."""
        packs: Ints = np.concatenate([block[:, :, data_rank].ravel() for block in self.blocks])
        return packs
