"""Data parallelism with gradients, and weights, in shards (ZeRO 2 and 3), which ranks exchange while they compute."""

import torch
from torch import distributed
from torch.nn.utils import get_total_norm

from trials.engine.base import OneStage
from trials.engine.copying import States
from trials.engine.gathering import GatheredWeights, Gathering, share_weights
from trials.engine.weight_shards import ShardedState, update_shards
from trials.job import TrainingSection
from trials.model.ends.head_loss import Targets
from trials.model.stage import StageModule
from trials.plan import Plan


class ShardedEngine(OneStage):
    """Implementation of `TrainingEngine` for ZeRO 2 and 3, with torch alone."""

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        """Take over the weights of a stage, which ranks hold in shards already with ZeRO 3."""
        super().__init__(plan, stage, device, training)
        held = set(stage.parameters())
        # The output projection was shared on its own before it was tied to the word embedding.
        stage.shards = [each for each in stage.shards if not held.isdisjoint(each.places)]
        if plan.layout.zero == 2:
            for path in stage.paths:
                share_weights(stage, path, stays=True)
        self._shards: list[GatheredWeights] = stage.shards
        self._gathering = Gathering(stage, self._shards)
        update_shards(self._optimizer, self._shards)
        self.state = ShardedState(self._shards, self._optimizer, stage)
        self._gradients = [each.gradients for each in self._shards if each.gradients is not None]
        self._most = training.clip_norm
        self._norm: torch.Tensor | None = None

    @property
    def gradient_norm(self) -> float | None:
        return None if self._norm is None else float(self._norm)

    def _loss(self, inputs: States, targets: Targets) -> torch.Tensor:
        self._gathering.begin_pass()
        loss: torch.Tensor = self.stage(inputs, targets)
        if not torch.is_grad_enabled():
            self._gathering.end_forward()
        return loss

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002 (each pass sends its gradients)
        self._gathering.begin_backward()
        loss.backward()
        self._gathering.end_backward()

    def _update(self) -> None:
        for gradients in self._gradients:
            gradients.div_(distributed.get_world_size())
        parts = (held.values.grad for each in self._shards if each.trains for held in each.held.values())
        # By way of each parameter's norm, as `FlatGradients` does.
        squared = get_total_norm([each for each in parts if each is not None]).square().to(self._device)
        distributed.all_reduce(squared)
        self._norm = squared.sqrt()
        if self._most:
            scale = (self._most / (self._norm + 1e-6)).clamp(max=1.0)
            for gradients in self._gradients:
                gradients.mul_(scale)
        self._optimizer.step()
        for each in self._shards:
            if each.trains:
                each.gather_update()
        for gradients in self._gradients:
            gradients.zero_()

    def close(self) -> None:
        self.stage.reached = None
        self.stage.shards = []
        del self.state, self._shards, self._gathering, self._gradients
