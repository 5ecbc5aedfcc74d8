"""Levels of packs in a search: which ladders are offered, and the points that stand for their plans."""

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import CategoricalDistribution

from autotune.errors import JobError
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import HEADROOM
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import allows, feasible_space
from autotune.search.space.space import Space
from tests.unit.prediction.test_shared_packs import sharing
from tests.unit.search.space.test_space import points
from tests.values.data import index_of
from tests.values.exchanges import without
from tests.values.parameters import examples, parameters
from tests.values.search import LANGUAGE_LAYERS, VISION_LAYERS, limits_of, predictor_of, workload_of
from trials.data.index import DatasetIndex, profile
from trials.data.levels import check_levels
from trials.job import SpaceSection
from trials.model.cut import check_layers
from trials.plan import Layout, Levelled, Packed, Padded, Plan
from trials.workload import Workload

COSTS = sharing(seconds=1e-5)
AMPLE = 1 << 50
BATCH = 48
LAYOUTS = ("p1-d4-z0", "p2-d2-z0")
FOUR = Layout(pipeline=1, data=4, zero=0)


def mixed(count: int = 480, share: float = 0.1) -> DatasetIndex:
    """Short samples, and a share of long ones."""
    random = np.random.default_rng(0)
    short = random.integers(20, 60, count)
    tokens = np.where(random.random(count) < share, short * random.integers(8, 17, count), short)
    return index_of(list(zip(random.integers(0, 3, count).tolist(), tokens.tolist(), strict=True)))


MIXED, ALIKE = mixed(), index_of([(1, 20 + number % 40) for number in range(480)])


@cache
def predictor(index: str) -> Predictor:
    return predictor_of(COSTS, {"mixed": MIXED, "alike": ALIKE}[index], BATCH)


def workload(index: DatasetIndex, memory: int, devices: int) -> Workload:
    return replace(workload_of(memory, devices), data=profile(index), global_batch_samples=BATCH)


def between(share: float, index: str = "mixed") -> int:
    """Bytes between what the longest sample needs with everything recomputed (0) and with nothing (1)."""
    solver = Solver(predictor(index), limits_of(AMPLE))
    data = profile({"mixed": MIXED, "alike": ALIKE}[index])
    longest = Packed(qv=data.most_vision_units, qt=data.longest_text_tokens, qv_min=0, qt_min=0, packer="best-fit")
    least, most = (solver.fullest(solver.leanest(longest, FOUR, recompute=recompute))[0] for recompute in (True, False))
    return round((least + share * (most - least)) / 0.97)


@cache
def searched(memory: int, index: str = "mixed", devices: int = 4, **wanted: Any) -> tuple[Space, tuple[str, ...]]:
    said: list[str] = []
    data = {"mixed": MIXED, "alike": ALIKE}[index]
    solver = Solver(predictor(index), limits_of(memory))
    asked = SpaceSection(**{"layouts": LAYOUTS, **wanted})
    space = feasible_space(workload(data, memory, devices), solver, remedy="", wanted=asked, show=said.append)
    return space, tuple(said)


TIGHT = between(0.3)
SHORT_OF_ALL = between(-0.05)
"""The longest sample does not fit on one rank, whatever is recomputed."""


def degrees_of(space: Space) -> set[tuple[int, ...]]:
    return {plan.packing.degrees for plan in space.starts}


# --- what is offered ---


def test_where_the_longest_sample_fits_and_no_rank_waits_the_space_is_that_of_single_ranks() -> None:
    space, said = searched(AMPLE, "alike")
    assert not space.has_ladders
    assert {"sequence", "level_1_qv", "level_1_qt"}.isdisjoint(space.distributions)
    assert degrees_of(space) == {(1,)}
    assert len(said) == 1
    assert "cannot help and are not searched: the longest sample is no longer than a usual pack or fits" in said[0]


def test_a_sample_no_longer_than_a_usual_pack_asks_for_no_levels() -> None:
    assert not searched(between(0.3, "alike"), "alike")[0].has_ladders


def test_levels_are_offered_where_the_longest_sample_only_fits_with_recomputation() -> None:
    space, said = searched(between(0.2))
    assert {(1,), (2,), (1, 1), (1, 2)} <= degrees_of(space)
    assert "are searched with p1-d4-z0" in said[0]
    sequence = space.distributions["sequence"]
    assert isinstance(sequence, CategoricalDistribution)
    assert sequence.choices[0] == "1"


