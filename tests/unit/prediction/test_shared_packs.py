"""Prediction of packs that several data ranks compute together."""

from dataclasses import fields, replace

import numpy as np
import pytest

from autotune.prediction.exchange import AttentionWidths
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.timeline import timeline
from tests.search_values import (
    COSTS,
    INDEX,
    epoch_of,
)
from tests.training_values import plan_of
from tests.unit.prediction.test_predictor import PACKED, linked
from trials.layer_costs import LayerCosts
from trials.model.cut import cut
from trials.plan import Layout, Levelled, Plan, Recomputed

ATTENTION = AttentionWidths(heads=8, key_heads=2, head_size=16)


def sharing_predictor(costs: LayerCosts = COSTS) -> Predictor:
    return Predictor(costs, epoch_of(), 4, attention=ATTENTION)


def test_ranks_that_share_a_pack_have_equal_parts_of_it() -> None:
    alone, shared = (plan_of("5+4", data=data, packing=replace(PACKED, sequence=data)) for data in (1, 4))
    predictor = sharing_predictor()
    whole, parts = (predictor.sizes(plan.packing, plan.layout) for plan in (alone, shared))
    assert parts.whole.tolist() == whole.table.tolist()
    assert parts.table[:, :2].tolist() == np.ceil(whole.table[:, :2] / 4).tolist()
    assert (4 * parts.table[:, 2]).tolist() == whole.table[:, 2].tolist()
    assert parts.step_samples.tolist() == whole.step_samples.tolist()
    assert (4 * parts.samples_alone).tolist() == whole.samples_alone.tolist()
    one, other = (predictor.predict(plan) for plan in (alone, shared))
    assert other.stage_memory[0].static == one.stage_memory[0].static
    kept = one.stage_bytes[0] - one.stage_memory[0].static
    assert other.stage_bytes[0] - other.stage_memory[0].static < 0.4 * kept
    # The images of a pack are prepared by each rank.
    assert other.breakdown.totals["loading"] == pytest.approx(one.breakdown.totals["loading"])


def test_packs_of_each_level_have_its_recomputed_layers_and_its_ranks() -> None:
    """A plan with levels is as each of its levels alone, pack by pack."""
    short, long = replace(PACKED, qv=4, qt=300, qv_min=0, qt_min=0), replace(PACKED, sequence=2)
    packing = Levelled(levels=(short, long))
    stage = replace(plan_of("5+4r1,4").stages[0], further_levels=(Recomputed(vision=5, language=0),))
    plan = Plan(packing=packing, layout=Layout(pipeline=1, data=2, zero=0), stages=(stage,))
    predictor = sharing_predictor(linked(COSTS, 0.01, 1e-9))
    sizes = predictor.sizes(packing, plan.layout)
    assert {*sizes.levels.tolist()} == {0, 1}
    seconds = predictor.plan_seconds(plan, sizes)
    for level, alone in enumerate((plan_of("5+4r1,4"), plan_of("5+4r5,0"))):
        of_level = sizes.levels == level
        expected = predictor.pack_seconds(Parts.of(cut(alone)), plan.layout, sizes)
        for field in fields(seconds):
            assert np.array_equal(getattr(seconds, field.name)[of_level], getattr(expected, field.name)[of_level])
        assert (seconds.exchange[of_level] > 0).all() == bool(level)
    prediction = predictor.predict(plan)
    assert predictor.epoch_seconds(plan) == pytest.approx(prediction.epoch_seconds)
    assert sum(prediction.breakdown.totals.values()) == pytest.approx(prediction.epoch_seconds)
    assert prediction.step_samples.sum() == len(INDEX)
    shown = timeline(predictor, plan, prediction)
    assert shown.seconds == pytest.approx(prediction.step_seconds[shown.step])


@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_exchanges_take_the_time_of_the_link_for_each_language_layer(sequence: int) -> None:
    """Query and result have 8 heads of 16, key and value 2, or 4 where four ranks need one each; 4 bytes each."""
    latency, per_byte = 0.01, 1e-9
    predictor = sharing_predictor(linked(COSTS, latency, per_byte))
    plan = plan_of("5+4r5,3", data=4, packing=replace(PACKED, sequence=sequence))
    sizes = predictor.sizes(plan.packing, plan.layout)
    seconds = predictor.pack_seconds(Parts.of(cut(plan)), plan.layout, sizes)
    values = {1: 0, 2: (8 + 8 + 2 + 2) * 16 / 2, 4: (8 + 8 + 4 + 4) * 16 * 3 / 4}[sequence]
    messages = 2 * latency if sequence > 1 else 0
    layer = messages + per_byte * 4 * values * sizes.table[:, 1]
    assert seconds.exchange[:, 0] == pytest.approx(4 * layer + messages)
    # Backward, and once more for each recomputed layer.
    assert seconds.exchange_back[:, 0] == pytest.approx((4 + 3) * layer + messages)
    prediction, free = predictor.predict(plan), sharing_predictor().predict(plan)
    extra = prediction.epoch_seconds - free.epoch_seconds
    assert prediction.breakdown.totals["communication"] - free.breakdown.totals["communication"] == pytest.approx(extra)
    assert prediction.epoch_seconds == pytest.approx(predictor.epoch_seconds(plan))
    assert (extra > 0) is (sequence > 1)
