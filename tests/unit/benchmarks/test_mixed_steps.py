"""The part of the packing benchmark that compares steps with steps in random order."""

import numpy as np
import pytest

from benchmarks.cases.lengths import CAPACITIES, generated
from benchmarks.packing import mixed_rows


@pytest.mark.parametrize("kind", CAPACITIES)
def test_generated_samples_fit_their_capacities_and_differ(kind: str) -> None:
    index, (qv, qt) = generated(kind, 2000), CAPACITIES[kind]
    assert index.vision_units.max() <= qv
    assert index.text_tokens.max() <= qt
    assert (index.target_tokens <= index.text_tokens).all()
    assert len(np.unique(index.text_tokens)) > 100
    assert (np.diff(index.file) >= 0).all()
    assert np.array_equal(generated(kind, 2000).text_tokens, index.text_tokens)


def test_a_row_says_how_steps_vary() -> None:
    row = next(mixed_rows(generated("tiles", 2000), 4000))
    assert (row["data"], row["packer"], row["data_parallel"]) == ("zero-inflated images", "best-fit", 8)
    assert {*row["variances"]} == {"length", "vision units", "images", "targets"}
    assert 0 < max(row["variances"].values()) < 2
    assert row["steps_near"] == 1
    assert 0 < row["together_again"] < 0.05
    assert 0.8 < row["cost_efficiency"] <= 1
