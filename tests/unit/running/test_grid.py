import pytest
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from hypothesis import given
from hypothesis import strategies as st

from trials.grid import Grid, RankCoordinates
from trials.plan import Layout

DEGREES = st.integers(1, 8)
GRIDS = st.builds(Grid, pipeline=DEGREES, data=DEGREES, tensor=DEGREES)


@given(GRIDS, st.data())
def test_a_rank_is_in_the_groups_of_its_coordinates(grid: Grid, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, grid.world_size - 1))
    where = grid.coordinates(rank)
    place = where.data_rank * grid.tensor + where.tensor_rank
    assert grid.stage_ranks(where.stage)[place] == rank
    assert grid.pipelines()[place][where.stage] == rank
    (together,) = (ranks for ranks in grid.sharing_ranks(1) if rank in ranks)
    assert together[where.tensor_rank] == rank
    assert where.leads_stage == (rank == grid.stage_ranks(where.stage)[0])


@given(GRIDS)
def test_every_triple_of_coordinates_has_one_rank(grid: Grid) -> None:
    found = [
        (where.stage, where.data_rank, where.tensor_rank) for where in map(grid.coordinates, range(grid.world_size))
    ]
    assert found == [
        (stage, data_rank, tensor_rank)
        for stage in range(grid.pipeline)
        for data_rank in range(grid.data)
        for tensor_rank in range(grid.tensor)
    ]


@given(GRIDS)
def test_stages_and_pipelines_each_hold_every_rank_once(grid: Grid) -> None:
    stages = [rank for stage in range(grid.pipeline) for rank in grid.stage_ranks(stage)]
    assert stages == sorted(rank for ranks in grid.pipelines() for rank in ranks) == list(range(grid.world_size))
    assert {len(ranks) for ranks in grid.pipelines()} == {grid.pipeline}


@given(GRIDS, st.data())
def test_heads_are_dealt_among_ranks_that_share_a_pack_and_hold_the_same_slices(
    grid: Grid, data: st.DataObject
) -> None:
    degree = data.draw(st.sampled_from([each for each in range(1, grid.data + 1) if grid.data % each == 0]))
    sharing, attending = grid.sharing_ranks(degree), grid.attending_ranks(degree)
    assert sorted(rank for ranks in attending for rank in ranks) == list(range(grid.world_size))
    for ranks in attending:
        assert len(ranks) == degree
        assert len({grid.coordinates(rank).tensor_rank for rank in ranks}) == 1
        assert sum({*ranks} <= {*group} for group in sharing) == 1


@given(GRIDS, st.data())
def test_groups_that_average_first_and_those_between_them_connect_each_rank_with_its_data_ranks(
    grid: Grid, data: st.DataObject
) -> None:
    within = data.draw(st.sampled_from([each for each in range(1, grid.data + 1) if grid.data % each == 0]))
    inside, between = grid.attending_ranks(within), grid.equal_ranks(within)
    for groups in (inside, between):
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(grid.world_size))
    (whole,) = (ranks for ranks in grid.attending_ranks(grid.data) if 0 in ranks)
    (first,) = (ranks for ranks in inside if 0 in ranks)
    reached = [rank for ranks in between if {*ranks} & {*first} for rank in ranks]
    assert sorted(reached) == sorted(whole)


