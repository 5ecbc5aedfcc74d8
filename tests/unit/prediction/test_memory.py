from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.engine.static_memory import stages_static_bytes, static_bytes
from trials.plan import Layout, ZeroStage

zeros: st.SearchStrategy[ZeroStage] = st.sampled_from([0, 1, 2, 3])


@given(st.lists(st.integers(0, 1 << 40), max_size=8), st.sampled_from([2, 4]), st.sampled_from([1, 2, 3, 8, 64]), zeros)
def test_static_bytes_of_many_stages_are_those_of_each(
    parameters: list[int], element_bytes: int, data: int, zero: ZeroStage
) -> None:
    layout = Layout(pipeline=1, data=data, zero=zero)
    counts = np.array(parameters, dtype=np.float64)
    together = stages_static_bytes(counts, counts // 3, element_bytes=element_bytes, layout=layout).tolist()
    assert together == [static_bytes(count, element_bytes, layout, frozen=count // 3) for count in parameters]
    assert together == [_exact(count, count // 3, element_bytes, data, zero) for count in parameters]


def _exact(parameters: int, frozen: int, element_bytes: int, data: int, zero: int) -> int:
    trained = parameters - frozen
    share = Fraction(trained, data)
    weights = element_bytes * (Fraction(parameters, data) if zero == 3 else parameters)
    gradients = 4 * (share if zero >= 2 else trained)
    return round(weights + gradients + (12 * share if zero else 8 * trained))


@pytest.mark.parametrize(("parameters", "expected"), [(1, 6 + 2), (3, 18 + 4), (5, 30 + 8)])
def test_a_half_byte_is_rounded_to_the_even_one(parameters: int, expected: int) -> None:
    layout = Layout(pipeline=1, data=8, zero=1)
    assert static_bytes(parameters, 2, layout) == expected
