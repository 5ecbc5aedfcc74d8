"""Costs on more or fewer devices than were profiled."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.dimensions.averages import average_seconds
from autotune.forecast.cluster import Cluster, ClusterOptions, cluster_of_profile
from autotune.forecast.profile_file import ProfiledCosts
from autotune.prediction.updates import update_seconds_per_parameter
from tests.values.exchanges import averages
from tests.values.search import COSTS, workload_of
from tests.values.storage import NOON
from tests.values.training import job_of
from trials.costs.exchange import Exchange
from trials.costs.layer_costs import UpdateCost
from trials.plan import Layout

ALONE, GATHER, AVERAGE = 2e-9, 4e-9, 1e-9


def cluster_of(profiled: int, devices: int, *timed: Exchange) -> Cluster:
    """Return devices of a profile that timed averages over all of its devices, and these."""
    gathering = UpdateCost(zero=1, data_parallel=profiled, seconds_per_parameter=ALONE / profiled + GATHER)
    alone = UpdateCost(zero=0, data_parallel=1, seconds_per_parameter=ALONE)
    costs = replace(COSTS, updates=(alone, gathering), exchanges=(averages(AVERAGE, profiled), *timed))
    work = workload_of(devices=profiled)
    found = ProfiledCosts(hardware=work.hardware, model=work.model, software=work.software, created=NOON, costs=costs)
    return cluster_of_profile(job_of(Path(), Path()), found, ClusterOptions(devices=devices))


@pytest.mark.parametrize(("devices", "layout"), [(16, (1, 16)), (16, (2, 8)), (8, (1, 8))])
def test_the_gather_of_an_update_takes_longer_on_more_devices_as_averages_do(
    devices: int, layout: tuple[int, int]
) -> None:
    costs = cluster_of(2, devices).costs
    pipeline, data = layout
    longer = (1 - 1 / data) / (1 - 1 / 2)
    sharded = Layout(pipeline=pipeline, data=data, zero=1)
    assert average_seconds(costs, sharded) == pytest.approx(longer * AVERAGE)
    assert update_seconds_per_parameter(costs, sharded) == pytest.approx(ALONE / data + longer * GATHER)


@pytest.mark.parametrize("of_node", [0, 8])
def test_fewer_data_ranks_than_were_timed_send_less_on_a_ring(of_node: int) -> None:
    costs = replace(COSTS, exchanges=(averages(AVERAGE, 8),), of_node=of_node)
    for layout in (Layout(pipeline=4, data=2, zero=1), Layout(pipeline=1, data=2, zero=1)):
        assert average_seconds(costs, layout) == pytest.approx(AVERAGE * (1 / 2) / (7 / 8))


def test_fewer_devices_average_in_less_time_where_as_many_were_not_timed() -> None:
    three = Layout(pipeline=1, data=3, zero=1)
    fewer = cluster_of(4, 3)
    shorter = (1 - 1 / 3) / (1 - 1 / 4)
    assert average_seconds(fewer.costs, three) == pytest.approx(shorter * AVERAGE)
    assert update_seconds_per_parameter(fewer.costs, three) == pytest.approx(ALONE / 3 + shorter * GATHER)
    assert "reductions over 3 devices, from those over 4 as on a ring" in fewer.extrapolated


def test_what_was_timed_of_fewer_devices_stays() -> None:
    timed = averages(7e-10, 2, pipeline=2)
    fewer = cluster_of(4, 2, timed)
    assert fewer.costs == fewer.profiled.costs
    assert average_seconds(fewer.costs, Layout(pipeline=1, data=2, zero=0)) == 7e-10
    assert not any("reductions" in each for each in fewer.extrapolated)
