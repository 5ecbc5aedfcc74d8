"""Seeds of the random numbers of a step."""

from trials.grid import Grid
from trials.tasks.training.training import random_seed


def test_every_rank_draws_other_numbers_in_every_step() -> None:
    grid = Grid(pipeline=2, data=3, tensor=2)
    every = [[random_seed(7, step, grid.coordinates(rank)) for rank in range(grid.world_size)] for step in (0, 1, 2)]
    different = {seed for of_step in every for seed in of_step}
    assert len(different) == 3 * grid.world_size
    assert random_seed(8, 0, grid.coordinates(0)) not in different
