from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.predict.costs import KINDS, LayerCost, LayerCosts, fit_costs
from tests.search_values import COSTS, layer_costs
from trials import wire
from trials.run.report import LayerKind, LayerTiming, ProfileReport

UNITS = (1, 2, 4, 8, 16, 24)
SHAPES = ((1, 64), (4, 64), (1, 256), (2, 256), (1, 600), (8, 128))
COEFFICIENTS = tuple(field.name for field in fields(LayerCost) if field.name != "parameters")


def sizes_of(kind: LayerKind) -> list[tuple[int, int, int]]:
    """(units, tokens, squares) at which a kind of layer is profiled."""
    if kind in ("language", "head"):
        return [(0, samples * length, samples * length**2) for samples, length in SHAPES]
    tokens = [16 * units + 256 * (number % 2) if kind == "projector" else 0 for number, units in enumerate(UNITS)]
    return [(units, count, 0) for units, count in zip(UNITS, tokens, strict=True)]


def timing(kind: LayerKind, size: tuple[int, int, int], cost: LayerCost, noise: tuple[float, float]) -> LayerTiming:
    units, tokens, squares = size
    columns = np.array((*size, 1.0))
    return LayerTiming(
        layer=kind,
        units=units,
        tokens=tokens,
        squares=squares,
        forward_seconds=float(columns @ cost.forward_seconds) * noise[0],
        backward_seconds=float(columns @ cost.backward_seconds) * noise[1],
        kept_bytes=round(float(columns @ cost.kept_bytes)),
        output_bytes=round(float(columns @ cost.output_bytes)),
    )


def reports_of(costs: LayerCosts, noise: float, ranks: int = 2) -> list[ProfileReport]:
    """What ranks report of layers with these costs, with relative noise."""
    random = np.random.default_rng(0)

    def factors() -> tuple[float, float]:
        first, second = random.normal(1, noise, 2).tolist()
        return first, second

    return [
        ProfileReport(
            timings=tuple(timing(kind, size, costs[kind], factors()) for kind in KINDS for size in sizes_of(kind)),
            parameters=tuple((kind, costs[kind].parameters) for kind in KINDS),
            optimizer_seconds_per_parameter=(rank + 1) * 1e-9,
            reduce_seconds_per_byte=(rank + 1) * 1e-10,
        )
        for rank in range(ranks)
    ]


def seconds(costs: LayerCosts, kind: LayerKind, size: tuple[int, int, int]) -> float:
    columns = np.array((*size, 1.0))
    return float(columns @ costs[kind].forward_seconds + columns @ costs[kind].backward_seconds)


@given(layer_costs)
@settings(deadline=None, max_examples=25)
def test_exact_timings_give_back_their_coefficients(costs: LayerCosts) -> None:
    fitted = fit_costs(reports_of(costs, noise=0.0))
    for kind in KINDS:
        for name in ("forward_seconds", "backward_seconds"):
            planted, found = np.array(getattr(costs[kind], name)), np.array(getattr(fitted[kind], name))
            assert found == pytest.approx(planted, rel=1e-4, abs=planted.max() * 1e-6), (kind, name)
        for name in ("kept_bytes", "output_bytes"):
            assert getattr(fitted[kind], name) == pytest.approx(getattr(costs[kind], name), rel=1e-3, abs=5), (
                kind,
                name,
            )
    assert fitted.residual < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_noisy_timings_are_predicted_within_their_noise(kind: LayerKind) -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.03, ranks=4))
    assert 0.005 < fitted.residual < 0.04
    for size in sizes_of(kind):
        assert seconds(fitted, kind, size) == pytest.approx(seconds(COSTS, kind, size), rel=0.06)


@given(st.lists(st.floats(1e-6, 10), min_size=60, max_size=60))
@settings(deadline=None, max_examples=40)
def test_no_coefficient_is_negative_whatever_was_measured(measured: list[float]) -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    pairs = zip(measured[::2], measured[1::2], strict=True)
    timings = tuple(
        replace(timing, forward_seconds=forward, backward_seconds=backward)
        for timing, (forward, backward) in zip(report.timings, pairs, strict=True)
    )
    fitted = fit_costs([replace(report, timings=timings)])
    assert all(value >= 0 for kind in KINDS for name in COEFFICIENTS for value in getattr(fitted[kind], name))


def test_a_layer_that_keeps_nothing_costs_nothing() -> None:
    (report,) = reports_of(COSTS, noise=0.0, ranks=1)
    timings = tuple(replace(timing, kept_bytes=0) for timing in report.timings)
    fitted = fit_costs([replace(report, timings=timings)])
    assert {fitted[kind].kept_bytes for kind in KINDS} == {(0.0, 0.0, 0.0, 0.0)}


def test_speeds_of_the_ranks_are_averaged() -> None:
    fitted = fit_costs(reports_of(COSTS, noise=0.0, ranks=2))
    assert fitted.optimizer_seconds_per_parameter == pytest.approx(1.5e-9)
    assert fitted.reduce_seconds_per_byte == pytest.approx(1.5e-10)
    assert fitted["language"].parameters == COSTS["language"].parameters


@given(layer_costs)
@settings(deadline=None, max_examples=25)
def test_costs_survive_their_json(costs: LayerCosts) -> None:
    assert wire.decode(LayerCosts, wire.encode(costs)) == costs
