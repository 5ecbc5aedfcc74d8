"""The schedule ZB-H1 (Qi et al. 2023): 1F1B whose stages compute weight gradients where they would wait."""

from collections.abc import Iterator
from typing import Any

from deepspeed.runtime.pipe.schedule import (
    BackwardPass,
    ForwardPass,
    PipeInstruction,
    ReduceTiedGrads,
    TrainSchedule,
)


class ComputeWeightGradients(PipeInstruction):  # type: ignore[misc]
    """Compute the deferred weight gradients of the oldest micro-batch that has any."""


class ZeroBubbleSchedule(TrainSchedule):  # type: ignore[misc]
    """DeepSpeed's 1F1B, with the same messages in the same order, and with weight gradients apart.

    Stage s has s micro-batches less in flight than the first one, so it may defer those of s micro-batches: it holds no
    more of them than the first. As the pipeline drains, it computes those of one after each gradient that it sends,
    which the stage before awaits.
    """

    def __init__(self, *arguments: Any, most_deferred: int, **named: Any) -> None:
        """`most_deferred` micro-batches, one or more, wait at most between two passes."""
        super().__init__(*arguments, **named)
        self._most_deferred = most_deferred

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each slot."""
        # Afterwards no forward passes follow.
        steady = self.micro_batches - (self.stages - self.stage_id)
        backward, deferred = 0, 0
        for instructions in super().steps():
            kinds = [type(each) for each in instructions]
            computes = 0
            if BackwardPass in kinds:
                computes = int(backward < steady and deferred + 1 > self._most_deferred)
                backward, deferred = backward + 1, deferred + 1
            elif ForwardPass not in kinds:
                computes = min(deferred, 1)
            reduces = kinds.index(ReduceTiedGrads) if ReduceTiedGrads in kinds else len(kinds)
            if reduces < len(kinds):
                computes = deferred
            deferred -= computes
            yield [
                *instructions[:reduces],
                *(ComputeWeightGradients() for _ in range(computes)),
                *instructions[reduces:],
            ]
