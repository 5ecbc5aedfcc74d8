"""Weights of samples in the loss of a step, next to the formulas of InternVL."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.loss_weights import sample_weights, token_weights
from trials.job import LossWeighting

targets = st.lists(st.integers(0, 5000), min_size=1, max_size=20).map(lambda counts: np.array(counts, dtype=np.int32))


@given(targets)
def test_tokens_have_the_weights_that_internvl_gives_them(counts: np.ndarray[tuple[int], np.dtype[np.int32]]) -> None:
    formulas: dict[LossWeighting, list[float]] = {
        "token": [1.0 if count else 0.0 for count in counts],
        "sample": [1 / count if count else 0.0 for count in counts],
        "square": [1 / count**0.5 if count else 0.0 for count in counts],
    }
    for weighting, expected in formulas.items():
        assert token_weights(counts, weighting).tolist() == pytest.approx(expected)
        assert sample_weights(counts, weighting).tolist() == pytest.approx(counts * expected)
