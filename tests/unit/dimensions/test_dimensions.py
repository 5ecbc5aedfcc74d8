"""What holds for every dimension of layouts."""

import re
from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from autotune.dimensions.dimension import Dimension
from autotune.dimensions.folds import (
    DIMENSIONS,
    exchanges,
    layout_coordinates,
    layout_name,
    layout_text,
    named_layout,
    unprofiled,
)
from autotune.dimensions.usual import layouts
from autotune.search.solver.solver import Solver
from tests.values.golden_predictions import WORKLOADS
from tests.values.search import COSTS, limits_of, workload_of
from tests.values.training import PACKED
from trials.costs.exchange import ExchangeName
from trials.plan import Layout, Plan
from trials.stage import Stage

PLAIN = Layout(pipeline=1, data=8, zero=1)
OTHER: dict[str, Layout] = {
    "pipeline": Layout(pipeline=2, data=4, zero=1),
    "data": Layout(pipeline=2, data=4, zero=1),
    "zero": Layout(pipeline=1, data=8, zero=3),
    "tensor": Layout(pipeline=1, data=4, tensor=2, zero=1),
    "reduce_within": replace(PLAIN, reduce_within=4),
    "offload": replace(PLAIN, offload="both"),
    "bucket_bytes": replace(PLAIN, bucket_bytes=1 << 20),
    "zero_bubble": Layout(pipeline=2, data=4, zero=1, zero_bubble=True),
}
"""A layout with another value than PLAIN, by field."""
GOLDEN = WORKLOADS["whole, 8 devices on 2 nodes"]
every_dimension = pytest.mark.parametrize("dimension", DIMENSIONS, ids=lambda each: type(each).__name__)
every_field = pytest.mark.parametrize("field", [each.name for each in fields(Layout)])


@every_field
def test_layouts_that_differ_in_a_field_differ_in_their_text(field: str) -> None:
    assert getattr(OTHER[field], field) != getattr(PLAIN, field)
    assert layout_text(OTHER[field]) != layout_text(PLAIN)


@every_field
def test_a_layout_is_found_by_its_name(field: str) -> None:
    layout, workload = OTHER[field], GOLDEN.workload
    usual = {layout_name(each): each for each in layouts(workload.model, 8)}
    found = named_layout(layout_name(layout), workload) or usual[layout_name(layout)]
    assert found == replace(layout, bucket_bytes=0), "averages during a backward pass follow from the profile"


@every_dimension
def test_the_pattern_of_a_name_matches_the_code_and_gives_the_value_back(dimension: Dimension) -> None:
    for layout in OTHER.values():
        found = re.fullmatch(dimension.pattern, dimension.code(layout))
        assert found is not None
        values: dict[str, Any] = {name: code for name, code in found.groupdict().items() if code is not None}
        assert {name: dimension.value(code) for name, code in values.items()} == {
            name: getattr(layout, name) for name in values
        }


@every_dimension
def test_all_layouts_have_as_many_coordinates(dimension: Dimension) -> None:
    assert len({len(dimension.coordinates(layout)) for layout in (PLAIN, *OTHER.values())}) == 1


@pytest.mark.parametrize("field", [each for each in OTHER if each not in ("data", "bucket_bytes")])
def test_layouts_that_differ_in_a_field_lie_apart(field: str) -> None:
    pairs = zip(layout_coordinates(PLAIN), layout_coordinates(OTHER[field]), strict=True)
    assert sum(abs(one - other) for one, other in pairs) >= 0.5


@every_dimension
def test_what_may_be_searched_in_addition_is_possible_and_none_of_the_usual(dimension: Dimension) -> None:
    workload, solver = GOLDEN.workload, Solver(GOLDEN.predictor, limits_of(GOLDEN.memory))
    further = dimension.further(workload, solver)
    if further is None:
        return
    assert further.possible
    usual = layouts(workload.model, 8)
    for layout in further.possible:
        assert named_layout(layout_name(layout), workload) == replace(layout, bucket_bytes=0)
        assert solver.unprofiled(layout) is None
        assert layout not in usual


@pytest.mark.parametrize("field", ["zero", "tensor", "reduce_within", "offload"])
def test_what_a_profile_has_not_timed_is_named(field: str) -> None:
    assert unprofiled(GOLDEN.predictor.costs, OTHER[field]) is None
    assert unprofiled(COSTS, replace(PLAIN, data=1)) is None
    bare = replace(COSTS, updates=(*COSTS.updates, replace(COSTS.updates[0], data_parallel=8)))
    assert unprofiled(bare, OTHER[field])


def test_a_named_layout_has_no_degree_of_1() -> None:
    with pytest.raises(Exception, match="so that the name is p1-d8-z1"):
        named_layout("p1-d8-t1-z1", workload_of(devices=8))


def plan_with(layout: Layout) -> Plan:
    """Return a plan that recomputes all layers, or offloads them."""
    whole = Stage(vision=5, language=4, recompute_vision=5, recompute_language=4)
    halves = (replace(whole, language=0, recompute_language=0), replace(whole, vision=0, recompute_vision=0))
    return Plan(packing=PACKED, layout=layout, stages=(whole,) if layout.pipeline == 1 else halves)


@pytest.mark.parametrize("name", [each for each in get_args(ExchangeName) if each != "replicas"])
def test_an_exchange_of_a_layout_makes_its_steps_longer_and_no_others(name: ExchangeName) -> None:
    costs = GOLDEN.predictor.costs
    slow = tuple(each.times(1e3) if each.name == name else each for each in costs.exchanges)
    slower = GOLDEN.predictor.with_costs(replace(costs, exchanges=slow))
    for layout in (PLAIN, *OTHER.values()):
        plan = plan_with(layout)
        before, after = (predictor.epoch_seconds(plan) for predictor in (GOLDEN.predictor, slower))
        has = {each.name for each in exchanges(costs, layout)} | ({"copy"} if layout.offload != "none" else set())
        assert (after > before) == (name in has)


def test_an_exchange_that_replaces_another_stands_in_its_place() -> None:
    costs = GOLDEN.predictor.costs
    assert [each.name for each in exchanges(costs, PLAIN)] == ["average"]
    assert {each.name for each in exchanges(costs, OTHER["zero"])} == {"gather", "scatter"}
    (at_once,), (of_nodes,) = (exchanges(costs, layout) for layout in (PLAIN, OTHER["reduce_within"]))
    assert at_once.seconds_per_byte != of_nodes.seconds_per_byte
