"""Averages of gradients over the data ranks of a layout: their time, from those that were timed."""

from trials.costs.exchange import Exchange
from trials.costs.layer_costs import LayerCosts
from trials.grid import Grid
from trials.plan import Layout


def knows_average(costs: LayerCosts, layout: Layout) -> bool:
    """Return whether averages of gradients in this layout can be predicted."""
    return layout.reduce_within == 1 or (layout.tensor == 1 and _in_groups(costs, layout) is not None)


def extrapolates(costs: LayerCosts, layout: Layout) -> bool:
    """Return whether data ranks lie on several nodes as no timed ones do, and have a share of all ranks' time."""
    return _alike(costs, layout) is None and layout.grid.data_place(costs.of_node)[0] > 1


def average_seconds(costs: LayerCosts, layout: Layout) -> float:
    """Return the seconds per byte of averaging gradients: those of all ranks, in proportion, where none were alike.

    In a ring each of n ranks sends 2 (n - 1) / n of the gradients (Patarasuk and Yuan 2009), and the link of a node
    carries that of all groups of data ranks on the node at once. Raise ValueError for groups of data ranks that were
    not timed.
    """
    if not knows_average(costs, layout):
        raise ValueError(
            f"the profile has no times of averaging gradients over {layout.reduce_within} data ranks first"
        )
    if found := _alike(costs, layout) if layout.reduce_within == 1 else _in_groups(costs, layout):
        return found.seconds_per_byte[1]
    if (of_all := _of_all(costs)) is None:
        return 0.0
    carried = (1 - 1 / layout.data) / (1 - 1 / of_all.ranks)
    nodes, of_node = layout.grid.data_place(costs.of_node)
    groups = costs.of_node / of_node if nodes > 1 else 1.0
    return of_all.seconds_per_byte[1] * carried * groups


def average_of_all(costs: LayerCosts) -> float:
    """Return the seconds per byte of averaging gradients over all ranks; 0 for one rank."""
    return found.seconds_per_byte[1] if (found := _of_all(costs)) else 0.0


def _of_all(costs: LayerCosts) -> Exchange | None:
    found = (each for each in costs.exchanges if each.name == "average" and each.pipeline == each.within == 1)
    return max(found, key=lambda each: each.ranks, default=None)


def _alike(costs: LayerCosts, layout: Layout) -> Exchange | None:
    """Return the timing with as many data ranks on as many nodes; None where there is none."""
    place = layout.grid.data_place(costs.of_node)
    for each in costs.exchanges:
        if each.name == "average" and (each.ranks, each.within) == (layout.data, 1):
            timed = Grid(pipeline=each.pipeline, data=each.ranks)
            if timed.data_place(costs.of_node) == place:
                return each
    return None


def _in_groups(costs: LayerCosts, layout: Layout) -> Exchange | None:
    wanted = (layout.pipeline, layout.data, layout.reduce_within)
    timed = (each for each in costs.exchanges if each.name == "average")
    return next((each for each in timed if (each.pipeline, each.ranks, each.within) == wanted), None)
