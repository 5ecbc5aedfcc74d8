"""Data parallelism of whole copies of the model, with torch alone: nothing stands between the passes."""

import torch
from deepspeed import comm

from trials.engine.base import OneStage
from trials.engine.copying import States
from trials.engine.gradients.flat import FlatGradients
from trials.engine.gradients.overlapped_averages import OverlappedAverages, as_reached, buckets
from trials.engine.state import OptimizerState
from trials.engine.weight_shards import ShardedState, WeightShards, update_shards
from trials.job import TrainingSection
from trials.model.ends.head_loss import Targets
from trials.model.stage import StageModule
from trials.plan import Plan


class ReplicaEngine(OneStage):
    """Implementation of `TrainingEngine` for layouts with `whole_copies`.

    DeepSpeed copies gradients into its messages and back, and runs a Python hook for each bfloat16 parameter in each
    backward pass. Here autograd adds gradients up in the float32 buffers that ranks send.
    """

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        super().__init__(plan, stage, device, training)
        for parameter in stage.parameters():
            # As DeepSpeed does: ranks whose weights differ at the start would differ for ever.
            comm.broadcast(parameter.data, src=0)
        size = plan.layout.bucket_bytes
        # In the order of the buckets, so that each is a part of a buffer.
        order = [each for bucket in buckets(as_reached(stage), size) for each in bucket]
        self._gradients = FlatGradients(order)
        self._most = training.clip_norm
        self._norm: torch.Tensor | None = None
        self._shards = WeightShards(order) if plan.layout.zero else None
        self.state = OptimizerState(self._optimizer, self._optimizer, stage)
        if self._shards:
            update_shards(self._optimizer, [self._shards])
            self.state = ShardedState([self._shards], self._optimizer, stage)
        self._averages = OverlappedAverages(stage, size) if size else None

    @property
    def gradient_norm(self) -> float | None:
        return None if self._norm is None else float(self._norm)

    def _loss(self, inputs: States, targets: Targets) -> torch.Tensor:
        loss: torch.Tensor = self.stage(inputs, targets)
        return loss

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        if self._averages and last:
            self._averages.begin()
        loss.backward()

    def _update(self) -> None:
        if self._averages:
            self._averages.finish()
        elif self._plan.layout.data > 1:
            self._gradients.average(self._plan.layout.data)
        if self._most:
            self._norm = self._gradients.clip(self._most)
        elif self._shards:
            self._norm = self._gradients.norm()
        self._optimizer.step()
        if self._shards:
            self._shards.gather_update()
        self._gradients.clear()

    def close(self) -> None:
        if self._averages:
            self._averages.close()
            self.stage.reached = None
        self._gradients.close()
        del self.state, self._shards
