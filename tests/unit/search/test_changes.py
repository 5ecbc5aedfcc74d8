"""Plans with one change towards another plan: with its split, or with its packs."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotune.search.explanation.changes import Changes, repacked, resplit
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from storage.explanation import ChangeEffect
from storage.records import FinishedTrial
from tests.unit.prediction.test_predictor import PACKED
from tests.unit.prediction.test_shared_packs import LEVELS, sharing
from tests.values.exchanges import exchanging, of_weights
from tests.values.search import COSTS, completed, deferring, finished, limits_of, predictor_of
from tests.values.storage import OUTCOMES, plan_time
from tests.values.training import plan_of
from trials.plan import Packed, Padded, Plan
from trials.stage import Recomputed

PADDED = Padded(samples=4)
RECOMPUTED = plan_of("5+0r5,0", "0+4r0,4", packing=PADDED)
PIPELINE = plan_of("4+0", "1+4", packing=Packed(qv=12, qt=480, qv_min=12, qt_min=416))


def test_a_change_that_was_not_measured_is_at_most_as_sure_as_its_prediction() -> None:
    predictor, trial = CalibratedPredictor(predictor_of()), completed(RECOMPUTED, 100.0)
    surrogate = Surrogate(predictor)
    surrogate.learn(trial)
    changes = Changes(predictor, surrogate, limits_of(1 << 40), [trial], [RECOMPUTED])
    (effect,) = changes.without_recompute(RECOMPUTED, plan_time(RECOMPUTED, "best"))
    assert not effect.measured
    assert effect.gain_error > effect.gain * predictor.relative_error(effect.plan) > 0.0


def tight_for(predictor: CalibratedPredictor, plan: Plan) -> int:
    """Return a memory limit that the plan's packs exceed in data parallelism unless layers are recomputed."""
    ranks = plan.layout.pipeline * plan.layout.data
    (needed,) = predictor.memory(replace(plan_of("5+4", data=ranks, zero=1), packing=plan.packing))
    return round(0.97 * needed.expected)


def test_a_way_to_fit_that_ran_out_of_memory_is_none() -> None:
    predictor, trial = CalibratedPredictor(predictor_of()), completed(RECOMPUTED, 100.0)
    surrogate = Surrogate(predictor)
    surrogate.learn(trial)

    def ways(*trials: FinishedTrial, memory: int = tight_for(predictor, RECOMPUTED)) -> Sequence[ChangeEffect]:
        changes = Changes(predictor, surrogate, limits_of(memory), trials, [RECOMPUTED])
        return changes.ways_to_fit(RECOMPUTED, plan_time(RECOMPUTED, "best"))

    (way,) = ways(trial)
    assert ways(trial, finished(way.plan, OUTCOMES["out of memory"])) == ()
    assert ways(trial, memory=1 << 40) == (), "nothing has to fit"


def ways_of(predictor: CalibratedPredictor, winner: Plan, memory: int) -> Sequence[ChangeEffect]:
    changes = Changes(predictor, Surrogate(predictor), limits_of(memory), [], [])
    return changes.ways_to_fit(winner, plan_time(winner, "best"))


def test_pipelines_with_too_few_ranks_for_shared_packs_leave_the_others_as_a_way_to_fit() -> None:
    predictor = CalibratedPredictor(predictor_of(sharing(costs=deferring(COSTS))))
    winner = plan_of("5+0", "0+4", data=2, packing=replace(PACKED, sequence=2))
    ways = {way.change: way.plan.layout for way in ways_of(predictor, winner, tight_for(predictor, winner))}
    assert (ways["zero-bubble"].pipeline, ways["zero-bubble"].data) == (2, 2)


def test_the_ways_to_fit_the_memory_are_compared_with_the_winner() -> None:
    costs = exchanging(deferring(COSTS), *of_weights(2, [0.05] * 5, 1e-9))
    predictor = CalibratedPredictor(predictor_of(costs))
    found = ways_of(predictor, PIPELINE, tight_for(predictor, PIPELINE))
    ways = {way.change: way for way in found}
    assert ways.keys() == {"recompute-alone", "shards", "zero-bubble"}
    assert [way.gain for way in found] == sorted((way.gain for way in found), reverse=True)
    for way in found:
        assert way.plan.packing == PIPELINE.packing
        assert way.plan.layout.world_size == PIPELINE.layout.world_size
        assert way.fits
        expected = predictor.epoch_seconds(PIPELINE) / predictor.epoch_seconds(way.plan)
        assert way.gain == pytest.approx(expected, rel=0.05)
    assert ways["shards"].plan.layout.zero == 3
    assert ways["zero-bubble"].plan.layout.zero_bubble
    alone = ways["recompute-alone"].plan.layout
    assert (alone.pipeline, alone.zero, alone.zero_bubble) == (1, 1, False)


def test_ways_that_were_not_profiled_are_left_out_and_all_where_nothing_frees_memory() -> None:
    predictor = CalibratedPredictor(predictor_of())
    tight = tight_for(predictor, PIPELINE)
    assert {way.change for way in ways_of(predictor, PIPELINE, tight)} == {"recompute-alone"}
    assert ways_of(predictor, plan_of("5+4", data=2, zero=1, packing=PIPELINE.packing), tight) == ()


def test_another_split_recomputes_as_large_a_share() -> None:
    half = plan_of("4+0r2,0", "1+4r1,2", packing=PADDED)
    assert resplit(half, plan_of("5+2", "0+2")) == plan_of("5+2r3,1", "0+2r0,1", packing=PADDED)


def test_another_split_of_packs_of_levels_recomputes_as_large_a_share_at_each_level() -> None:
    assert [stage.recomputed for stage in LEVELS.stages] == [
        (Recomputed(vision=1, language=4), Recomputed(vision=5, language=0))
    ]
    first, second = resplit(LEVELS, plan_of("5+1", "0+3", data=2)).stages
    assert first.recomputed == (Recomputed(vision=1, language=1), Recomputed(vision=5, language=0))
    assert second.recomputed == (Recomputed(vision=0, language=3), Recomputed(vision=0, language=0))


def test_packs_of_levels_recompute_what_the_usual_ones_did() -> None:
    usual = plan_of("5+4r2,1", data=2, packing=PADDED)
    (stage,) = repacked(usual, LEVELS.packing).stages
    assert stage.recomputed == (Recomputed(vision=2, language=1),) * 2
    assert repacked(repacked(usual, LEVELS.packing), PADDED) == usual
