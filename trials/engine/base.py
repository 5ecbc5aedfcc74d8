"""What the engines of all plans share."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice

import torch
from deepspeed import comm

from trials.data.loader import MicroBatch
from trials.data.tokens import pack
from trials.engine.copying import CopyStream, Inputs, States
from trials.engine.optimizer import build_optimizer, scale_learning_rates
from trials.engine.state import OptimizerState
from trials.engine.stopwatch import Stopwatch
from trials.job import TrainingSection
from trials.model.ends.head_loss import Targets, targets_of
from trials.model.stage import StageModule
from trials.offload.offloading import Offloading
from trials.offload.transfers import Transfers
from trials.plan import Plan

LOAD, FORWARD, BACKWARD, OPTIMIZER = "load", "forward", "backward", "optimizer"
"""Sections of the stopwatch."""


class EngineBase:
    """The stage with its optimizer, and packs on their way to the device."""

    state: OptimizerState

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        self.stage = stage
        self.stopwatch = Stopwatch(device)
        self._plan = plan
        self._device = device
        self._copies = CopyStream(device)
        stage.offloading = None if plan.layout.offload == "none" else Offloading(Transfers(device))
        self._optimizer = build_optimizer(stage, training)

    def scale_learning_rates(self, factor: float) -> None:
        scale_learning_rates(self._optimizer, factor)

    def _copied(self, batches: Iterable[MicroBatch], scale: float) -> Iterator[Inputs]:
        """Yield packs on the device, each copied when it is asked for, while the device computes with earlier packs."""
        for batch in batches:
            yield self._copies.copied(partial(tensors, batch, scale, self._device))


class OneStage(EngineBase):
    """An engine whose ranks all have one stage."""

    @abstractmethod
    def _loss(self, inputs: States, targets: Targets) -> torch.Tensor:
        """Return the loss [] of a pack, summed over its targets."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        """Add the gradients of a pack's loss to the step's sums; `last` marks the last pack of a step."""

    @abstractmethod
    def _update(self) -> None:
        """Average gradients over the ranks, and update the weights."""

    def step(self, batches: Iterator[MicroBatch], count: int, total_weight: float) -> float:
        """Implement `TrainingEngine.step`."""
        total = torch.zeros((), device=self._device)
        # Averages over data ranks divide by their number, which this factor takes back.
        packs = self._copied(batches, self._plan.layout.data / total_weight)
        for number in range(count):
            with self.stopwatch.section(LOAD):
                inputs, targets = next(packs)
            with self.stopwatch.section(FORWARD):
                loss = self._loss(inputs, targets)
            with self.stopwatch.section(BACKWARD):
                self._backward(loss, last=number == count - 1)
            total += loss.detach()
        with self.stopwatch.section(OPTIMIZER):
            self._update()
        comm.all_reduce(total)
        return float(total) / self._plan.layout.data

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> tuple[float, int]:
        """Implement `TrainingEngine.evaluate`."""
        found = torch.zeros(2, dtype=torch.float64, device=self._device)
        with without_dropout(self.stage), torch.no_grad():
            for inputs, targets in self._copied(islice(batches, count), 1.0):
                found[0] += self._loss(inputs, targets)
                found[1] += len(targets.labels)
        comm.all_reduce(found)
        return float(found[0]), int(found[1])


@contextmanager
def without_dropout(stage: StageModule) -> Iterator[None]:
    """Set a stage to evaluation mode; afterwards each of its modules has the mode that it had."""
    modes = {module: module.training for module in stage.modules()}
    stage.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def tensors(batch: MicroBatch, scale: float, device: torch.device) -> Inputs:
    """Return DeepSpeed's (inputs, labels): see `StageModule` and `Targets`."""
    pixels = batch.pixel_values if batch.pixel_values is not None else torch.empty(0)
    floats, integers = pack((pixels,), batch.tokens)
    # From the page-locked memory of the loader's batches, so that the host does not wait. Tokens stay with it.
    inputs = (floats.to(device, non_blocking=True), integers)
    scales = torch.full((), scale) if batch.weights is None else scale * batch.weights
    targets = targets_of(batch.labels, scales)
    return inputs, Targets(*(each.to(device, non_blocking=True) for each in targets))