def test_a_first_level_may_have_what_each_rank_has_of_the_longest_sample() -> None:
    """HBP's l_max / s_max: then all ranks keep equally much."""
    firsts = searched(TIGHT)[0].distributions["level_1_qt"]
    assert isinstance(firsts, CategoricalDistribution)
    longest = profile(MIXED).longest_text_tokens
    assert {longest // 2, longest // 4} <= {*firsts.choices}


def test_a_first_level_may_have_the_most_tokens_with_which_a_rank_recomputes_nothing() -> None:
    """Longer packs of a level recompute, and shorter ones leave more samples to the ranks that share packs."""
    memory, ratio = between(0.2), MIXED.vision_units.sum() / MIXED.text_tokens.sum()

    def fits(tokens: float) -> bool:
        alike = index_of([(round(ratio * tokens), round(tokens))] * BATCH)
        solver = Solver(predictor_of(COSTS, alike, BATCH), limits_of(memory))
        return solver.fullest(solver.leanest(Padded(samples=1), FOUR, recompute=False))[0] <= HEADROOM * memory

    firsts = searched(memory, layouts=("p1-d4-z0",))[0].distributions["level_1_qt"]
    assert isinstance(firsts, CategoricalDistribution)
    most = max(qt for qt in firsts.choices if isinstance(qt, int) and fits(qt))
    # The share of a pack from which this follows has more targets than its share of the tokens.
    assert not fits(1.1 * most)


def test_where_the_longest_sample_fits_on_no_single_rank_only_shared_packs_hold_it() -> None:
    wanted = ("p1-d4-z0",)
    space, _ = searched(SHORT_OF_ALL, layouts=wanted)
    assert space.starts
    assert all(plan.packing.degrees[-1] > 1 for plan in space.starts)


def test_the_degrees_are_powers_of_two_that_were_timed_and_divide_the_data_ranks() -> None:
    found = degrees_of(searched(SHORT_OF_ALL)[0])
    assert {degree for degrees in found for degree in degrees} <= {1, 2, 4}
    for plan in searched(SHORT_OF_ALL)[0].starts:
        assert all(plan.layout.data % degree == 0 for degree in plan.packing.degrees)
    alone = predictor_of(without(COSTS, "sequence"), MIXED, BATCH)
    space = feasible_space(
        workload(MIXED, TIGHT, 4), Solver(alone, limits_of(TIGHT)), remedy="", wanted=SpaceSection(layouts=LAYOUTS)
    )
    assert degrees_of(space) == {(1,), (1, 1)}


def test_a_job_names_the_ladders_that_it_wants() -> None:
    assert degrees_of(searched(AMPLE, sequence=("1-2",))[0]) == {(1,), (1, 2)}
    assert not searched(TIGHT, sequence=("1",))[0].has_ladders
    with pytest.raises(JobError, match=r"search.space.sequence: '1-3' is none of .*: 1, 1-1, 1-2, 1-2-4, 1-4, 2, 4"):
        searched(AMPLE, sequence=("1-2", "1-3"))


def test_a_plan_is_allowed_by_the_degrees_of_its_levels() -> None:
    start = next(plan for plan in searched(TIGHT)[0].starts if plan.packing.degrees == (1, 2))
    assert isinstance(start.packing, Levelled)
    assert any(level.vision + level.language for stage in start.stages for level in stage.further_levels)
    last = start.packing.levels[-1]
    for wanted, is_allowed in (
        ({"sequence": ("1-2",)}, True),
        ({"sequence": ("1", "2")}, False),
        ({"qt": (last.qt,), "packers": (last.packer,), "qv_slack": (last.qv - last.qv_min,)}, True),
        ({"qt": (last.qt + 1,)}, False),
        ({"recompute": "fit"}, True),
        ({"recompute": "none"}, False),
    ):
        assert allows(SpaceSection.model_validate(wanted), start) is is_allowed


# --- points and plans ---

SPACES = st.sampled_from([(TIGHT, ()), (SHORT_OF_ALL, ()), (TIGHT, (("recompute", "all"),))])


@given(st.data(), SPACES)
@settings(max_examples=examples(60))
def test_every_point_is_a_plan_with_a_point_of_its_own(drawn: st.DataObject, which: tuple[int, Any]) -> None:
    space, _ = searched(which[0], **dict(which[1]))
    plan = space.plan(drawn.draw(points(space.near) | points(space.distributions)))
    check_layers(plan, vision_layers=VISION_LAYERS, language_layers=LANGUAGE_LAYERS, dtype="float32")
    assert Solver(predictor("mixed"), limits_of(which[0])).admits(plan)
    if isinstance(plan.packing, Levelled):
        check_levels(MIXED, plan.packing, skips=False)
    found = space.point(plan)
    assert found is not None
    assert found.keys() == space.distributions.keys()
    assert space.plan(found) == plan


@pytest.mark.parametrize("memory", parameters({"tight": TIGHT, "short of all": SHORT_OF_ALL}, short=()))
def test_starts_and_neighbours_have_points_and_can_be_trained(memory: int) -> None:
    space, _ = searched(memory)
    solver = Solver(predictor("mixed"), limits_of(memory))
    seen = set[tuple[int, ...]]()
    for plan in space.starts:
        if plan.packing.degrees in seen:
            continue
        seen.add(plan.packing.degrees)
        near = [*space.neighbours(plan)]
        assert len({plan, *near}) == len(near) + 1
        for each in (plan, *near):
            assert solver.admits(each)
            if isinstance(each.packing, Levelled):
                check_levels(MIXED, each.packing, skips=False)
            point = space.point(each)
            assert point is not None
            assert space.plan(point) == each


def test_neighbours_of_levels_have_other_capacities_of_each_level_and_other_degrees() -> None:
    space, _ = searched(TIGHT)
    start = next(plan for plan in space.starts if plan.packing.degrees == (1, 2))
    near = {plan.packing for plan in space.neighbours(start)}
    assert isinstance(start.packing, Levelled)
    others = [packing for packing in near if isinstance(packing, Levelled)]
    firsts, lasts = ({(packing.levels[place].qv, packing.levels[place].qt) for packing in others} for place in (0, -1))
    assert len(firsts) > 1
    assert len(lasts) > 1
    assert {packing.degrees for packing in others} > {(1, 2)}


def test_a_level_between_two_gives_its_ranks_as_much_as_the_first() -> None:
    space, _ = searched(SHORT_OF_ALL)
    plan = next(plan for plan in space.starts if plan.packing.degrees == (1, 2, 4))
    assert isinstance(plan.packing, Levelled)
    first, between, last = plan.packing.levels
    assert between.qt == 2 * first.qt < last.qt
    assert last.qt >= MIXED.text_tokens.max()


def test_points_of_single_ranks_keep_their_meaning_beside_ladders() -> None:
    """A study of an earlier version goes on: its points have no parameters of levels."""
    space, _ = searched(TIGHT)
    alone, _ = searched(TIGHT, sequence=("1",))
    assert alone.distributions.items() <= space.distributions.items()
    for plan in alone.starts:
        point = alone.point(plan)
        assert point is not None
        assert space.plan(point) == plan
        assert {**point, "sequence": "1"}.items() <= (space.point(plan) or {}).items()


def test_a_plan_that_recomputes_what_no_shift_gives_recomputes_more() -> None:
    space, _ = searched(TIGHT)
    start: Plan = next(plan for plan in space.starts if plan.packing.degrees == (1, 1))
    stage = start.stages[0]
    assert space.pointed(start) == start
    odd = [
        replace(level, language=(level.language + place) % (LANGUAGE_LAYERS + 1))
        for place, level in enumerate(stage.recomputed)
    ]
    moved = space.pointed(replace(start, stages=(stage.recomputing(odd), *start.stages[1:])))
    for asked, level in zip(odd, moved.stages[0].recomputed, strict=True):
        assert level.language >= asked.language
    assert space.point(moved) is not None


def test_the_batch_is_kept_by_every_start() -> None:
    for plan in searched(TIGHT)[0].starts:
        assert predictor("mixed").predict(plan).batch_deviation <= 0.1
        assert predictor("mixed").sizes(plan.packing, plan.layout).epoch.settings.global_batch_samples == BATCH


def test_no_ladder_is_faster_than_the_bound_of_the_usual_packs_and_without_them_there_is_none() -> None:
    memory = between(0.5)
    space, _ = searched(memory)
    solver = Solver(predictor("mixed"), limits_of(memory))
    ladders = [origin for origin in space.origins if origin.usual]
    assert ladders
    for origin in ladders:
        bound = origin.bound(solver.least_seconds)
        assert bound == min(solver.least_seconds(packing, origin.layout) for packing in origin.usual)
        assert all(seconds >= bound for seconds in solver.epoch_seconds(space.solved(origin)))
    # Where no usual packs keep the global batch there is no bound.
    assert ladders[0].bound(lambda *_: math.inf) == 0.0
