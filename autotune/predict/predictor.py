"""What a plan will take: seconds of each step of the epoch, and bytes of each stage."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autotune.predict.costs import KINDS, Array, LayerCosts
from autotune.predict.parts import LANGUAGE, VISION, Parts
from autotune.predict.schedule import pipeline_seconds
from autotune.predict.sizes import EpochSizes
from trials.data.epoch import Epoch
from trials.data.sample import Ints
from trials.engine.memory import static_bytes
from trials.model.cut import cut
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
    step_samples: Ints
    """Samples of each step, [steps]."""
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
        # One row of coefficients per kind of layer.
        layers = [costs[kind] for kind in KINDS]
        self._forward = np.array([layer.forward_seconds for layer in layers])
        self._backward = np.array([layer.backward_seconds for layer in layers])
        self._kept = np.array([layer.kept_bytes for layer in layers])
        self._outputs = np.array([layer.output_bytes for layer in layers])
        self._parameters = np.array([layer.parameters for layer in layers])
        self._element_bytes = element_bytes
        self._sizes = lru_cache(maxsize=512)(lambda packing, data: EpochSizes(epoch_of(packing, data)))

    def sizes(self, packing: Packing, layout: Layout) -> EpochSizes:
        """The packs and steps of the first epoch."""
        return self._sizes(packing, layout.data)

    def predict(self, plan: Plan) -> Prediction:
        sizes = self.sizes(plan.packing, plan.layout)
        parts = Parts.of(cut(plan))
        return Prediction(
            step_seconds=self._step_seconds(plan.layout, parts, sizes),
            step_samples=sizes.step_samples,
            stage_bytes=tuple(
                float(self.stage_bytes(parts[number : number + 1], plan.layout, number, sizes)[0])
                for number in range(len(parts))
            ),
            batch_deviation=sizes.epoch.batch_deviation,
        )

    def _step_seconds(self, layout: Layout, parts: Parts, sizes: EpochSizes) -> Array:
        forward, backward = self.pass_seconds(parts, sizes.table)
        seconds = [
            np.max([pipeline_seconds(forward[ranks], backward[ranks]) for ranks in np.moveaxis(block, 2, 0)], axis=0)
            for block in sizes.blocks
        ]
        steps: Array = np.concatenate(seconds) + self._update_seconds(layout, parts)
        return steps

    def _update_seconds(self, layout: Layout, parts: Parts) -> float:
        """Reduction and optimizer of the largest stage."""
        parameters = float((parts.layers @ self._parameters).max())
        updated = parameters / layout.data if layout.zero else parameters
        reduced = parameters * self._element_bytes if layout.data > 1 else 0
        return updated * self._costs.optimizer_seconds_per_parameter + reduced * self._costs.reduce_seconds_per_byte

    def pass_seconds(self, parts: Parts, sizes: Array) -> tuple[Array, Array]:
        """(forward, backward with recomputation) seconds of packs on stages, [packs, stages]; sizes [packs, 4]."""
        forward = parts.layers @ self._forward
        backward = parts.layers @ self._backward + parts.recomputed @ self._forward
        return sizes @ forward.T, sizes @ backward.T

    def stage_bytes(self, parts: Parts, layout: Layout, number: int, sizes: EpochSizes) -> Array:
        """Bytes of stage `number` under each of `parts`, [stages].

        Static bytes, and the most that packs keep: either all that are in flight under 1F1B, as a backward pass
        begins, or all but one of them and what that one keeps while one of its layers is recomputed. Exact for one pack
        in flight; above that, the one whose layer costs most is taken to run beside the heaviest others.
        """
        in_flight = min(layout.pipeline - number, sizes.epoch.micro_batches)
        kept = (parts.layers - parts.recomputed) @ self._kept + parts.recomputed @ self._outputs
        most = _largest(sizes.heaviest(in_flight), kept)
        others = _largest(sizes.heaviest(in_flight - 1), kept) if in_flight > 1 else 0
        for kind in (VISION, LANGUAGE):
            recomputing = _largest(sizes.heaviest(1), self._while_recomputing(parts, kind))
            most = np.maximum(most, np.where(recomputing > 0, others + recomputing, 0))
        total: Array = self._static_bytes(parts, layout) + most
        return total

    def _while_recomputing(self, parts: Parts, kind: int) -> Array:
        """Coefficients of what a pack keeps while the last recomputed layer of a kind is being recomputed, [stages, 4].

        What comes behind that layer has had its backward pass and is free. Zero for a stage that does not recompute all
        its layers of the kind: a layer that it kept asked for as much before.
        """
        layers, recomputed = parts.layers[:, :kind], parts.recomputed[:, :kind]
        before = (layers - recomputed) @ self._kept[:kind] + recomputed @ self._outputs[:kind]
        inputs = np.maximum(parts.recomputed[:, kind, None] - 1, 0) * self._outputs[kind]
        all_of_them = (parts.layers[:, kind] > 0) & (parts.recomputed[:, kind] == parts.layers[:, kind])
        return np.where(all_of_them[:, None], before + inputs + self._kept[kind], 0.0)

    def _static_bytes(self, parts: Parts, layout: Layout) -> Array:
        parameters, which = np.unique(parts.layers @ self._parameters, return_inverse=True)
        static = np.array([static_bytes(int(count), self._element_bytes, layout) for count in parameters])
        return static.astype(np.float64)[which]


def _largest(candidates: Array, coefficients: Array) -> Array:
    """Of each row of coefficients, the largest cost among the candidates, [stages]."""
    largest: Array = (candidates @ coefficients.T).max(axis=0)
    return largest
