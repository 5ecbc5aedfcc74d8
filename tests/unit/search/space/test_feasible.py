"""The part of the requested space that can be searched, and messages about the rest."""

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution

from autotune.dimensions.folds import layout_name
from autotune.errors import JobError, NoFeasiblePlan
from autotune.search.space.capacities import capacities
from autotune.search.space.feasible import allows, feasible_space
from autotune.search.space.space import Space
from tests.values.search import BATCH, MEBI, axes_of, predictor_of, solver_of, workload_of
from trials.job import SpaceSection
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage
from trials.workload import Workload

PREDICTOR = predictor_of()
TWO_STAGES = Layout(pipeline=2, data=1, zero=0)
REMEDY = "raise hardware.memory_limit"


def space_of(workload: Workload, **wanted: Any) -> Space:
    solver = solver_of(workload.memory_limit_bytes, PREDICTOR)
    return feasible_space(workload, solver, remedy=REMEDY, wanted=SpaceSection(**wanted))


def pairs(space: Space) -> set[tuple[int, int]]:
    return {(p.packing.qv, p.packing.qt) for p in space.starts if isinstance(p.packing, Packed)}


def test_without_a_space_in_the_job_everything_that_the_devices_and_the_data_offer_is_searched() -> None:
    workload = workload_of(devices=2)
    space = space_of(workload)
    assert {layout_name(plan.layout) for plan in space.starts} == {"p1-d2-z0", "p1-d2-z1", "p2-d1-z0"}
    found = capacities(workload.data, BATCH, hold_all=False)
    assert pairs(space) <= {(pair.qv, pair.qt) for pair in found}
    assert len(pairs(space)) > 5


def test_a_given_capacity_goes_with_each_of_the_other() -> None:
    assert pairs(space_of(workload_of(), qv=(9,), qt=(320, 480))) == {(9, 320), (9, 480)}
    of_units = pairs(space_of(workload_of(), qv=(9,), layouts=("p2-d1-z0",)))
    assert {qv for qv, _ in of_units} == {9}
    assert len(of_units) > 2


def test_where_no_sample_has_a_unit_packs_are_full_by_their_tokens_alone() -> None:
    workload = workload_of()
    shown = replace(
        workload.data,
        vision_units=0,
        most_vision_units=0,
        histogram=tuple((0, tokens, samples) for _, tokens, samples in workload.data.histogram),
    )
    space = space_of(replace(workload, data=shown))
    assert {plan.packing.qv_min for plan in space.starts if isinstance(plan.packing, Packed)} == {1}
    assert space.distributions["qv_slack"] == CategoricalDistribution((0,))


def test_a_layout_that_cannot_be_is_refused_with_those_that_can() -> None:
    with pytest.raises(JobError, match=r"'p3-d1-z0' is not a layout of .* float32: p1-d2-z0, p1-d2-z1, p2-d1-z0"):
        space_of(workload_of(), layouts=("p3-d1-z0",))


def test_a_split_has_as_many_layers_as_the_model() -> None:
    with pytest.raises(JobError, match="the stages hold 8 layers but the model has 9"):
        space_of(workload_of(), split=(4, 4))


def test_a_split_has_as_many_stages_as_some_layout() -> None:
    with pytest.raises(JobError, match="it has 3 stages, but no layout has: p1-d2-z0, p1-d2-z1, p2-d1-z0"):
        space_of(workload_of(), split=(3, 3, 3))


def test_a_split_chooses_the_layouts_with_its_number_of_stages() -> None:
    assert {plan.layout.pipeline for plan in space_of(workload_of(), split=(5, 4)).starts} == {2}


@pytest.mark.parametrize(
    "wanted",
    [
        {"qt_slack": (1000,), "qv_slack": (100, 0)},
        pytest.param({"qv": (1,), "qv_slack": (2,)}, marks=pytest.mark.long),
        pytest.param({"qv": (9, 12), "packers": ("isf",), "qt_slack": (0, 32)}, marks=pytest.mark.long),
        pytest.param({"layouts": ("p2-d1-z0",), "recompute": "none"}, marks=pytest.mark.long),
        pytest.param({"split": (4, 5), "recompute": "all"}, marks=pytest.mark.long),
        {"split": (4, 5), "recompute": ((1, 0), (0, 2))},
    ],
)
def test_every_plan_of_a_space_may_win(wanted: dict[str, Any]) -> None:
    space = space_of(workload_of(), **wanted)
    for start in space.starts[:3]:
        assert all(map(space.allows, (start, *space.neighbours(start))))


