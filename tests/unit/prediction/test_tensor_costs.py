"""Costs of language layers that ranks hold together: fitted to the timings of all ranks, and in predictions."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.errors import ProfileError
from autotune.prediction.costs import fit_costs
from autotune.prediction.parts import LANGUAGE, Parts
from tests.unit.prediction.test_costs import SHAPES, reports_of
from tests.values.search import COSTS, predictor_of
from tests.values.training import plan_of
from trials import wire
from trials.layer_costs import KINDS, LayerCosts, SharingCost, TensorCost
from trials.model.cut import cut
from trials.tasks.answer import ProfileReport, TensorTiming

DEALT = 1000


def tensor_reports(latencies: tuple[float, ...], degrees: tuple[int, ...]) -> list[ProfileReport]:
    """Reports of ranks that take so long for a message, and 2 us for each of their tokens."""

    def timing(degree: int, samples: int, length: int, latency: float) -> TensorTiming:
        tokens = -(-samples * length // degree) * degree
        exchange = latency + 2e-6 * tokens / degree
        return TensorTiming(degree=degree, tokens=tokens, forward_seconds=exchange, backward_seconds=2 * exchange)

    return [
        replace(
            report,
            tensor=tuple(timing(degree, *shape, latency) for degree in degrees for shape in SHAPES),
            dealt_parameters=DEALT,
        )
        for report, latency in zip(reports_of(COSTS, 0.0, ranks=len(latencies)), latencies, strict=True)
    ]


def test_exchanges_take_what_the_last_rank_of_the_slowest_group_needs() -> None:
    costs = fit_costs(tensor_reports((5e-4, 1e-4, 7e-4, 3e-4), (2, 4)))
    assert [cost.degree for cost in costs.tensor] == [2, 4]
    for cost, latency in zip(costs.tensor, (3e-4, 1e-4), strict=True):
        assert cost.forward_seconds == pytest.approx((0, 2e-6, 0, latency))
        assert cost.backward_seconds == pytest.approx((0, 4e-6, 0, 2 * latency))
    assert [costs[kind].dealt_parameters for kind in KINDS] == [DEALT * (kind == "language") for kind in KINDS]
    assert costs.knows_tensor(8)
    assert costs.cut_in(8) == replace(costs.tensor[1], degree=8)


def test_exchanges_that_were_timed_wrongly_are_refused() -> None:
    first, second = tensor_reports((1e-4, 1e-4), (2,))
    wrong = replace(first.tensor[0], forward_seconds=float("nan"))
    with pytest.raises(ProfileError, match="forward_seconds is nan"):
        fit_costs([replace(first, tensor=(wrong, *first.tensor[1:])), second])


def test_costs_from_before_layers_were_cut_can_be_read_and_predict_no_such_plans() -> None:
    fitted = fit_costs(tensor_reports((1e-4, 1e-4), (2,)))
    assert wire.decode(LayerCosts, wire.encode(fitted)) == fitted
    document = wire.to_document(fitted)
    del document["tensor"]
    older = wire.decode(LayerCosts, wire.canonical(document))
    assert older == replace(fitted, tensor=())
    assert older.knows_tensor(1)
    assert not older.knows_tensor(2)
    with pytest.raises(ValueError, match="no times of what 2 ranks exchange that hold layers together"):
        older.cut_in(2)


def test_cut_layers_take_their_part_of_the_work_and_the_bytes_and_exchange() -> None:
    language = COSTS["language"]
    layers = tuple(
        (kind, replace(cost, dealt_parameters=DEALT) if kind == "language" else cost) for kind, cost in COSTS.layers
    )
    shared = SharingCost(
        degree=2,
        kept_bytes=language.kept_bytes,
        shared_bytes=language.shared_bytes,
        transient_bytes=language.transient_bytes,
    )
    around = TensorCost(degree=2, forward_seconds=(0, 1e-6, 0, 1e-4), backward_seconds=(0, 3e-6, 0, 2e-4))
    predictor = predictor_of(replace(COSTS, layers=layers, sharing=(shared,), tensor=(around,)))
    whole, halves = (plan_of("12+8r0,3", tensor=degree) for degree in (1, 2))
    parts = Parts.of(cut(whole))
    one, other = (predictor.sizes(plan.packing, plan.layout) for plan in (whole, halves))
    assert other.table[:, 2] == pytest.approx(one.table[:, 2] / 2)
    assert other.step_samples.tolist() == one.step_samples.tolist()
    forward, backward = predictor.exchange_seconds(parts, halves.layout, other.table, other.degrees)
    tokens, count = other.table[:, 1], parts.layers[0, LANGUAGE]
    assert forward[:, 0] == pytest.approx(count * (1e-6 * tokens + 1e-4))
    assert backward[:, 0] == pytest.approx(count * (3e-6 * tokens + 2e-4) + 3 * (1e-6 * tokens + 1e-4))
    # Weights, gradients and two moments in float32.
    static = [float(predictor.static_bytes(parts, plan.layout)[0]) for plan in (whole, halves)]
    assert static[0] - static[1] == pytest.approx(16 * 8 * DEALT / 2)
    assert np.all(predictor.kept_bytes(halves, other) < predictor.kept_bytes(whole, one))
