"""Averages of gradients during the last backward pass: what a step has left of them, and where they are searched."""

from dataclasses import replace

import pytest

from autotune.dimensions.overlap import overlapped
from autotune.prediction.costs_table import TypicalPack, costs_text
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import stage_features, step_features
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.search.learning.warm_start import moved
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import feasible_space
from autotune.search.space.space import Space
from tests.values.exchanges import averages, exchanging
from tests.values.parameters import parameters
from tests.values.reports import reports_of
from tests.values.search import COSTS, axes_of, by_size, limits_of, predictor_of, workload_of
from tests.values.training import plan_of
from trials import wire
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import CommunicationCost, LayerCosts
from trials.errors import WireError
from trials.model.cut import cut
from trials.plan import Layout, Packed, Padded, Plan

AMPLE = 1 << 50
PACKED = Packed(qv=9, qt=480, qv_min=9, qt_min=416)
AFTER = plan_of("5+4", data=2, zero=1, packing=PACKED)
DURING = replace(AFTER, layout=replace(AFTER.layout, bucket_bytes=1 << 20))
BYTES = 4 * 12 * 50_000
"""Of the gradients of five vision and four language layers, and one of each other kind."""


def timed(share: float, seconds_per_byte: float = 1e-9) -> LayerCosts:
    """Costs of two ranks, on which a computation hides a share of averages."""
    cost = CommunicationCost(
        pipeline=1,
        data=2,
        link=COSTS.link,
        bucket_bytes=1 << 20,
        hidden_share=share,
    )
    return exchanging(replace(COSTS, communications=(cost,)), averages(seconds_per_byte))


def reduction(predictor: Predictor, plan: Plan) -> float:
    sizes = predictor.sizes(PACKED, plan.layout)
    return float(predictor.times.update_parts(plan.layout, Parts.of(cut(plan)), sizes).reduction[0])


def behind_the_head(predictor: Predictor) -> float:
    """Seconds of the mean backward pass without the head."""
    size, costs = predictor.sizes(PACKED, AFTER.layout).mean[0], predictor.costs
    layers = dict(zip(KINDS, (1, 5, 1, 4), strict=False))
    return sum(count * float(size @ by_size(kind, costs[kind].backward_seconds)) for kind, count in layers.items())


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_backward_pass_hides_a_share_of_shorter_averages(share: float) -> None:
    predictor = predictor_of(timed(share))
    assert reduction(predictor, AFTER) == pytest.approx(BYTES * 1e-9)
    assert reduction(predictor, DURING) == pytest.approx((1 - share) * BYTES * 1e-9)


def test_averages_that_take_longer_than_the_pass_are_hidden_while_it_runs() -> None:
    predictor = predictor_of(timed(0.5, 1e-6))
    assert reduction(predictor, DURING) == pytest.approx(BYTES * 1e-6 - 0.5 * behind_the_head(predictor))


def test_whole_steps_end_as_much_sooner_however_they_are_predicted() -> None:
    predictor = predictor_of(timed(0.5, 1e-6))
    saved = 0.5 * behind_the_head(predictor)
    steps = [predictor.predict(plan).step_seconds for plan in (AFTER, DURING)]
    assert steps[0] - steps[1] == pytest.approx(saved)
    epochs = predictor.plans_epoch_seconds([AFTER, DURING])
    assert epochs[0] - epochs[1] == pytest.approx(saved * len(steps[0]))


def test_what_older_profiles_did_not_time_hides_nothing() -> None:
    predictor = predictor_of(COSTS)
    assert reduction(predictor, DURING) == reduction(predictor, AFTER)
    assert overlapped(COSTS, AFTER.layout) == AFTER.layout


def test_features_sum_to_what_is_left_of_the_averages() -> None:
    predictor, once = predictor_of(timed(0.5, 1e-7)), [1.0] * len(FACTORS)
    *parts, whole = step_features(predictor, DURING, [0, 1], once)
    assert sum(parts) == pytest.approx(whole)
    *_, update = stage_features(predictor, DURING, [0, 1], once, stage=0, data_rank=0)
    assert update[FACTORS.index("communication")] == pytest.approx(reduction(predictor, DURING), rel=0.1)
    assert update[FACTORS.index("communication")] < 0.9 * reduction(predictor, AFTER)


# --- the search ---


def searched(costs: LayerCosts) -> dict[Layout, int]:
    solver = Solver(predictor_of(costs), limits_of(AMPLE))
    space = feasible_space(workload_of(AMPLE, 2), solver, remedy="")
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert space.plan(point) == plan
    return {replace(plan.layout, bucket_bytes=0): plan.layout.bucket_bytes for plan in space.starts}


def test_data_parallelism_averages_during_the_pass_where_the_profile_found_that_it_hides_enough() -> None:
    sizes = searched(timed(0.5))
    for layout, size in sizes.items():
        assert size == (1 << 20) * (layout.pipeline == 1)
    assert {layout.pipeline for layout in sizes} == {1, 2}


@pytest.mark.parametrize(
    "costs", parameters({"not timed": COSTS, "hides little": timed(0.05)}, short=("hides little",))
)
def test_otherwise_all_layouts_average_after_it(costs: LayerCosts) -> None:
    assert not any(searched(costs).values())


@pytest.mark.parametrize(("plan", "costs"), [(DURING, timed(0.5)), (AFTER, COSTS)], ids=["timed", "not timed"])
@pytest.mark.parametrize("earlier", [AFTER, DURING], ids=["after", "during"])
def test_an_earlier_winner_averages_as_this_profile_says(earlier: Plan, plan: Plan, costs: LayerCosts) -> None:
    padded = Padded(samples=4)  # which keeps the global batch
    space = Space(axes_of(layouts=(plan.layout,), padded=(4,)), Solver(predictor_of(costs), limits_of(AMPLE)))
    found = moved(replace(earlier, packing=padded), workload_of(AMPLE, 2), space)
    assert found == replace(plan, packing=padded)


# --- the profile ---


def test_the_slowest_rank_says_how_much_is_hidden() -> None:
    reports = [
        replace(report, communications=(replace(report.communications[0], bucket_bytes=1 << 20, hidden_share=share),))
        for report, share in zip(reports_of(COSTS, 0.0), (0.75, 0.5), strict=True)
    ]
    costs = fit_costs(reports)
    assert (costs.communications[0].bucket_bytes, costs.communications[0].hidden_share) == (1 << 20, 0.5)
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs
    text = costs_text(costs, TypicalPack.of(workload_of(AMPLE, 2).data))
    assert "2 data ranks: a computation hides 50% of a reduction in buckets of 1024 KiB" in text


def test_more_than_all_cannot_be_hidden() -> None:
    document = wire.encode(timed(0.5)).replace('"hidden_share":0.5', '"hidden_share":1.5')
    with pytest.raises(WireError, match="hidden_share"):
        wire.decode(LayerCosts, document)
