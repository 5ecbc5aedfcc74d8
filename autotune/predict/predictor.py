"""What a plan will take: seconds of each step of the epoch, and bytes of each stage."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.predict.costs import KINDS, Array, Kind, LayerCosts
from autotune.predict.schedule import pipeline_seconds
from autotune.predict.sizes import EpochSizes
from trials.data.epoch import Epoch
from trials.engine.memory import static_bytes
from trials.model.cut import Cut, cut
from trials.plan import Layout, Packing, Plan

MOST_BATCH_DEVIATION = 0.10
"""How far a plan's mean global batch may be from the job's."""

EpochOf = Callable[[Packing, int], Epoch]
"""The first epoch under a packing, for so many data-parallel ranks."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """One plan's epoch before it has run."""

    step_seconds: Array
    """[steps]"""
    stage_bytes: tuple[float, ...]
    """Most bytes of each stage on its fullest rank."""
    batch_deviation: float
    """Of a step's mean samples from the job's global batch; 0.1 is 10 %."""

    @property
    def epoch_seconds(self) -> float:
        return float(self.step_seconds.sum())


class Predictor:
    """Predicts plans for one workload from its layer costs."""

    def __init__(self, costs: LayerCosts, epoch_of: EpochOf, element_bytes: int) -> None:
        """`element_bytes` is the size of a weight in the training's dtype."""
        self._costs = costs
        self._element_bytes = element_bytes
        self._sizes = lru_cache(maxsize=512)(lambda packing, data: EpochSizes(epoch_of(packing, data)))

    def sizes(self, packing: Packing, layout: Layout) -> EpochSizes:
        """The packs and steps of the first epoch."""
        return self._sizes(packing, layout.data)

    def predict(self, plan: Plan) -> Prediction:
        sizes = self.sizes(plan.packing, plan.layout)
        cuts = cut(plan)
        return Prediction(
            step_seconds=self._step_seconds(plan.layout, cuts, sizes),
            stage_bytes=tuple(
                float(self.stage_bytes([part], plan.layout, number, sizes)[0]) for number, part in enumerate(cuts)
            ),
            batch_deviation=sizes.epoch.batch_deviation,
        )

    def _step_seconds(self, layout: Layout, cuts: Sequence[Cut], sizes: EpochSizes) -> Array:
        passes = [self.pass_seconds(part, sizes.table) for part in cuts]
        forward, backward = (np.stack(side, axis=-1) for side in zip(*passes, strict=True))
        seconds = [
            np.max([pipeline_seconds(forward[ranks], backward[ranks]) for ranks in np.moveaxis(block, 2, 0)], axis=0)
            for block in sizes.blocks
        ]
        steps: Array = np.concatenate(seconds) + self._update_seconds(layout, cuts)
        return steps

    def _update_seconds(self, layout: Layout, cuts: Sequence[Cut]) -> float:
        """Reduction and optimizer of the largest stage."""
        parameters = max(self.parameters(part) for part in cuts)
        updated = parameters / layout.data if layout.zero else parameters
        reduced = parameters * self._element_bytes if layout.data > 1 else 0
        return updated * self._costs.optimizer_seconds_per_parameter + reduced * self._costs.reduce_seconds_per_byte

    def pass_seconds(self, part: Cut, sizes: Array) -> tuple[Array, Array]:
        """(forward, backward with recomputation) seconds of packs on a stage, [packs] each; sizes [packs, 4]."""
        forward, backward = np.zeros(4), np.zeros(4)
        for kind, count, recomputed in _layers(part):
            cost = self._costs[kind]
            forward += count * np.array(cost.forward_seconds)
            backward += count * np.array(cost.backward_seconds) + recomputed * np.array(cost.forward_seconds)
        return sizes @ forward, sizes @ backward

    def stage_bytes(self, parts: Sequence[Cut], layout: Layout, number: int, sizes: EpochSizes) -> Array:
        """Bytes of stage `number` under each of `parts`, which differ in what they recompute, [parts].

        Static bytes, the packs in flight under 1F1B, and what the layer that is being recomputed keeps meanwhile.
        """
        in_flight = min(layout.pipeline - number, sizes.epoch.micro_batches)
        kept = sizes.heaviest(in_flight) @ np.stack([self._kept(part) for part in parts], axis=1)
        single = sizes.heaviest(1)
        transient = [max(float((single @ keeps).max()) for keeps in self._transient(part)) for part in parts]
        static = static_bytes(self.parameters(parts[0]), self._element_bytes, layout)
        result: Array = static + kept.max(axis=0) + np.array(transient)
        return result

    def _kept(self, part: Cut) -> Array:
        """Coefficients of the bytes that a stage keeps of one pack, [4]."""
        kept = np.zeros(4)
        for kind, count, recomputed in _layers(part):
            cost = self._costs[kind]
            kept += (count - recomputed) * np.array(cost.kept_bytes) + recomputed * np.array(cost.output_bytes)
        return kept

    def _transient(self, part: Cut) -> list[Array]:
        """Coefficients of the bytes that one recomputed layer of each kind keeps during its backward pass."""
        recomputed = [np.array(self._costs[kind].kept_bytes) for kind, _, number in _layers(part) if number]
        return recomputed or [np.zeros(4)]

    def parameters(self, part: Cut) -> int:
        """Parameters of a stage."""
        return sum(count * self._costs[kind].parameters for kind, count, _ in _layers(part))


def _layers(part: Cut) -> tuple[tuple[Kind, int, int], ...]:
    """(kind, layers, recomputed layers) of a stage."""
    counts = (int(part.embeds), len(part.vision), int(part.projects), len(part.language), int(part.heads))
    recomputed = (0, part.recompute_vision, 0, part.recompute_language, 0)
    return tuple(zip(KINDS, counts, recomputed, strict=True))
