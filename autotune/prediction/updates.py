"""The optimizer's step in a layout: the time of a single rank, which ZeRO divides, and what its ranks exchange."""

from dataclasses import replace

from autotune.dimensions.averages import average_seconds
from trials.costs.layer_costs import LayerCosts, UpdateCost
from trials.plan import Layout, ZeroStage


def update_seconds_per_parameter(costs: LayerCosts, layout: Layout) -> float:
    """Return the time of the update on every rank.

    On another number of data ranks than was measured, it is the time of a single rank, which ZeRO divides by the
    ranks, and the rest of the measured time, which is communication, in proportion to that of averaging gradients.
    """
    found = {(update.zero, update.data_parallel > 1): update for update in costs.updates}
    # ZeRO 2 updates as ZeRO 1 does. ZeRO 3 exchanges nothing then, so it was not timed.
    if (update := found.get((1 if layout.zero == 2 else layout.zero, layout.data > 1))) is None:
        return _alone(costs, layout.zero, layout.data)
    if update.data_parallel == layout.data:
        return update.seconds_per_parameter
    timed = Layout(pipeline=1, data=update.data_parallel, zero=0)
    then, now = (average_seconds(costs, each) for each in (timed, replace(layout, reduce_within=1)))
    rest = _exchange(costs, update) * (now / then if then else 1.0)
    return _alone(costs, layout.zero, layout.data) + rest


def scaled_updates(costs: LayerCosts, computing: float, communication: float) -> tuple[UpdateCost, ...]:
    """Return the updates with a factor for the time of a single rank, and one for the rest."""
    return tuple(
        replace(
            update,
            seconds_per_parameter=(update.seconds_per_parameter - exchange) * computing + exchange * communication,
        )
        for update in costs.updates
        for exchange in (_exchange(costs, update),)
    )


def _alone(costs: LayerCosts, zero: ZeroStage, data: int) -> float:
    return costs.updates[0].seconds_per_parameter / (data if zero else 1)


def _exchange(costs: LayerCosts, update: UpdateCost) -> float:
    return max(0.0, update.seconds_per_parameter - _alone(costs, update.zero, update.data_parallel))
