"""How long an exchange takes whose groups of ranks lie on several nodes, evenly or not."""

import pytest

from autotune.prediction.fit.exchanges import slowest_exchange

LINK, WAIT = 1.0, 5.0


def seconds_of(nodes: int, of_node: int, ranks: int, late: int) -> list[float]:
    """Return the seconds of each rank, all of whose groups wait for the ranks of a node that begins late.

    In a ring the first rank that a group has on a node ends `LINK` seconds after the others.
    """
    found = []
    for rank in range(nodes * of_node):
        group = range(rank - rank % ranks, rank - rank % ranks + ranks)
        on_nodes = {each // of_node for each in group}
        is_first = len(on_nodes) > 1 and (rank in (group.start, rank // of_node * of_node))
        waits = late in on_nodes and rank // of_node != late
        found.append(1.0 + LINK * is_first + WAIT * waits)
    return found


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("nodes", "of_node"), [(2, 2), (2, 8), (3, 8), (5, 8), (6, 8), (7, 4), (10, 4), (15, 8)])
def test_groups_of_any_size_take_what_the_rank_behind_the_link_needs_without_waiting(
    nodes: int, of_node: int, late: int
) -> None:
    world = nodes * of_node
    for ranks in (size for size in range(1, world + 1) if world % size == 0):
        crosses = any(first // of_node != (first + ranks - 1) // of_node for first in range(0, world, ranks))
        slowest = slowest_exchange(seconds_of(nodes, of_node, ranks, late), ranks, of_node)
        assert slowest == 1.0 + LINK * crosses, ranks


def test_the_slowest_group_counts_by_its_own_ranks() -> None:
    """Groups of 10 on nodes of 4: the third rank of a node may belong to another group than the first."""
    seconds = [1.0] * 40
    seconds[10:20] = [3.0] * 10
    assert slowest_exchange(seconds, 10, 4) == 3.0
