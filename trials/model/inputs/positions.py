"""Positions of the tokens of one sample."""

from collections.abc import Sequence

import numpy as np
from transformers import PretrainedConfig

from trials.arrays import Ints


def counted_positions(
    config: PretrainedConfig,  # noqa: ARG001 (the Protocol has them)
    input_ids: Ints,
    grids: Ints,  # noqa: ARG001
    seconds: Sequence[float] | None = None,  # noqa: ARG001
) -> Ints:
    """Implement `Family.positions` for models that count tokens from 0."""
    return np.arange(len(input_ids), dtype=np.int64)[None]
