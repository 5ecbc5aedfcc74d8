"""About the least epoch seconds of any split of a packing and layout, with unlimited memory."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autotune.prediction.parts import LANGUAGE, PROJECTOR, VISION, Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.search.solver.candidates import Cuts
from autotune.search.solver.splits import Choices, least_slowest
from trials.arrays import Floats
from trials.plan import Layout

_LEAST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bound:
    """Seconds of a chain's stages in an epoch, each with what the others certainly add."""

    predictor: Predictor
    layout: Layout
    sizes: EpochSizes
    cuts: Cuts
    vision_layers: int
    whole: Parts
    """The chain as one stage."""
    seconds: Floats
    """Of both passes of the mean row, of `cuts.different`, [parts]."""
    before: Floats
    """Of the mean row in the layers before each boundary, but the head: (forward, both passes), [2, layers + 1]."""
    total: float
    """Of both passes of the mean row in the whole chain."""

    def least_seconds(self) -> float:
        """Return the least over all splits of the seconds of their longest stage."""
        return least_slowest([*self._stages()], self.before.shape[1] - 1)

    def _stages(self) -> Iterator[Choices]:
        """Yield the parts that each stage may hold, in seconds of the epoch.

        A stage computes and exchanges every row. In each step the smallest packs pass the stages before it first, and
        come back from those behind it. In the end it updates its weights, or the smallest packs go back to the first
        stage, which updates its own. Deferred weight gradients shorten both passes of the others by twice their share
        (Qi et al. 2023).
        """
        layout, sizes, times = self.layout, self.sizes, self.predictor.times
        shorter = 1 - 2 * times.deferred_share(self.whole, layout, sizes)
        update = times.update_parts(layout, self.cuts.kept, sizes).seconds
        first_update = update[self.cuts.which[0]].min()
        smallest, (forward, both), exchanges = self._smallest, self.before, self._exchanges()
        exchanging = np.pad(exchanges.sum(axis=0), ((1, 1), (0, 0)))
        states, gradients = exchanges.min(axis=2)
        columns = zip(self.cuts.starts, self.cuts.ends, self.cuts.which, strict=True)
        for number, (starts, ends, which) in enumerate(columns):
            others = max(number - 1, 0)  # links before the stage that are not its own
            there = forward[starts] + states[:others].sum()
            back = np.maximum(shorter * both[starts] - forward[starts], 0) + gradients[:others].sum()
            behind = (states + gradients)[number + 1 :].sum()
            if number < layout.pipeline - 1:
                behind = behind + shorter * (self.total - both[ends])
            row = self.seconds[which] + exchanging[number, starts] + exchanging[number + 1, ends]
            step = smallest * (there + behind) + np.maximum(update[which], smallest * back + first_update)
            yield Choices(starts=starts, ends=ends, seconds=sizes.epoch.height * row + sizes.epoch_steps * step)

    def _exchanges(self) -> Floats:
        """Return the seconds of (states, gradients) of the mean row by link and boundary, [2, links, layers + 1]."""
        boundaries = np.arange(self.before.shape[1])
        # The projector follows the last vision layer.
        kinds = np.where(boundaries < self.vision_layers, VISION, LANGUAGE)
        kinds[self.vision_layers] = PROJECTOR if self.vision_layers else LANGUAGE
        of_levels = [
            each.row_share * np.stack(self.predictor.times.link_seconds(self.layout, each.mean))
            for each in self.sizes.of_levels
        ]
        of_links = np.sum(of_levels, axis=0)[..., kinds]
        exchanges: Floats = np.broadcast_to(of_links, (2, self.layout.pipeline - 1, len(boundaries)))
        return exchanges

    @property
    def _smallest(self) -> float:
        """Seconds of the packs that begin and end steps over those of the mean pack, if they are the smallest of all.

        The smallest ones come there in their steps.
        """
        seconds = np.sum(self.predictor.times.pass_seconds(self.whole, self.layout, self.sizes.table), axis=(0, 2))
        count = min(max(2 * len(seconds) // self.sizes.epoch.micro_batches, 1), len(seconds))
        return float(np.partition(seconds, count - 1)[:count].mean() / max(seconds.mean(), _LEAST))
