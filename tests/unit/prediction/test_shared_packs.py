"""Prediction of packs that several data ranks compute together."""

from dataclasses import fields, replace

import numpy as np
import pytest

from autotune.dimensions.sequence import knows_sequence
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled, stage_features
from autotune.prediction.parts import Parts
from autotune.prediction.timeline import timeline
from tests.unit.prediction.test_predictor import PACKED, linked
from tests.values.data import index_of
from tests.values.exchanges import exchanging
from tests.values.search import COSTS, INDEX, predictor_of, random_rows
from tests.values.training import plan_of
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts, UpdateCost
from trials.model.cut import cut
from trials.plan import Layout, Levelled, Plan
from trials.stage import Recomputed


def sharing_costs(degree: int, seconds: float) -> tuple[Exchange, Exchange]:
    """Exchanges of some seconds for each message, and of 1 us for each token; further bytes for each token."""
    language, forward = COSTS["language"], (0, 1e-6, 0, 2 * seconds)
    in_attention = Exchange(
        name="sequence",
        ranks=degree,
        layer="language",
        forward_seconds=forward,
        backward_seconds=(0, 2e-6, 0, 3 * seconds),
        recompute_seconds=forward,
        kept_bytes=tuple(np.add(language.kept_bytes, (0, 100.0 * degree, 0, 0)).tolist()),
        shared_bytes=(0, 8.0, 0, 0),
        transient_bytes=(0, 16.0, 0, 0),
    )
    behind_projector = Exchange(
        name="sequence",
        ranks=degree,
        layer="projector",
        forward_seconds=(0, 0, 0, 4 * seconds),
        backward_seconds=(0, 0, 0, 5 * seconds),
    )
    return in_attention, behind_projector


def sharing(seconds: float = 0.01, costs: LayerCosts = COSTS) -> LayerCosts:
    return exchanging(costs, *sharing_costs(2, seconds), *sharing_costs(4, seconds))


def levelled(*stages: str, degrees: tuple[int, ...], data: int, further: tuple[tuple[int, int], ...]) -> Plan:
    """Two levels; at the second, each stage recomputes the `further` (vision, language) layers."""
    whole = plan_of(*stages, data=data)
    short, long = replace(PACKED, qv=4, qt=300, qv_min=0, qt_min=0), PACKED
    levels = (replace(level, sequence=degree) for level, degree in zip((short, long), degrees, strict=True))
    changed = (
        replace(stage, further_levels=(Recomputed(vision=vision, language=language),))
        for stage, (vision, language) in zip(whole.stages, further, strict=True)
    )
    return Plan(packing=Levelled(levels=tuple(levels)), layout=whole.layout, stages=tuple(changed))


LEVELS = levelled("5+4r1,4", degrees=(1, 2), data=2, further=((5, 0),))


def test_ranks_that_share_a_pack_have_equal_parts_of_it() -> None:
    alone, shared = (plan_of("5+4", data=data, packing=replace(PACKED, sequence=data)) for data in (1, 4))
    predictor = predictor_of(sharing())
    whole, parts = (predictor.sizes(plan.packing, plan.layout) for plan in (alone, shared))
    assert parts.whole.tolist() == whole.table.tolist()
    assert parts.table[:, :2].tolist() == np.ceil(whole.table[:, :2] / 4).tolist()
    assert (4 * parts.table[:, 2]).tolist() == whole.table[:, 2].tolist()
    assert parts.step_samples.tolist() == whole.step_samples.tolist()
    assert (4 * parts.samples_alone).tolist() == whole.samples_alone.tolist()
    assert (4 * parts.equal_parts).tolist() == whole.table.tolist()
    one, other = (predictor.predict(plan) for plan in (alone, shared))
    assert other.stage_memory[0].static == one.stage_memory[0].static
    kept = one.stage_bytes[0] - one.stage_memory[0].static
    assert other.stage_bytes[0] - other.stage_memory[0].static < 0.4 * kept
    # The images of a pack are prepared by each rank.
    assert other.breakdown.totals["loading"] == pytest.approx(one.breakdown.totals["loading"])


@pytest.mark.parametrize(
    "plan",
    [
        plan_of("5+4", data=4, packing=replace(PACKED, sequence=4)),
        levelled("5+4", degrees=(1, 4), data=4, further=((0, 0),)),
    ],
    ids=["shared", "levels"],
)
def test_unequal_parts_of_packs_that_ranks_share_are_no_padding(plan: Plan) -> None:
    with_images = [(1 + units, tokens) for units, tokens in random_rows(66)]
    predictor = predictor_of(sharing(), index_of(with_images))
    sizes = predictor.sizes(plan.packing, plan.layout)
    assert sizes.epoch.packs.counts.all()
    assert (sizes.table > sizes.equal_parts).any()
    totals = predictor.predict(plan).breakdown.totals
    assert totals["padding"] == pytest.approx(0, abs=1e-9)
    assert totals["data_imbalance"] > 0.01 * totals["ideal"]


def test_packs_of_each_level_have_its_recomputed_layers_and_its_ranks() -> None:
    """A plan with levels is as each of its levels alone, pack by pack."""
    predictor, plan = predictor_of(sharing()), LEVELS
    sizes = predictor.sizes(plan.packing, plan.layout)
    assert {*sizes.levels.tolist()} == {0, 1}
    seconds = predictor.times.plan_seconds(plan, sizes)
    for level, alone in enumerate((plan_of("5+4r1,4"), plan_of("5+4r5,0"))):
        of_level = sizes.levels == level
        expected = predictor.times.pack_seconds(Parts.of(cut(alone)), plan.layout, sizes)
        for field in fields(seconds):
            if field.name == "most_deferred":  # of stages
                continue
            assert np.array_equal(getattr(seconds, field.name)[of_level], getattr(expected, field.name)[of_level])
        assert (seconds.exchange[of_level] > 0).all() == bool(level)
    prediction = predictor.predict(plan)
    assert predictor.epoch_seconds(plan) == pytest.approx(prediction.epoch_seconds)
    assert sum(prediction.breakdown.totals.values()) == pytest.approx(prediction.epoch_seconds)
    assert prediction.step_samples.sum() == len(INDEX)
    shown = timeline(predictor, plan, prediction)
    assert shown.seconds == pytest.approx(prediction.step_seconds[shown.step])


