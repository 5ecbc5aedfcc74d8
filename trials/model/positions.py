"""Positions of the tokens of one sample."""

import numpy as np
from transformers import PretrainedConfig

from trials.data.records.sample import Ints


def counted_positions(config: PretrainedConfig, input_ids: Ints, grids: Ints) -> Ints:  # noqa: ARG001
    """Implement `Family.positions` for models that count tokens from 0."""
    return np.arange(len(input_ids), dtype=np.int64)[None]
