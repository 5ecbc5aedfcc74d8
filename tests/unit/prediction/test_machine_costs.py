"""Predictions use what a profile says of a layout's links and reductions, and of times that are not linear."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.dimensions.averages import average_of_all, average_seconds, extrapolates
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.parts import Parts
from autotune.prediction.stage_times import link_times
from tests.values.exchanges import around_layers, averages, exchanging
from tests.values.reports import reports_of
from tests.values.search import COSTS, predictor_of
from tests.values.training import plan_of
from trials.costs.coefficients import KINDS, NOTHING, LayerKind
from trials.costs.layer_costs import CommunicationCost, LayerCosts, LinkCost
from trials.model.cut import cut
from trials.plan import Layout
from trials.tasks.answer import CommunicationTiming

SLOW = CommunicationCost(pipeline=2, data=2, link=LinkCost(latency_seconds=0.25, seconds_per_byte=1e-6))
ALL_RANKS = CommunicationCost(pipeline=1, data=4, link=LinkCost(latency_seconds=0, seconds_per_byte=0))
MEASURED = exchanging(
    replace(COSTS, communications=(ALL_RANKS, SLOW)), averages(3e-8, 4), averages(1e-7, 2, pipeline=2)
)


def test_sends_and_reductions_take_the_time_of_the_plans_own_layout() -> None:
    usual, measured = (predictor_of(costs) for costs in (COSTS, MEASURED))
    plan = plan_of("3+0", "2+4", data=2)
    parts, sizes = Parts.of(cut(plan)), measured.sizes(plan.packing, plan.layout)
    sends = measured.times.pack_seconds(parts, plan.layout, sizes).sends[:, 0]
    # A vision layer outputs 3e4 bytes for each unit.
    assert sends == pytest.approx(0.25 + 1e-6 * 3e4 * sizes.table[:, 0])
    reductions = [predictor.times.update_parts(plan.layout, parts, sizes).reduction for predictor in (usual, measured)]
    assert reductions[1] == pytest.approx(1e-7 / average_of_all(COSTS) * reductions[0])
    assert measured.epoch_seconds(plan) == pytest.approx(measured.predict(plan).epoch_seconds)
    assert measured.epoch_seconds(plan) > 2 * usual.epoch_seconds(plan)
    other = plan_of("3+0", "2+4")
    assert measured.epoch_seconds(other) == usual.epoch_seconds(other)


def test_a_longer_pipeline_has_the_reduction_of_as_many_data_ranks_and_the_usual_link() -> None:
    layout = Layout(pipeline=2, data=4, zero=1)
    assert average_seconds(MEASURED, layout) == 3e-8
    assert link_times(MEASURED, layout, np.arange(2)).ravel().tolist() == [0.0, 0.0]  # as in COSTS


def test_a_calibration_scales_the_communication_of_every_layout() -> None:
    times = [3.0 if name == "communication" else 1.0 for name in FACTORS]
    for before, after in zip(MEASURED.communications, scaled(MEASURED, times).communications, strict=True):
        assert after.link.latency_seconds == pytest.approx(3 * before.link.latency_seconds)
        assert after.link.seconds_per_byte == pytest.approx(3 * before.link.seconds_per_byte)
    for exchange, slower in zip(MEASURED.exchanges, scaled(MEASURED, times).exchanges, strict=True):
        assert slower == exchange.times(3.0)


def test_stages_send_over_the_link_that_leads_to_the_next_one() -> None:
    """On nodes of two ranks, the second of four stages sends to another node."""
    fast, slow = (LinkCost(latency_seconds=latency, seconds_per_byte=0.0) for latency in (0.25, 2.0))
    cost = CommunicationCost(pipeline=4, data=1, link=fast, between=slow)
    over_nodes = predictor_of(replace(COSTS, communications=(cost,), of_node=2))
    plan = plan_of("2+0", "2+0", "0+2", "0+2")
    parts, sizes = Parts.of(cut(plan)), over_nodes.sizes(plan.packing, plan.layout)
    assert over_nodes.times.pack_seconds(parts, plan.layout, sizes).sends[0, :3] == pytest.approx([0.25, 2.0, 0.25])
    # Together with another plan, whose stages are alike or have other numbers.
    other = plan_of("2+0", "1+0", "1+2", "0+2")
    both = over_nodes.plans_step_seconds((plan, other), sizes).sum(axis=1)
    assert both == pytest.approx([over_nodes.predict(each).epoch_seconds for each in (plan, other)])
    one_node = predictor_of(replace(COSTS, communications=(replace(cost, between=None),)))
    assert over_nodes.epoch_seconds(plan) > one_node.epoch_seconds(plan) + 2


def test_a_layout_that_was_not_timed_has_the_link_between_nodes_of_another() -> None:
    slow = LinkCost(latency_seconds=2.0, seconds_per_byte=0.0)
    costs = replace(COSTS, communications=(ALL_RANKS, replace(SLOW, between=slow)), of_node=2)
    latencies, _ = link_times(costs, Layout(pipeline=4, data=1, zero=0), np.arange(4))
    assert latencies.tolist() == [0.0, 2.0, 0.0]


INSIDE, BETWEEN = 1e-9, 1e-7


def on_two_nodes(of_node: int = 4) -> LayerCosts:
    """Costs of eight ranks; averages over 8 data ranks pass between the nodes, over 4 and 2 they do not."""
    timed = {8: BETWEEN, 4: INSIDE, 2: 0.5 * INSIDE, 1: 0.0}
    links = tuple(
        CommunicationCost(
            pipeline=8 // data, data=data, link=LinkCost(latency_seconds=0.5 * data, seconds_per_byte=0.0)
        )
        for data in timed
    )
    of_layouts = (averages(seconds, data, pipeline=8 // data) for data, seconds in timed.items())
    return exchanging(replace(COSTS, of_node=of_node, communications=links), *of_layouts)


@pytest.mark.parametrize(
    ("pipeline", "data", "tensor", "of_node", "seconds"),
    [
        (2, 4, 1, 4, INSIDE),
        (1, 8, 1, 4, BETWEEN),
        (2, 2, 2, 4, 0.5 * INSIDE),
        (1, 4, 2, 0, INSIDE),
        # 2 of the 4 data ranks are on each node, as are 2 of the other tensor rank.
        (1, 4, 2, 4, BETWEEN * (3 / 4) / (7 / 8) * 2),
        (1, 2, 4, 4, BETWEEN * (1 / 2) / (7 / 8) * 4),
    ],
)
def test_a_reduction_is_that_of_data_ranks_that_lie_on_nodes_alike(
    pipeline: int, data: int, tensor: int, of_node: int, seconds: float
) -> None:
    costs, layout = on_two_nodes(of_node), Layout(pipeline=pipeline, data=data, tensor=tensor, zero=1)
    assert average_seconds(costs, layout) == pytest.approx(seconds)
    assert extrapolates(costs, layout) == (seconds > BETWEEN)


def test_a_layout_has_the_link_of_stages_with_as_many_ranks() -> None:
    layout = Layout(pipeline=2, data=2, tensor=2, zero=1)
    assert link_times(on_two_nodes(), layout, np.arange(2))[0].tolist() == [2.0]


def test_what_tensor_ranks_hold_whole_is_averaged_inside_their_node() -> None:
    """Four tensor ranks of a node, of which each has a data rank on either node."""
    layout = Layout(pipeline=1, data=2, tensor=4, zero=1)
    costs = on_two_nodes()
    costs = replace(costs, exchanges=(*costs.exchanges, around_layers(4, NOTHING, NOTHING)))
    twice = tuple(each.times(2.0) if (each.name, each.ranks) == ("average", 4) else each for each in costs.exchanges)
    plan = plan_of("5+4")
    parts = Parts.of(cut(plan))
    predictors = [predictor_of(each) for each in (costs, replace(costs, exchanges=twice))]
    seconds, slower = (
        each.times.update_parts(layout, parts, each.sizes(plan.packing, layout)).reduction[0] for each in predictors
    )
    whole = 4 * sum(count * COSTS[kind].parameters for kind, count in zip(KINDS, parts.layers[0], strict=True))
    assert slower - seconds == pytest.approx(whole * INSIDE)


def test_a_profile_tells_links_inside_and_between_nodes_apart() -> None:
    """Four ranks, of which the second sends slowly; on two nodes it is the one that sends to the other node."""
    timings = [
        CommunicationTiming(pipeline=4, data=1, latency_seconds=seconds, seconds_per_byte=seconds)
        for seconds in (1.0, 5.0, 2.0, 0.0)
    ]
    reports = [
        replace(report, communications=(timing,))
        for report, timing in zip(reports_of(COSTS, 0.0, ranks=4), timings, strict=True)
    ]
    apart, together = (fit_costs(reports, nodes) for nodes in (2, 1))
    (cost,) = apart.communications
    assert (apart.of_node, cost.link.latency_seconds) == (2, 2.0)
    assert cost.between == LinkCost(latency_seconds=5.0, seconds_per_byte=5.0)
    (cost,) = together.communications
    assert (together.of_node, cost.link.latency_seconds, cost.between) == (0, 5.0, None)


def with_curve(kind: LayerKind, sizes: tuple[float, ...], curve: tuple[float, ...]) -> LayerCosts:
    layers = {**dict(COSTS.layers), kind: replace(COSTS[kind], curve_sizes=sizes, curve=curve)}
    return replace(COSTS, layers=tuple((each, layers[each]) for each in KINDS))


@pytest.mark.parametrize(("kind", "column"), [("vision", 0), ("language", 1)])
def test_layers_take_as_much_longer_as_their_curve_says_at_the_size_of_each_pack(kind: LayerKind, column: int) -> None:
    plan = plan_of("5+4r2,1")
    usual = predictor_of()
    sizes = usual.sizes(plan.packing, plan.layout)
    packs = sizes.table[:, column]
    low, high = float(packs.min()), float(packs.max())
    curved = predictor_of(with_curve(kind, (low, high), (1.0, 2.0)))
    factor = 1 + (packs - low) / (high - low)
    whole = Parts.of(cut(plan))
    own = (np.array(KINDS) == kind).astype(float)
    alone = replace(whole, layers=whole.layers * own, recomputed=whole.recomputed * own)
    before, after = (predictor.times.pack_seconds(whole, plan.layout, sizes) for predictor in (usual, curved))
    of_kind = usual.times.pack_seconds(alone, plan.layout, sizes)
    for name in ("forward", "backward", "recompute", "samples"):
        more = getattr(after, name)[:, 0] - getattr(before, name)[:, 0]
        assert more == pytest.approx((factor - 1) * getattr(of_kind, name)[:, 0])
        assert more.max() > 0
    assert curved.epoch_seconds(plan) == pytest.approx(curved.predict(plan).epoch_seconds)


def test_packs_beyond_a_curve_have_its_last_factor() -> None:
    plan = plan_of("5+4")
    seconds = [
        predictor_of(with_curve("language", sizes, (1.5,) * len(sizes))).epoch_seconds(plan)
        for sizes in ((1.0, 2.0), (1.0, 1e9))
    ]
    assert seconds[0] == pytest.approx(seconds[1])