@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_exchanges_take_the_profiled_time_of_their_degree(sequence: int) -> None:
    costs = sharing()
    predictor = predictor_of(costs)
    plan = plan_of("5+4r5,3", data=4, packing=replace(PACKED, sequence=sequence))
    sizes = predictor.sizes(plan.packing, plan.layout)
    seconds = predictor.times.pack_seconds(Parts.of(cut(plan)), plan.layout, sizes)
    forward, back, behind, back_behind = (
        (sequence > 1) * sizes.table[:, :4] @ np.array(each)
        for cost in sharing_costs(sequence, 0.01)
        for each in (cost.forward_seconds, cost.backward_seconds)
    )
    assert seconds.exchange[:, 0] == pytest.approx(4 * forward + behind)
    # Backward, and those of the forward pass once more for each recomputed layer.
    assert seconds.exchange_back[:, 0] == pytest.approx(4 * back + 3 * forward + back_behind)
    prediction, free = predictor.predict(plan), predictor_of().predict(replace(plan, packing=PACKED))
    assert (prediction.breakdown.totals["communication"] > free.breakdown.totals["communication"]) is (sequence > 1)
    assert prediction.epoch_seconds == pytest.approx(predictor.epoch_seconds(plan))


def test_no_stage_exchanges_before_the_projector() -> None:
    predictor = predictor_of(sharing())
    plan = plan_of("3+0", "2+1", "0+3", data=2, packing=replace(PACKED, sequence=2))
    sizes = predictor.sizes(plan.packing, plan.layout)
    seconds = predictor.times.pack_seconds(Parts.of(cut(plan)), plan.layout, sizes)
    for side in (seconds.exchange, seconds.exchange_back):
        assert not side[:, 0].any()
        assert (side[:, 1:] > 0).all()
    assert seconds.exchange[:, 2] == pytest.approx(3 * (0.02 + 1e-6 * sizes.table[:, 1]))


def test_a_degree_that_was_not_timed_has_the_costs_of_the_next_one_that_was() -> None:
    costs = sharing()
    for degree, timed in ((2, 2), (3, 4), (4, 4), (8, 4)):
        found = costs.exchange("sequence", degree, "language"), costs.exchange("sequence", degree, "projector")
        assert found == sharing_costs(timed, 0.01)


def test_a_profile_of_one_rank_has_free_exchanges_and_an_older_one_of_several_has_none() -> None:
    shared = plan_of("5+4", data=2, packing=replace(PACKED, sequence=2))
    assert predictor_of().predict(shared).breakdown.totals["communication"] > 0
    older = replace(COSTS, updates=(*COSTS.updates, UpdateCost(zero=1, data_parallel=2, seconds_per_parameter=1e-9)))
    assert (knows_sequence(COSTS, 2), knows_sequence(older, 2), knows_sequence(older, 1)) == (True, False, True)
    with pytest.raises(ValueError, match="no times of what 2 ranks exchange"):
        predictor_of(older).predict(shared)


def test_a_calibration_scales_exchanges_with_the_links() -> None:
    times = [3.0 if name == "communication" else 1.0 for name in FACTORS]
    found = scaled(sharing(), times).exchanges
    assert found == tuple(each.times(3.0) for each in sharing().exchanges)
    assert [each.kept_bytes for each in found] == [each.kept_bytes for each in sharing().exchanges]


@pytest.mark.parametrize("plan", [LEVELS, plan_of("5+4r0,2", data=2, packing=replace(PACKED, sequence=2))])
def test_the_features_of_a_rank_are_its_seconds_with_exchanges(plan: Plan) -> None:
    predictor = predictor_of(linked(sharing(), 0.1, 0.0))
    sizes = predictor.sizes(plan.packing, plan.layout)
    seconds, packs = predictor.times.plan_seconds(plan, sizes), sizes.epoch.rows(1)[:, 1]
    load, forward, backward, _ = stage_features(predictor, plan, (1,), [1.0] * len(FACTORS), stage=0, data_rank=1)
    assert sum(load) == pytest.approx(seconds.load[packs].sum())
    assert sum(forward) == pytest.approx(seconds.shared_forward[packs].sum() - seconds.load[packs].sum())
    assert sum(backward) == pytest.approx(seconds.shared_backward[packs].sum())
    communication = FACTORS.index("communication")
    assert forward[communication] == pytest.approx(seconds.exchange[packs].sum())
    assert backward[communication] == pytest.approx(seconds.exchange_back[packs].sum())


def test_layouts_of_one_degree_have_no_waiting_ranks() -> None:
    predictor = predictor_of(sharing())
    for degrees, waits in (((2, 2), False), ((1, 2), True), ((4, 2), True)):
        plan = levelled("5+4", degrees=degrees, data=4, further=((0, 0),))
        found = predictor.times.waiting(Parts.of(cut(plan)), plan.layout, predictor.sizes(plan.packing, plan.layout))
        assert (found is not None) is waits
    assert Layout(pipeline=1, data=4, zero=0) == plan.layout
