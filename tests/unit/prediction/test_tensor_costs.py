"""Costs of language layers that ranks hold together: fitted to the timings of all ranks, and in predictions."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.dimensions.folds import unprofiled
from autotune.errors import ProfileError
from autotune.prediction.fit.costs import fit_costs
from autotune.prediction.parts import LANGUAGE, Parts
from tests.values.exchanges import around_layers, exchanging, without
from tests.values.reports import SHAPES, reports_of
from tests.values.search import COSTS, predictor_of
from tests.values.training import plan_of
from trials import wire
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.model.cut import cut
from trials.plan import Layout
from trials.tasks.answer import ExchangeTiming, ProfileReport

DEALT = 1000


def tensor_reports(latencies: tuple[float, ...], degrees: tuple[int, ...]) -> list[ProfileReport]:
    """Reports of ranks that take so long for a message, and 2 us for each of their tokens."""

    def timing(degree: int, samples: int, length: int, latency: float) -> ExchangeTiming:
        tokens = -(-samples * length // degree) * degree
        exchange = latency + 2e-6 * tokens / degree
        return ExchangeTiming(
            name="tensor",
            ranks=degree,
            layer="language",
            tokens=tokens,
            forward_seconds=exchange,
            backward_seconds=2 * exchange,
            recompute_seconds=exchange,
        )

    return [
        replace(
            report,
            exchanges=tuple(timing(degree, *shape, latency) for degree in degrees for shape in SHAPES),
            tensor_parallel_parameters=DEALT,
        )
        for report, latency in zip(reports_of(COSTS, 0.0, ranks=len(latencies)), latencies, strict=True)
    ]


def test_exchanges_take_what_the_last_rank_of_the_slowest_group_needs() -> None:
    costs = fit_costs(tensor_reports((5e-4, 1e-4, 7e-4, 3e-4), (2, 4)))
    assert costs.timed_degrees("tensor") == (2, 4)
    for cost, latency in zip(costs.exchanges, (3e-4, 1e-4), strict=True):
        assert cost.forward_seconds == cost.recompute_seconds == pytest.approx((0, 2e-6, 0, latency))
        assert cost.backward_seconds == pytest.approx((0, 4e-6, 0, 2 * latency))
    assert [costs[kind].tensor_parallel_parameters for kind in KINDS] == [
        DEALT * (kind == "language") for kind in KINDS
    ]
    layout = Layout(pipeline=1, data=1, zero=0, tensor=8)
    assert unprofiled(costs, layout) is None
    assert costs.exchange("tensor", 8, "language") == costs.exchanges[1]


def test_exchanges_that_were_timed_wrongly_are_refused() -> None:
    first, second = tensor_reports((1e-4, 1e-4), (2,))
    wrong = replace(first.exchanges[0], forward_seconds=float("nan"))
    with pytest.raises(ProfileError, match="forward_seconds is nan"):
        fit_costs([replace(first, exchanges=(wrong, *first.exchanges[1:])), second])


def test_a_profile_without_the_exchanges_predicts_no_such_plans() -> None:
    fitted = fit_costs(tensor_reports((1e-4, 1e-4), (2,)))
    assert wire.decode(LayerCosts, wire.encode(fitted)) == fitted
    other, plan = without(fitted, "tensor"), plan_of("5+4", tensor=2)
    assert unprofiled(other, replace(plan.layout, tensor=1)) is None
    assert unprofiled(other, plan.layout) == "what 2 ranks exchange that hold layers together"
    with pytest.raises(ValueError, match="no times of what 2 ranks exchange that"):
        predictor_of(other).predict(plan)


def test_cut_layers_take_their_part_of_the_work_and_the_bytes_and_exchange() -> None:
    layers = tuple(
        (kind, replace(cost, tensor_parallel_parameters=DEALT) if kind == "language" else cost)
        for kind, cost in COSTS.layers
    )
    around = around_layers(2, (0, 1e-6, 0, 1e-4), (0, 3e-6, 0, 2e-4))
    predictor = predictor_of(exchanging(replace(COSTS, layers=layers), around))
    whole, halves = (plan_of("12+8r0,3", tensor=degree) for degree in (1, 2))
    parts = Parts.of(cut(whole))
    one, other = (predictor.sizes(plan.packing, plan.layout) for plan in (whole, halves))
    assert other.table[:, 2] == pytest.approx(one.table[:, 2] / 2)
    assert other.step_samples.tolist() == one.step_samples.tolist()
    forward, backward = predictor.times.exchange_seconds(parts, halves.layout, other.table, other.degrees)
    tokens, count = other.table[:, 1], parts.layers[0, LANGUAGE]
    assert forward[:, 0] == pytest.approx(count * (1e-6 * tokens + 1e-4))
    assert backward[:, 0] == pytest.approx(count * (3e-6 * tokens + 2e-4) + 3 * (1e-6 * tokens + 1e-4))
    # Weights, gradients and two moments in float32.
    static = [float(predictor.memory.static(parts, plan.layout)[0]) for plan in (whole, halves)]
    assert static[0] - static[1] == pytest.approx(16 * 8 * DEALT / 2)
    kept, kept_whole = (
        predictor.memory.kept((parts,), plan.layout, sizes) for plan, sizes in ((halves, other), (whole, one))
    )
    assert np.all(kept < kept_whole)
