import pytest
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from trials.grid import Grid, RankCoordinates
from trials.plan import Layout

GRIDS = st.builds(Grid, pipeline=st.integers(1, 12), data=st.integers(1, 12))


@given(GRIDS, st.data())
def test_a_rank_is_in_the_groups_of_its_coordinates(grid: Grid, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))
    where = grid.coordinates(rank)
    assert grid.stage_ranks(where.stage)[where.data_rank] == rank
    assert grid.pipeline_ranks(where.data_rank)[where.stage] == rank


@given(GRIDS)
def test_every_pair_of_coordinates_has_one_rank(grid: Grid) -> None:
    found = [(where.stage, where.data_rank) for where in map(grid.coordinates, range(grid.world_size))]
    assert found == [(stage, data_rank) for stage in range(grid.pipeline) for data_rank in range(grid.data)]


@given(GRIDS)
def test_stages_and_pipelines_each_hold_every_rank_once(grid: Grid) -> None:
    stages = [rank for stage in range(grid.pipeline) for rank in grid.stage_ranks(stage)]
    pipelines = [rank for data_rank in range(grid.data) for rank in grid.pipeline_ranks(data_rank)]
    assert stages == sorted(pipelines) == list(range(grid.world_size))
    assert {len(grid.pipeline_ranks(data_rank)) for data_rank in range(grid.data)} == {grid.pipeline}


@pytest.mark.parametrize(("pipeline", "data"), [(1, 4), (4, 1), (3, 2)])
def test_the_grid_is_that_of_deepspeed(pipeline: int, data: int) -> None:
    grid, topology = Grid(pipeline=pipeline, data=data), PipeDataParallelTopology(num_pp=pipeline, num_dp=data)
    for rank in range(grid.world_size):
        theirs = topology.get_coord(rank)
        assert grid.coordinates(rank) == RankCoordinates(rank=rank, stage=theirs.pipe, data_rank=theirs.data)
    assert [list(grid.pipeline_ranks(data_rank)) for data_rank in range(data)] == topology.get_axis_comm_lists("pipe")


def test_a_layout_has_the_grid_of_its_degrees() -> None:
    layout = Layout(pipeline=3, data=2, zero=1)
    assert layout.grid == Grid(pipeline=3, data=2)
    assert layout.world_size == 6