@given(GRIDS, st.integers(1, 8))
def test_groups_that_average_first_are_on_one_node_each_and_a_stage_is_on_several(grid: Grid, of_node: int) -> None:
    within = grid.data_ranks_of_node(of_node)
    for ranks in grid.attending_ranks(within):
        assert within == 1 or len({rank // of_node for rank in ranks}) == 1
    if within > 1:
        assert all(len({rank // of_node for rank in grid.stage_ranks(stage)}) > 1 for stage in range(grid.pipeline))


@pytest.mark.parametrize(
    ("grid", "of_node", "within"),
    [
        (Grid(pipeline=1, data=4), 2, 2),
        (Grid(pipeline=1, data=4), 4, 1),
        (Grid(pipeline=1, data=4), 1, 1),
        (Grid(pipeline=2, data=4), 2, 2),
        (Grid(pipeline=2, data=2), 2, 1),
        (Grid(pipeline=1, data=16), 8, 8),
        (Grid(pipeline=1, data=4, tensor=2), 4, 2),
        (Grid(pipeline=1, data=4, tensor=2), 2, 1),
        (Grid(pipeline=2, data=6), 4, 2),
        (Grid(pipeline=1, data=3), 2, 1),
    ],
)
def test_the_data_ranks_that_average_on_their_node_first(grid: Grid, of_node: int, within: int) -> None:
    assert grid.data_ranks_of_node(of_node) == within


@pytest.mark.parametrize(
    ("grid", "of_node", "place"),
    [
        (Grid(pipeline=2, data=4), 4, (1, 4)),
        (Grid(pipeline=1, data=8), 4, (2, 4)),
        (Grid(pipeline=1, data=4, tensor=2), 4, (2, 2)),
        (Grid(pipeline=1, data=2, tensor=4), 4, (2, 1)),
        (Grid(pipeline=2, data=2, tensor=2), 4, (1, 2)),
        (Grid(pipeline=4, data=3), 4, (2, 2)),
        (Grid(pipeline=2, data=4, tensor=2), 0, (1, 4)),
    ],
)
def test_the_nodes_on_which_data_ranks_lie(grid: Grid, of_node: int, place: tuple[int, int]) -> None:
    assert grid.data_place(of_node) == place


@given(GRIDS, st.data())
def test_data_ranks_that_share_a_pack_have_its_places_in_order(grid: Grid, data: st.DataObject) -> None:
    degree = data.draw(st.sampled_from([each for each in range(1, grid.data + 1) if grid.data % each == 0]))
    for ranks in grid.attending_ranks(degree):
        places = [grid.sharing_place(grid.coordinates(rank).data_rank, degree) for rank in ranks]
        assert places == list(range(degree))


@pytest.mark.parametrize(("pipeline", "data", "tensor"), [(1, 4, 1), (4, 1, 1), (3, 2, 1), (2, 3, 4), (1, 1, 2)])
def test_the_grid_is_that_of_deepspeed(pipeline: int, data: int, tensor: int) -> None:
    grid = Grid(pipeline=pipeline, data=data, tensor=tensor)
    topology = PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)
    for rank in range(grid.world_size):
        theirs = topology.get_coord(rank)
        assert grid.coordinates(rank) == RankCoordinates(
            rank=rank, stage=theirs.pipe, data_rank=theirs.data, tensor_rank=theirs.model
        )
    assert [list(ranks) for ranks in grid.pipelines()] == topology.get_axis_comm_lists("pipe")
    assert [list(ranks) for ranks in grid.sharing_ranks(1)] == topology.get_axis_comm_lists("model")
    assert sorted(map(list, grid.attending_ranks(data))) == sorted(topology.get_axis_comm_lists("data"))


def test_a_layout_has_the_grid_of_its_degrees() -> None:
    layout = Layout(pipeline=3, data=2, tensor=4, zero=1)
    assert layout.grid == Grid(pipeline=3, data=2, tensor=4)
    assert layout.world_size == 24


@pytest.mark.parametrize(
    ("grid", "of_node", "leaving"),
    [
        (Grid(pipeline=4, data=1), 2, [False, True, False, False]),
        (Grid(pipeline=2, data=2), 2, [True, False]),
        (Grid(pipeline=2, data=1, tensor=4), 8, [False, False]),
        (Grid(pipeline=3, data=2), 3, [True, True, False]),
        (Grid(pipeline=1, data=4), 2, [False]),
    ],
)
def test_the_stages_that_send_to_another_node(grid: Grid, of_node: int, leaving: list[bool]) -> None:
    assert [grid.leaves_node(stage, of_node) for stage in range(grid.pipeline)] == leaving
