"""The parts of a predicted peak sum to it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.prediction.predictor import Predictor
from tests.values.search import LANGUAGE_LAYERS, VISION_LAYERS, layer_costs, predictor_of
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, Packed, Plan
from trials.stage import Stage

PACKING = Packed(qv=6, qt=320, qv_min=6, qt_min=256)


def plan_of(first: int, recompute: tuple[int, int, int]) -> Plan:
    """A pipeline of two stages, the first of which holds some vision layers."""
    vision, rest, language = recompute
    return Plan(
        packing=PACKING,
        layout=Layout(pipeline=2, data=1, zero=0),
        stages=(
            Stage(vision=first, language=0, recompute_vision=min(vision, first)),
            Stage(
                vision=VISION_LAYERS - first,
                language=LANGUAGE_LAYERS,
                recompute_vision=min(rest, VISION_LAYERS - first),
                recompute_language=language,
            ),
        ),
    )


def expected(predictor: Predictor, plan: Plan) -> list[float]:
    return [stage.expected for stage in predictor.plans_memory((plan,))[0]]


recomputes = st.tuples(st.integers(0, VISION_LAYERS), st.integers(0, VISION_LAYERS), st.integers(0, LANGUAGE_LAYERS))


@given(layer_costs, st.integers(1, VISION_LAYERS), recomputes)
def test_the_parts_of_each_stage_sum_to_its_expected_peak(
    costs: LayerCosts, first: int, recompute: tuple[int, int, int]
) -> None:
    predictor, plan = predictor_of(costs), plan_of(first, recompute)
    found = predictor.peak_parts(plan)
    assert [parts.total for parts in found] == pytest.approx(expected(predictor, plan))
    assert all(min(parts.static, parts.kept, parts.recomputed, parts.transient) >= 0 for parts in found)


def test_what_is_recomputed_is_not_kept() -> None:
    predictor = predictor_of()
    none, everything = (predictor.peak_parts(plan_of(5, (count, 0, count))) for count in (0, 4))
    assert [parts.recomputed for parts in none] == [0, 0]
    assert np.all([parts.recomputed > 0 for parts in everything])
    assert [after.kept < before.kept for before, after in zip(none, everything, strict=True)] == [True, True]
