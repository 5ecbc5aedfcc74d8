"""Samples drawn from a histogram resemble those that it was made of."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.report.simulation import drawn_index
from tests.values import data as data_values
from tests.values.search import INDEX
from trials.data.index import profile


@given(data_values.lengths, st.integers(1, 100))
def test_drawn_samples_are_within_the_bins_of_the_data(rows: list[tuple[int, int]], most: int) -> None:
    data = profile(data_values.index_of(rows))
    found = drawn_index(data, most)
    assert len(found) == min(most, data.samples)
    drawn = zip(found.vision_units.tolist(), (-(-found.text_tokens // 64) * 64).tolist(), strict=True)
    assert {*drawn} <= {(units, tokens) for units, tokens, _ in data.histogram}
    assert found.text_tokens.min() >= 1
    assert (found.target_tokens <= found.text_tokens).all()
    assert found.text_tokens.max() <= data.longest_text_tokens


def test_all_samples_together_have_the_sums_of_the_data() -> None:
    data = profile(INDEX)
    found = drawn_index(data, 10_000)
    assert int(found.vision_units.sum()) == data.vision_units
    assert float(found.text_tokens.sum()) == pytest.approx(data.text_tokens, rel=0.01)
    assert float(found.target_tokens.sum()) == pytest.approx(data.target_tokens, rel=0.01)


def test_all_tokens_are_targets_of_data_that_an_earlier_version_stored() -> None:
    found = drawn_index(replace(profile(INDEX), target_tokens=None), 100)
    assert found.target_tokens.tolist() == found.text_tokens.tolist()


def test_few_samples_have_the_means_of_many() -> None:
    data = replace(profile(INDEX), histogram=tuple((u, t, 1000 * n) for u, t, n in profile(INDEX).histogram))
    found = drawn_index(data, 60)
    assert len(found) == 60
    assert np.mean(found.vision_units) == pytest.approx(INDEX.vision_units.mean(), rel=0.05)
    assert np.mean(found.text_tokens) == pytest.approx(INDEX.text_tokens.mean(), rel=0.05)


@pytest.mark.parametrize(
    "histogram", [(), ((1, 64, 0),), ((-1, 64, 3),), ((1, 1 << 40, 3),)], ids=["empty", "no sample", "negative", "huge"]
)
def test_a_histogram_of_no_dataset_is_refused(histogram: tuple[tuple[int, int, int], ...]) -> None:
    with pytest.raises(ValueError, match="the stored histogram of lengths"):
        drawn_index(replace(profile(INDEX), histogram=histogram), 100)
