"""Operations of a training step, without what is recomputed."""

import numpy as np

from autotune.workload import Prepared

_PASSES = 3
"""Forward, and a backward pass of twice its operations; recomputation is no useful work."""


def flops_of_sample(prepared: Prepared) -> float:
    """Return the operations of a training step for a mean sample."""
    shape, index = prepared.workload.model, prepared.index
    units, tokens = index.vision_units.astype(np.float64), index.text_tokens.astype(np.float64)
    forward = shape.unit_flops * units + shape.token_flops * tokens + shape.square_flops * tokens**2
    forward += shape.target_flops * index.target_tokens
    return _PASSES * float(forward.mean())
