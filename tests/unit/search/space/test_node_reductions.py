"""Averages of gradients on each node first, in a search: where they are offered, what is said, and what they cost."""

from dataclasses import replace
from typing import Any

import pytest

from autotune.dimensions.averages import average_seconds, knows_average
from autotune.dimensions.folds import layout_name, named_layout
from autotune.errors import JobError, ProfileError
from autotune.prediction.costs_table import TypicalPack, costs_text
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.parts import Parts
from autotune.search.learning.warm_start import moved
from autotune.search.solver.solver import Solver
from autotune.search.space.feasible import check_space, feasible_space
from autotune.search.space.space import Space
from tests.unit.search.space.test_tensor_layouts import cut_costs
from tests.values.exchanges import averages, exchanging
from tests.values.parameters import parameters
from tests.values.reports import reports_of
from tests.values.search import COSTS, limits_of, predictor_of, workload_of
from tests.values.training import plan_of
from trials import wire
from trials.costs.layer_costs import CommunicationCost, LayerCosts, LinkCost
from trials.job import SpaceSection
from trials.model.cut import cut
from trials.plan import Layout, Packed
from trials.workload import Workload

AMPLE = 1 << 50
PACKED = Packed(qv=9, qt=480, qv_min=9, qt_min=416)
AT_ONCE, FASTER = 1e-9, 6e-10
GROUPED = Layout(pipeline=1, data=4, zero=1, reduce_within=2)
BY_NODES = {"p1-d4-z0-w2", "p1-d4-z1-w2"}
PARAMETERS = 12 * 50_000
"""Of five vision and four language layers, and one of each other kind."""


