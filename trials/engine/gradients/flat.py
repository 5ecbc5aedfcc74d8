"""Float32 gradients that lie one behind the other in memory, so that ranks average them without copies."""

from collections.abc import Sequence

import torch
from deepspeed import comm
from torch import nn
from torch.nn.utils import get_total_norm

from trials.engine.gradients.messages import in_buckets


class FlatGradients:
    """The float32 gradients of some parameters, as views of a few buffers. Backward passes add to them in place."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give each parameter a gradient of zeros."""
        self._parameters = parameters
        self._buffers = list[torch.Tensor]()
        for bucket in in_buckets(parameters):
            # The error of a bfloat16 sum grows with the number of its terms.
            buffer = torch.zeros(sum(each.numel() for each in bucket), device=bucket[0].device)
            for parameter, part in zip(bucket, buffer.split([each.numel() for each in bucket]), strict=True):
                parameter.grad_dtype = None  # of any type: autograd adds bfloat16 gradients without a float32 copy
                parameter.grad = part.view_as(parameter)
            self._buffers.append(buffer)

    def average(self, ranks: int) -> None:
        """Replace them by their averages over the ranks, each of which must call it."""
        for buffer in self._buffers:
            comm.all_reduce(buffer)
            buffer.div_(ranks)

    def norm(self) -> torch.Tensor:
        """Return the norm over all of them, []."""
        # By way of each parameter's norm: over a whole buffer, torch's float32 sum on a CPU is off by some 1e-4.
        return get_total_norm([each.grad for each in self._parameters if each.grad is not None])

    def clip(self, most: float) -> torch.Tensor:
        """Scale them so that their norm is at most `most`; return the norm before, []."""
        norm = self.norm()
        scale = (most / (norm + 1e-6)).clamp(max=1.0)  # as torch's and DeepSpeed's clipping
        for buffer in self._buffers:
            buffer.mul_(scale)
        return norm

    def clear(self) -> None:
        """Set all to zero."""
        for buffer in self._buffers:
            buffer.zero_()

    def close(self) -> None:
        """Leave the parameters without gradients."""
        for parameter in self._parameters:
            parameter.grad = None
        self._buffers.clear()
