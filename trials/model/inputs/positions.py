"""Positions of the tokens of one sample."""

from collections.abc import Sequence

import numpy as np
from transformers import PretrainedConfig

from trials.arrays import Ints


def counted_positions(
    config: PretrainedConfig, input_ids: Ints, grids: Ints, seconds: Sequence[float] | None = None
) -> Ints:
    """Implement `Family.positions` for models that count tokens from 0."""
    return np.arange(len(input_ids), dtype=np.int64)[None]