def timed(by_nodes: float = FASTER, within: int = 2) -> LayerCosts:
    """Costs of four ranks, two on each of two nodes."""
    link = LinkCost(latency_seconds=1.0, seconds_per_byte=0.0)
    links = tuple(CommunicationCost(pipeline=4 // data, data=data, link=link) for data in (4, 2, 1))
    of_nodes = [averages(by_nodes, 4, within=within)] if within > 1 else []
    return exchanging(
        replace(COSTS, of_node=2, communications=links),
        averages(AT_ONCE, 4),
        *of_nodes,
        averages(0.0, 2, pipeline=2),
    )


def on_nodes(nodes: int = 2) -> Workload:
    work = workload_of(AMPLE, 4)
    return replace(work, hardware=replace(work.hardware, nodes=nodes))


def searched(costs: LayerCosts, nodes: int = 2, **wanted: Any) -> tuple[set[str], list[str]]:
    said: list[str] = []
    solver = Solver(predictor_of(costs), limits_of(AMPLE))
    asked = SpaceSection(**wanted)
    space: Space = feasible_space(on_nodes(nodes), solver, remedy="", wanted=asked, show=said.append)
    names = {layout_name(plan.layout) for plan in space.starts}
    for plan in space.starts:
        point = space.point(plan)
        assert point is not None
        assert space.plan(point) == plan
    return names, [each for each in said if "verages" in each]


# --- what is offered ---


def test_they_are_searched_where_nodes_have_several_data_ranks_and_the_profile_found_them_faster() -> None:
    names, (reason,) = searched(timed())
    assert names & BY_NODES
    assert reason.startswith("Averages of gradients on each node first are searched with p1-d4-z")


def test_they_are_left_out_with_the_reason_where_they_took_longer() -> None:
    names, (reason,) = searched(timed(by_nodes=1.1 * AT_ONCE))
    assert not names & BY_NODES
    assert reason == (
        "Averages of gradients over all ranks at once are best and the only ones that are searched: averages on each "
        "node first took longer in the profile"
    )


@pytest.mark.parametrize(
    ("nodes", "within"),
    parameters({"one node": (1, 2), "one rank on each": (4, 2), "not timed": (2, 1)}, short=("one rank on each",)),
)
def test_nothing_is_said_where_nodes_have_no_such_ranks_or_the_profile_has_not_timed_them(
    nodes: int, within: int
) -> None:
    names, said = searched(timed(within=within), nodes)
    assert not names & BY_NODES
    assert not said


def test_averages_over_data_ranks_that_tensor_ranks_spread_over_nodes_are_said_to_be_computed() -> None:
    costs = exchanging(replace(cut_costs(1e-6), of_node=2, communications=timed().communications), *timed().exchanges)
    said: list[str] = []
    wanted = SpaceSection(layouts=("p1-d2-t2-z1", "p2-d1-t2-z0", "p1-d4-z1"))
    feasible_space(
        on_nodes(), Solver(predictor_of(costs), limits_of(AMPLE)), remedy="", wanted=wanted, show=said.append
    )
    assert [each for each in said if "verages" in each] == [
        "Averages of gradients with p1-d2-t2-z1 pass between nodes as none in the profile do: their time is computed "
        "from that of all ranks"
    ]


# --- names ---


def test_a_layout_may_be_named() -> None:
    assert layout_name(GROUPED) == "p1-d4-z1-w2"
    assert named_layout("p1-d4-z1-w2", on_nodes()) == GROUPED
    assert searched(timed(), layouts=("p1-d4-z1-w2",))[0] == {"p1-d4-z1-w2"}


@pytest.mark.parametrize(
    ("name", "nodes", "message"),
    [
        ("p1-d4-z1-w2", 1, "no stage has several data ranks on each of several nodes; leave -w2 out"),
        ("p1-d4-z1-w2", 4, "no stage has several data ranks on each of several nodes; leave -w2 out"),
        ("p1-d4-z1-w1", 2, "a degree of 1 is left out, so that the name is p1-d4-z1"),
        ("p1-d4-z1-w3", 2, "reduce_within 3 does not divide 4 data ranks into several groups; use 1 or 2"),
        ("p1-d4-z3-w2", 2, "ZeRO 3 averages gradients over all data ranks at once"),
    ],
)
def test_a_name_that_these_nodes_cannot_have_is_refused_with_the_remedy(name: str, nodes: int, message: str) -> None:
    with pytest.raises(JobError, match=rf"'{name}' cannot be searched: {message}"):
        check_space(on_nodes(nodes), SpaceSection(layouts=(name,)))


def test_a_name_with_a_part_of_the_ranks_of_a_node_is_refused_with_the_right_one() -> None:
    work = on_nodes()
    work = replace(work, hardware=replace(work.hardware, devices=8))
    with pytest.raises(JobError, match="4 data ranks of a stage are neighbours on a node, not 2; use -w4"):
        named_layout("p1-d8-z1-w2", work)


def test_a_name_that_an_older_profile_does_not_know_is_refused_with_the_remedy() -> None:
    with pytest.raises(JobError, match=r"no times of averages of gradients over 2 data ranks .*profile JOB --fresh"):
        searched(timed(within=1), layouts=("p1-d4-z1-w2",))


def test_a_plan_of_another_search_is_taken_over_where_its_averages_were_timed() -> None:
    known, unknown = (Solver(predictor_of(costs), limits_of(AMPLE)) for costs in (timed(), timed(within=1)))
    space, other = (feasible_space(on_nodes(), solver, remedy="") for solver in (known, unknown))
    plan = next(plan for plan in space.starts if plan.layout == GROUPED)
    assert moved(plan, on_nodes(), space) == plan
    assert moved(plan, on_nodes(), other) is None


# --- what they cost ---


def test_a_step_has_the_time_of_its_own_averages() -> None:
    predictor, plan = predictor_of(timed()), plan_of("5+4", data=4, zero=1, within=2, packing=PACKED)
    at_once = replace(plan, layout=replace(GROUPED, reduce_within=1))
    parts, sizes = Parts.of(cut(plan)), predictor.sizes(PACKED, GROUPED)
    for each, rate in ((plan, FASTER), (at_once, AT_ONCE)):
        assert predictor.times.update_parts(each.layout, parts, sizes).reduction == pytest.approx(PARAMETERS * 4 * rate)
    difference = predictor.predict(at_once).step_seconds - predictor.predict(plan).step_seconds
    assert difference == pytest.approx(PARAMETERS * 4 * (AT_ONCE - FASTER))
    slower = predictor_of(scaled(timed(), [3.0 if name == "communication" else 1.0 for name in FACTORS]))
    assert slower.times.update_parts(GROUPED, parts, sizes).reduction == pytest.approx(3 * PARAMETERS * 4 * FASTER)


@pytest.mark.parametrize(
    "layout",
    [
        replace(GROUPED, data=8, reduce_within=2),
        replace(GROUPED, pipeline=2),
        replace(GROUPED, tensor=2),
        Layout(pipeline=1, data=8, zero=1, reduce_within=4),
    ],
)
def test_averages_that_were_not_timed_are_not_predicted(layout: Layout) -> None:
    assert knows_average(timed(), GROUPED)
    assert not knows_average(timed(), layout)
    with pytest.raises(ValueError, match="no times of averaging gradients over"):
        average_seconds(timed(), layout)


def test_the_rank_decides_that_waits_for_no_other() -> None:
    """Of the ranks at the same place of either node the first to end, and of both places the slower one."""
    reports = [
        replace(report, exchanges=(replace(report.exchanges[0], within=2, backward_seconds=seconds),))
        for report, seconds in zip(reports_of(COSTS, 0.0, ranks=4), (1e-9, 4e-9, 2e-9, 3e-9), strict=True)
    ]
    costs = fit_costs(reports, 2)
    (found,) = costs.exchanges
    assert found.within == 2
    assert found.seconds_per_byte[1] == pytest.approx(3e-9)
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs
    wrong = replace(reports[0].exchanges[0], backward_seconds=-1.0)
    with pytest.raises(ProfileError, match="cannot be a measured value"):
        fit_costs([replace(reports[0], exchanges=(wrong,)), *reports[1:]], 2)


def test_the_table_of_costs_shows_both() -> None:
    lines = costs_text(timed(), TypicalPack.of(workload_of().data)).splitlines()
    assert "average    1024.0 ns per KiB, 4 ranks" in lines
    assert "average    614.4 ns per KiB, 4 ranks, 2 of a node first" in lines
