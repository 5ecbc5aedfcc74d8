"""The bound on the epoch seconds of any split: near the best plan, whatever takes most of its time."""

from dataclasses import replace

import pytest

from tests.values.search import COSTS, predictor_of, solver_of
from tests.values.solver import PACKINGS
from trials.costs.layer_costs import LayerCosts, LinkCost
from trials.plan import Layout

SLOW_LINK = replace(COSTS, link=LinkCost(latency_seconds=10.0, seconds_per_byte=0.0), communications=())
SLOW_UPDATES = replace(COSTS, updates=tuple(replace(each, seconds_per_parameter=1.0) for each in COSTS.updates))


@pytest.mark.parametrize("costs", [SLOW_LINK, SLOW_UPDATES], ids=["link", "updates"])
@pytest.mark.parametrize("pipeline", [2, 4])
def test_what_stages_exchange_and_update_is_in_the_bound(costs: LayerCosts, pipeline: int) -> None:
    solver, layout = solver_of(1 << 50, predictor_of(costs)), Layout(pipeline=pipeline, data=4 // pipeline, zero=0)
    plan = solver.solve(PACKINGS[0], layout)
    assert plan is not None
    (seconds,) = solver.epoch_seconds([plan])
    assert 0.7 * seconds < solver.least_seconds(PACKINGS[0], layout) <= seconds
