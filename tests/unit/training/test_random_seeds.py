"""Seeds of the random numbers of a step."""

from trials.grid import Grid
from trials.tasks.training.training import random_seed


def test_data_ranks_stages_and_steps_draw_other_numbers_and_tensor_ranks_the_same() -> None:
    grid = Grid(pipeline=2, data=3, tensor=2)
    every = [[random_seed(7, step, grid.coordinates(rank)) for rank in range(grid.world_size)] for step in (0, 1, 2)]
    assert all(of_step[0::2] == of_step[1::2] for of_step in every)
    different = {seed for of_step in every for seed in of_step}
    assert len(different) == 3 * grid.pipeline * grid.data
    assert random_seed(8, 0, grid.coordinates(0)) not in different
