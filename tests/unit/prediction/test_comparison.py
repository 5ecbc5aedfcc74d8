import math
import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.prediction.comparison import MOST_STEPS, cautious_seconds
from autotune.prediction.predictor import Predictor
from autotune.prediction.stage_times import StageTimes
from tests.values.data import index_of
from tests.values.parameters import examples
from tests.values.search import COSTS, predictor_of, random_rows
from trials.costs.layer_costs import LinkCost
from trials.plan import Layout, Packed, Packing, Padded, Plan
from trials.stage import Stage

LINK = LinkCost(latency_seconds=1e-3, seconds_per_byte=1e-9)
PREDICTOR = predictor_of(replace(COSTS, link=LINK), index_of(random_rows(2400)))
FEW = predictor_of(replace(COSTS, link=LINK), index_of(random_rows(230)))
PACKED = Packed(qv=12, qt=600, qv_min=12, qt_min=500)
ENDS: dict[int, list[tuple[int, ...]]] = {1: [()], 2: [(3,), (5,), (7,)], 3: [(2, 5), (3, 6), (4, 8)]}


def plans_of(packing: Packing, layout: Layout) -> list[Plan]:
    """Some splits of 5 vision and 4 language layers over the stages, with some layers recomputed."""
    plans = []
    for number, inner in enumerate(ENDS[layout.pipeline]):
        cuts = zip((0, *inner), (*inner, 9), strict=True)
        counts = [(min(end, 5) - min(start, 5), max(end, 5) - max(start, 5)) for start, end in cuts]
        stages = tuple(
            Stage(vision=v, language=t, recompute_vision=min(v, number), recompute_language=t // 2) for v, t in counts
        )
        plans.append(Plan(packing=packing, layout=layout, stages=stages))
    return plans


@given(
    st.sampled_from([PACKED, Padded(samples=2)]),
    st.sampled_from([(1, 1, 0), (2, 1, 0), (1, 2, 1), (2, 2, 1), (3, 1, 0), (3, 3, 0)]),
)
@settings(max_examples=examples(20))
def test_a_short_epoch_takes_what_is_predicted_of_each_plan(packing: Packing, degrees: tuple[int, int, int]) -> None:
    pipeline, data, zero = degrees
    plans = plans_of(packing, Layout(pipeline=pipeline, data=data, zero=1 if zero else 0))
    assert FEW.sizes(packing, plans[0].layout).epoch.steps <= MOST_STEPS
    assert cautious_seconds(FEW, plans) == pytest.approx([FEW.predict(plan).epoch_seconds for plan in plans], rel=1e-12)


@pytest.mark.parametrize("data", [1, 2])
def test_of_a_long_epoch_some_steps_count_for_all_and_differences_as_far_as_they_are_sure(data: int) -> None:
    plans = plans_of(PACKED, Layout(pipeline=3, data=data, zero=0))
    count = PREDICTOR.sizes(PACKED, plans[0].layout).epoch.steps
    assert count > 2 * MOST_STEPS
    steps = [int((number + 0.5) * count / MOST_STEPS) for number in range(MOST_STEPS)]
    seconds = [PREDICTOR.predict(plan).step_seconds[steps] for plan in plans]
    errors = [
        statistics.stdev(of_plan - seconds[0]) * math.sqrt((1 - MOST_STEPS / count) / MOST_STEPS) for of_plan in seconds
    ]
    expected = [count * (of_plan.mean() + 2 * error) for of_plan, error in zip(seconds, errors, strict=True)]
    assert cautious_seconds(PREDICTOR, plans) == pytest.approx(expected)
    assert errors[1] > 0


def test_no_more_packs_are_looked_at_than_those_of_the_steps() -> None:
    seen = []

    class Watching(StageTimes):
        def pass_seconds(self, parts, layout, sizes):  # type: ignore[no-untyped-def]
            seen.append(len(sizes))
            return super().pass_seconds(parts, layout, sizes)

    plans = plans_of(PACKED, Layout(pipeline=2, data=2, zero=0))
    sizes = PREDICTOR.sizes(PACKED, plans[0].layout)
    watching = Predictor(COSTS, lambda packing, data: sizes.epoch, 4)
    watching.times = Watching(COSTS)
    cautious_seconds(watching, plans)
    assert max(seen) == MOST_STEPS * 2 * sizes.epoch.micro_batches < len(sizes.table)
