"""Plans with one change towards another plan: with its split, or with its packs."""

from collections.abc import Sequence
from dataclasses import replace

from autotune.search.explanation.changes import Changes, repacked, resplit
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.learning.surrogate import Surrogate
from storage.explanation import ChangeEffect
from storage.records import FinishedTrial
from tests.unit.prediction.test_predictor import PACKED
from tests.unit.prediction.test_shared_packs import LEVELS, sharing
from tests.values.search import COSTS, completed, deferring, finished, limits_of, predictor_of
from tests.values.storage import OUTCOMES, plan_time
from tests.values.training import plan_of
from trials.plan import Padded
from trials.stage import Recomputed

PADDED = Padded(samples=4)
RECOMPUTED = plan_of("5+0r5,0", "0+4r0,4", packing=PADDED)


def test_a_change_that_was_not_measured_is_at_most_as_sure_as_its_prediction() -> None:
    predictor, trial = CalibratedPredictor(predictor_of()), completed(RECOMPUTED, 100.0)
    surrogate = Surrogate(predictor)
    surrogate.learn(trial)
    changes = Changes(predictor, surrogate, limits_of(1 << 40), [trial], [RECOMPUTED])
    (effect,) = changes.without_recompute(RECOMPUTED, plan_time(RECOMPUTED, "best"))
    assert not effect.measured
    assert effect.gain_error > effect.gain * predictor.relative_error(effect.plan) > 0.0


def test_a_way_to_fit_that_ran_out_of_memory_is_none() -> None:
    predictor, trial = CalibratedPredictor(predictor_of()), completed(RECOMPUTED, 100.0)
    surrogate = Surrogate(predictor)
    surrogate.learn(trial)

    def ways(*trials: FinishedTrial) -> Sequence[ChangeEffect]:
        changes = Changes(predictor, surrogate, limits_of(1 << 40), trials, [RECOMPUTED])
        return changes.ways_to_fit(RECOMPUTED, plan_time(RECOMPUTED, "best"))

    (way,) = ways(trial)
    assert ways(trial, finished(way.plan, OUTCOMES["out of memory"])) == ()


def test_pipelines_with_too_few_ranks_for_shared_packs_leave_the_others_as_a_way_to_fit() -> None:
    predictor = CalibratedPredictor(predictor_of(sharing(costs=deferring(COSTS))))
    winner = plan_of("5+0", "0+4", data=2, packing=replace(PACKED, sequence=2))
    changes = Changes(predictor, Surrogate(predictor), limits_of(1 << 40), [], [])
    ways = {way.change: way.plan.layout for way in changes.ways_to_fit(winner, plan_time(winner, "best"))}
    assert (ways["zero-bubble"].pipeline, ways["zero-bubble"].data) == (2, 2)


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