@pytest.mark.parametrize(
    ("wanted", "is_allowed"),
    [
        ({}, True),
        ({"packers": None}, True),
        ({name: getattr(SpaceSection(), name) for name in ("qv_slack", "qt_slack")}, True),
        ({"layouts": ("p2-d1-z0",), "qv": (9, 12), "qt": (480,), "qv_slack": (0,), "packers": ("isf",)}, True),
        ({"layouts": ("p1-d2-z0",)}, False),
        ({"packers": ("best-fit",)}, False),
        ({"qv": (12,)}, False),
        ({"qt_slack": (0,)}, False),
        ({"split": (5, 4)}, True),
        ({"split": (4, 5)}, False),
        ({"recompute": "none"}, False),
        ({"recompute": "all"}, False),
        ({"split": (5, 4), "recompute": ((2, 0), (0, 1))}, True),
        ({"split": (5, 4), "recompute": ((2, 0), (0, 0))}, False),
    ],
)
def test_a_plan_may_win_that_has_what_the_space_asks_for(wanted: dict[str, Any], is_allowed: bool) -> None:
    plan = Plan(
        packing=Packed(qv=9, qt=480, qv_min=9, qt_min=416, packer="isf"),
        layout=TWO_STAGES,
        stages=(Stage(vision=5, language=0, recompute_vision=2), Stage(vision=0, language=4, recompute_language=1)),
    )
    space = Space(axes_of(), solver_of(1 << 50, PREDICTOR), partial(allows, SpaceSection(**wanted)))
    assert space.allows(plan) == is_allowed
    padded = replace(plan, packing=Padded(samples=4))
    assert space.allows(padded) == (is_allowed and not wanted.keys() & {"qv", "qt"})


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({}, "counts for 2 stages but split has 0"),
        ({"split": (3, 3, 3)}, "counts for 2 stages but split has 3"),
        ({"split": (6, 3)}, "stage 1 recomputes 0 vision and 4 language layers but holds 0 and 3"),
    ],
)
def test_counts_of_recomputed_layers_are_those_of_a_given_split(wanted: dict[str, Any], reason: str) -> None:
    with pytest.raises(JobError, match=reason):
        space_of(workload_of(), recompute=((0, 0), (0, 4)), **wanted)


def test_an_unknown_packer_is_refused_with_those_that_exist() -> None:
    with pytest.raises(JobError, match=r"search.space.packers: 'tetris' .*best-fit"):
        space_of(workload_of(), packers=("isf", "tetris"))


def test_capacities_hold_the_longest_sample_where_it_would_be_lost() -> None:
    workload = replace(workload_of(), oversize="skip")
    longest = (workload.data.most_vision_units, workload.data.longest_text_tokens)
    with pytest.raises(JobError, match=f"of {longest[0]} vision units and {longest[1]} text tokens; raise qv and qt"):
        space_of(workload, qv=(longest[0] - 1,), qt=(longest[1] - 1,))
    space = space_of(workload, qv=(longest[0] - 1, 9), qt=(480,))
    assert pairs(space) == {(9, 480)}


def test_where_nothing_fits_the_least_limit_that_does_is_named() -> None:
    def needed(limit: int) -> int:
        with pytest.raises(NoFeasiblePlan) as found:
            space_of(workload_of(limit * MEBI))
        told = re.search(rf"needs about (\d+) MiB on stage \d, (\d+) MiB more .*; {REMEDY}", str(found.value))
        assert told, found.value
        assert int(told[2]) == int(told[1]) - limit
        return int(told[1])

    least = needed(3)
    assert needed(least - 1) == least
    assert space_of(workload_of(least * MEBI)).starts


def test_where_nothing_fits_the_fewest_devices_on_which_a_plan_fits_are_named() -> None:
    with pytest.raises(NoFeasiblePlan, match=r", or give (4|8) devices, or widen search\.space$"):
        space_of(workload_of(9 * MEBI))


def test_layouts_that_cannot_fit_are_left_out() -> None:
    plain, split = (
        solver_of(1, PREDICTOR).least_bytes(Padded(samples=1), layout)
        for layout in (Layout(pipeline=1, data=2, zero=0), Layout(pipeline=2, data=1, zero=0))
    )
    assert split < plain
    space = space_of(workload_of(round((plain + split) / 2)))
    assert {plan.layout.pipeline for plan in space.starts} == {2}


def test_where_no_pack_keeps_the_batch_the_space_is_described() -> None:
    with pytest.raises(
        NoFeasiblePlan,
        match=r"keeps the global batch of 16 samples within 10 % \(training.batch_tolerance\): .* search.space.qv",
    ):
        space_of(workload_of(), qv=(40,), qt=(20_000,))


@pytest.mark.parametrize(
    "wanted",
    [
        {"recompute": "none"},
        pytest.param({"split": (5, 4), "recompute": ((0, 0), (0, 0))}, marks=pytest.mark.long),
        {"split": (1, 8)},
        pytest.param({}, marks=pytest.mark.long),
    ],
)
def test_where_the_space_keeps_what_would_fit_out_the_leanest_is_named_and_what_it_lacks_is_true(
    wanted: dict[str, Any],
) -> None:
    layouts = ("p2-d1-z0",)
    workload = workload_of(round(1.04 * solver_of(1, PREDICTOR).least_bytes(Padded(samples=1), TWO_STAGES)))
    with pytest.raises(NoFeasiblePlan, match=r"on stage \d, \d+ MiB more than available") as found:
        space_of(workload, layouts=layouts, qv=(12,), qt=(480,), **wanted)
    missing = re.search(r"(\d+) MiB more than available", str(found.value))
    assert missing
    enough = replace(workload, memory_limit_bytes=workload.memory_limit_bytes + (int(missing[1]) + 1) * MEBI)
    assert space_of(enough, layouts=layouts, qv=(12,), qt=(480,), **wanted).starts
