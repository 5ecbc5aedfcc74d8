"""Spaces of the plans that a trainer can hold."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from autotune.dimensions.folds import layout_name
from autotune.errors import NoFeasiblePlan
from autotune.exporting.trainers import EXPORTS
from autotune.search.space.feasible import feasible_space
from autotune.search.space.held import Holding
from autotune.search.space.space import Space
from tests.values.parameters import examples, parameters
from tests.values.search import MEBI, epoch_of, predictor_of, solver_of, target_of, workload_of
from trials import plugins
from trials.job import SpaceSection
from trials.plan import Layout, Levelled, Packed, Padded, Plan
from trials.stage import Recomputed, Stage
from trials.workload import Workload

PREDICTOR = predictor_of()
WORKLOAD = workload_of()
TRAINERS = plugins.names(EXPORTS)


def holding(trainer: str, workload: Workload = WORKLOAD) -> Holding:
    return Holding(target_of(trainer), workload, epoch_of())


def space_for(trainer: str, workload: Workload = WORKLOAD, **wanted: Any) -> Space:
    solver = solver_of(workload.memory_limit_bytes, PREDICTOR)
    held = holding(trainer, workload)
    return feasible_space(workload, solver, remedy="raise it", wanted=SpaceSection(**wanted), held=held)


@cache
def space_of(trainer: str) -> Space:
    return space_for(trainer)


@cache
def held_by(trainer: str) -> Holding:
    return holding(trainer)


def recomputed(plan: Plan) -> tuple[int, int]:
    (stage,) = plan.stages
    return stage.recompute_vision, stage.recompute_language


@pytest.mark.parametrize("trainer", parameters({name: name for name in TRAINERS}, short=("ms-swift",)))
def test_the_trainer_can_hold_every_start_and_neighbour_and_each_is_a_point(trainer: str) -> None:
    space, held = space_of(trainer), held_by(trainer)
    assert space.starts
    for start in space.starts[:3]:
        for plan in (start, *space.neighbours(start)):
            assert held.missing(plan) == ()
            assert space.allows(plan)
            point = space.point(plan)
            assert point is not None
            assert space.plan(point) == plan


def points(distributions: dict[str, BaseDistribution]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({name: values(distribution) for name, distribution in distributions.items()})


def values(distribution: BaseDistribution) -> st.SearchStrategy[Any]:
    if isinstance(distribution, CategoricalDistribution):
        return st.sampled_from(distribution.choices)
    assert isinstance(distribution, IntDistribution)
    return st.integers(distribution.low, distribution.high)


@given(st.sampled_from(TRAINERS).flatmap(lambda name: st.tuples(st.just(name), points(space_of(name).near))))
@settings(max_examples=examples(40))
def test_the_trainer_can_hold_the_plan_of_every_point(drawn: tuple[str, dict[str, Any]]) -> None:
    trainer, point = drawn
    plan = space_of(trainer).plan(point)
    assert held_by(trainer).holds(plan)
    assert space_of(trainer).point(plan) is not None


def test_packs_and_padded_micro_batches_are_searched_as_far_as_the_trainer_has_them() -> None:
    kinds = {name: {type(plan.packing) for plan in space_of(name).starts} for name in TRAINERS}
    assert kinds["llama-factory"] == {Padded}
    assert kinds["qwen-vl"] == kinds["internvl"] == kinds["ms-swift"] == {Packed, Padded}
    assert not {"packer", "qv", "qt"} & space_of("llama-factory").distributions.keys()


def test_towers_are_recomputed_as_the_switches_of_the_trainer_allow() -> None:
    """Where nothing has to be recomputed the fastest plans recompute nothing, if there is a switch for that."""
    found = {trainer: set(map(recomputed, space_of(trainer).starts)) for trainer in TRAINERS}
    assert found["ms-swift"] == found["llama-factory"] == {(0, 0)}
    assert found["internvl"] == {(5, 0)}
    around = {recomputed(plan) for plan in space_of("llama-factory").neighbours(space_of("llama-factory").starts[0])}
    assert (5, 4) in around
    assert around <= {(0, 0), (5, 4)}
    apart = {recomputed(plan) for plan in space_of("ms-swift").neighbours(space_of("ms-swift").starts[0])}
    assert apart >= {(5, 0), (0, 4), (5, 4)}


def test_where_the_memory_requires_it_whole_towers_are_recomputed() -> None:
    space = space_for("ms-swift", workload_of(45 * MEBI))
    assert {recomputed(plan) for plan in space.starts} & {(5, 0), (0, 4), (5, 4)}
    assert all(map(holding("ms-swift").holds, space.starts))


def test_packs_that_ms_swift_rebuilds_stay_long_enough_for_the_longest_sample() -> None:
    workload = replace(WORKLOAD, oversize="skip")
    packs = [plan.packing for plan in space_for("ms-swift", workload).starts if isinstance(plan.packing, Packed)]
    assert packs
    assert min(each.qt for each in packs) >= workload.data.longest_text_tokens


def test_a_job_narrows_the_plans_of_a_trainer_further() -> None:
    space = space_for("qwen-vl", layouts=("p1-d2-z1",), recompute="all", packers=("isf",))
    assert {(layout_name(plan.layout), recomputed(plan)) for plan in space.starts} == {("p1-d2-z1", (5, 4))}
    assert {type(plan.packing) for plan in space.starts} == {Packed}
    with pytest.raises(NoFeasiblePlan, match="that LLaMA-Factory can hold"):
        space_for("llama-factory", qv=(9,))


@pytest.mark.parametrize(
    ("trainer", "limit", "wanted"),
    [
        ("ms-swift", 1 << 20, {"layouts": ("p2-d1-z0",)}),
        ("internvl", 1 << 20, {"recompute": "none"}),
        ("llama-factory", 3, {}),
    ],
)
def test_limits_within_which_nothing_fits_are_refused(trainer: str, limit: int, wanted: dict[str, Any]) -> None:
    title = target_of(trainer).title
    with pytest.raises(NoFeasiblePlan, match=f"^no plan of the search space that {title} can hold fits {limit} MiB"):
        space_for(trainer, workload_of(limit * MEBI), **wanted)


def test_what_several_levels_lack_is_said_once() -> None:
    short = Packed(qv=9, qt=480, qv_min=9, qt_min=416, packer="isf")
    stage = Stage(vision=5, language=4, recompute_language=1, further_levels=(Recomputed(vision=0, language=1),))
    plan = Plan(
        packing=Levelled(levels=(short, replace(short, qt=960))),
        layout=Layout(pipeline=1, data=2, zero=0),
        stages=(stage,),
    )
    assert held_by("ms-swift").missing(plan) == ("packs of 2 levels", "1 of 4 language layers recomputed")
