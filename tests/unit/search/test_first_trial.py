"""What a search computes before its first trial."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from typing_extensions import override

from autotune.prediction.calibration import CalibrationState
from autotune.prediction.parts import Parts
from autotune.prediction.predictor import Predictor
from autotune.prediction.sizes import EpochSizes
from autotune.prediction.stage_times import StageTimes
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from autotune.search.solver.solver import Solver
from autotune.search.space.space import Space
from tests.values.search import BATCH, COSTS, INDEX, axes_of, epoch_of, limits_of
from trials.arrays import Floats
from trials.data.epoch import Epoch
from trials.job import SearchSection
from trials.plan import Packing, Plan

LIMITS = limits_of(1 << 40)


class CountingTimes(StageTimes):
    """Counts the times of mean packs, which bounds and solvers ask for."""

    means = 0

    @override
    def load_seconds(self, parts: Parts, sizes: Floats) -> Floats:
        self.means += len(sizes) == 1
        return super().load_seconds(parts, sizes)


class Counting(Predictor):
    """Counts simulations, and how often each plan is in one."""

    def __init__(self, batch: int = BATCH) -> None:
        self.epochs: list[Epoch] = []
        self._built = epoch_of(INDEX, batch)
        super().__init__(COSTS, self._epoch, 4)
        self.simulations = 0
        self.plans: Counter[Plan] = Counter()
        self.times = self.asked = CountingTimes(COSTS)

    def _epoch(self, packing: Packing, data_parallel: int) -> Epoch:
        self.epochs.append(self._built(packing, data_parallel))
        return self.epochs[-1]

    def plans_step_seconds(self, plans: Sequence[Plan], sizes: EpochSizes) -> Floats:
        self.simulations += 1
        self.plans.update(plans)
        return super().plans_step_seconds(plans, sizes)


def advisor_of(predictor: Predictor, state: CalibrationState | None = None) -> Advisor:
    space = Space(axes_of(devices=8), Solver(predictor, LIMITS))
    return Advisor(space, CalibratedPredictor(predictor, state), LIMITS, SearchSection())


def test_before_the_first_trial_each_plan_is_simulated_once_and_like_plans_together() -> None:
    predictor = Counting()
    assert [*advisor_of(predictor).predicted(1.5)]
    assert set(predictor.plans.values()) == {1}
    assert predictor.simulations < len(predictor.plans) / 5
    # Packs are built once for each packing, whatever the number of data ranks.
    packs = {id(epoch.packs.samples) for epoch in predictor.epochs}
    assert len(packs) == len({epoch.packing for epoch in predictor.epochs}) < len(predictor.epochs)


def test_no_climb_begins_where_no_plan_can_be_near_the_best() -> None:
    # With 120 samples a step, the uneven split of 9 layers over 8 stages is slow even without its pipeline bubble.
    near, all_of_them = Counting(batch=120), Counting(batch=120)
    every = [*advisor_of(all_of_them).predicted(math.inf)]
    seconds = [all_of_them.epoch_seconds(plan) for plan in every]
    found = [*advisor_of(near).predicted(1.15)]
    assert found == [plan for plan, takes in zip(every, seconds, strict=True) if takes <= 1.15 * seconds[0]]
    assert 1 < len(found) < len(every)
    assert len(near.plans) < 0.8 * len(all_of_them.plans)


def test_the_plan_that_is_tried_first_is_found_without_climbs_to_slower_degrees() -> None:
    lazily, all_of_them = Counting(batch=120), Counting(batch=120)
    first, *others = advisor_of(all_of_them).predicted(math.inf)
    assert next(advisor_of(lazily).predicted(math.inf)) == first
    assert len(lazily.plans) < 0.8 * len(all_of_them.plans)
    degrees = {first.layout.pipeline}
    assert next(advisor_of(lazily).predicted(math.inf, degrees)) == others[0]


def test_before_the_first_trial_packings_and_layouts_that_are_surely_slower_are_not_solved() -> None:
    lazily, all_of_them = Counting(batch=120), Counting(batch=120)
    advisor = advisor_of(all_of_them)
    solved = {(plan.packing, plan.layout) for plan in advisor.space.starts}
    fastest = advisor.space.fastest_seconds()
    assert advisor_of(lazily).space.fastest_seconds() == fastest
    assert len({(plan.packing, plan.layout) for plan in lazily.plans}) < 0.5 * len(solved)
    # Packs are arranged for those alone.
    arranged = [epoch for epoch in lazily.epochs if "assignment" in vars(epoch)]
    assert 0 < len(arranged) < 0.5 * len(lazily.epochs)
    assert next(advisor_of(lazily).predicted(1.2)) == next(advisor.predicted(1.2))


def test_after_an_earlier_search_the_first_plan_is_the_best_of_climbs_from_several_packings() -> None:
    alone, informed = Counting(batch=32), Counting(batch=32)  # of steps in which one climb ends at a worse packing
    state = CalibratedPredictor(alone).state  # which corrects nothing
    of_one, of_several = next(advisor_of(alone).predicted(1.2)), next(advisor_of(informed, state).predicted(1.2))
    assert informed.epoch_seconds(of_several) < 0.98 * alone.epoch_seconds(of_one)
    assert of_several.packing != of_one.packing
    # Each pipeline degree has one plan, as without an earlier search.
    degrees = [plan.layout.pipeline for plan in advisor_of(Counting(batch=32), state).predicted(math.inf)]
    assert degrees == sorted(set(degrees), key=degrees.index)
    assert len(degrees) > 1


def test_bounds_are_computed_once_before_the_first_trial() -> None:
    predictor = Counting(batch=120)
    advisor = advisor_of(predictor)
    advisor.space.fastest_seconds()
    before = predictor.asked.means
    assert before >= len(advisor.space.origins)
    assert next(advisor.predicted(1.2))
    assert predictor.asked.means - before < 0.5 * len(advisor.space.origins)


def test_of_several_climbs_the_plan_that_probably_fits_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Advisor, "_climbed", lambda _, start: [start])
    state = CalibratedPredictor(Counting()).state
    fastest = next(advisor_of(Counting(), state).predicted(1.2))
    chances = [1.0]
    monkeypatch.setattr(
        Advisor,
        "_chances",
        lambda _, plans: np.array([chances[0] if plan.packing == fastest.packing else 1.0 for plan in plans]),
    )
    assert next(advisor_of(Counting(), state).predicted(1.2)) == fastest
    chances[0] = 0.5
    assert next(advisor_of(Counting(), state).predicted(1.2)).packing != fastest.packing
