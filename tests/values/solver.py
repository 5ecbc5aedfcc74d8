"""Random problems for the solver."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from hypothesis import strategies as st

from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from tests.values.exchanges import copies, exchanging
from tests.values.search import layer_costs, limits_of, predictor_of
from trials.costs.coefficients import times
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, Offload, Packed, Packing, Padded
from trials.stage import TOWERS

PACKINGS: tuple[Packing, ...] = (
    Padded(samples=2),
    Padded(samples=4),
    Packed(qv=12, qt=600, qv_min=12, qt_min=500),
)
shapes = st.tuples(st.integers(0, 4), st.integers(1, 3)).filter(lambda layers: sum(layers) <= 6)


@st.composite
def problems(draw: st.DrawFn, most_stages: int = 3) -> tuple[Predictor, Limits, Packing, Layout]:
    """Random layer costs, few or many micro-batches, and memory from too little to enough for every plan."""
    vision, language = draw(shapes)
    layout = Layout(
        pipeline=draw(st.integers(1, min(most_stages, vision + language))),
        data=draw(st.integers(1, 2)),
        zero=draw(st.sampled_from([0, 1])),
        offload=draw(st.sampled_from(get_args(Offload))),
    )
    packing = draw(st.sampled_from(PACKINGS))
    factors = draw(st.lists(st.tuples(st.floats(0.2, 3), st.floats(0, 2), st.floats(0, 1)), min_size=5, max_size=5))
    selective = draw(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=5, max_size=5))
    out, back = draw(st.tuples(st.floats(0, 1e-8), st.floats(0, 1e-8)))
    costs = exchanging(selecting(uneven(draw(layer_costs), factors), selective), copies(out, back))
    predictor = predictor_of(costs, batch=draw(st.sampled_from([1, 8, 32])))
    least = Solver(predictor, limits_of(1, vision, language)).least_bytes(packing, layout)
    limit = round(least * draw(st.floats(0.5, 3)))
    return predictor, limits_of(limit, vision, language), packing, layout


def selecting(costs: LayerCosts, shares: Sequence[Sequence[float]]) -> LayerCosts:
    """Return costs whose layers can be recomputed selectively, in shares of the seconds and bytes of what others take.

    The shares are those of the seconds of recomputation, of the kept bytes, and of the rest of them at the peak.
    """
    layers = tuple(
        (
            kind,
            replace(
                cost,
                selective_seconds=times(cost.recompute_seconds, seconds),
                selective_bytes=times(cost.kept_bytes, kept),
                selective_peak_bytes=times(cost.kept_bytes, kept + (1 - kept) * peak),
            )
            if kind in TOWERS
            else cost,
        )
        for (kind, cost), (seconds, kept, peak) in zip(costs.layers, shares, strict=True)
    )
    return replace(costs, layers=layers)


def uneven(costs: LayerCosts, factors: Sequence[Sequence[float]]) -> LayerCosts:
    """Return costs whose recompute, transient and once-kept shares differ between kinds of layers."""
    layers = tuple(
        (
            kind,
            replace(
                cost,
                recompute_seconds=times(cost.recompute_seconds, again),
                transient_bytes=times(cost.kept_bytes, moment),
                shared_bytes=times(cost.kept_bytes, once),
            ),
        )
        for (kind, cost), (again, moment, once) in zip(costs.layers, factors, strict=True)
    )
    return replace(costs, layers=layers)
