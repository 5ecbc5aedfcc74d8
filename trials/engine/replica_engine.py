"""Data parallelism of whole copies of the model, with torch alone: nothing stands between the passes."""

from types import SimpleNamespace

import torch
from deepspeed import comm

from trials.engine.base import OneStage
from trials.engine.copying import States
from trials.engine.gradients.flat import FlatGradients
from trials.engine.gradients.overlapped_averages import OverlappedAverages, as_reached, buckets
from trials.engine.state import OptimizerState
from trials.job import TrainingSection
from trials.model.ends.head_loss import Targets
from trials.model.stage import StageModule
from trials.plan import Layout, Plan


def copies_alone(layout: Layout) -> bool:
    """Return whether each rank has a whole copy of the model, and all average gradients at once."""
    return layout.pipeline == layout.tensor == layout.reduce_within == 1 and layout.zero == 0


class ReplicaEngine(OneStage):
    """Implementation of `TrainingEngine` for these layouts.

    DeepSpeed copies gradients into its messages and back; here they lie in them.
    """

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        super().__init__(plan, stage, device, training)
        for parameter in stage.parameters():
            comm.broadcast(parameter.data, src=0)
        size = plan.layout.bucket_bytes
        # In the order of the buckets, so that each is a part of a buffer.
        order = [each for bucket in buckets(as_reached(stage), size) for each in bucket]
        self._gradients = FlatGradients(order)
        self._most = training.clip_norm
        self._norm: float | None = None
        engine = SimpleNamespace(optimizer=self._optimizer)
        self.state = OptimizerState(engine, self._optimizer, stage)
        self._averages = OverlappedAverages(engine, stage, size) if size else None

    @property
    def gradient_norm(self) -> float | None:
        return self._norm

    def _loss(self, inputs: States, targets: Targets) -> torch.Tensor:
        loss: torch.Tensor = self.stage(inputs, targets)
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def _update(self) -> None:
        if self._averages:
            self._averages.finish()
        elif self._plan.layout.data > 1:
            self._gradients.average(self._plan.layout.data)
        if self._most:
            self._norm = self._gradients.clip(self._most)
        self._optimizer.step()
        self._gradients.clear()

    def close(self) -> None:
        if self._averages:
            self._averages.close()
        self._gradients.close()
        del self.state
