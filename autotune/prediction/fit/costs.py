"""Fit of layer costs: time and memory of each kind of layer as a function of a pack's size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import numpy as np

from autotune.errors import ProfileError
from autotune.prediction.columns import TOKENS
from autotune.prediction.curves import fit_curve, with_floor
from autotune.prediction.fit.exchanges import fit_exchanges, slowest_exchange
from autotune.prediction.fit.robust import fit_not_negative
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, NOTHING, Coefficients, LayerKind, SlowCall, SlowCause
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import CommunicationCost, LayerCosts, LinkCost, LoadCost, UpdateCost
from trials.grid import Grid
from trials.tasks.answer import CommunicationTiming, LayerTiming, LoadTiming, ProfileReport
from trials.units import check_measured

Quantity: TypeAlias = Callable[[LayerTiming], float]

# Columns of (units, tokens, squares, 1) on which the cost of each kind depends; for the head, all tokens of a probe are
# targets. Attention is quadratic in the length of a sample, but a vision unit has a fixed length, so only language
# layers depend on squares.
_TIME_TERMS: dict[LayerKind, tuple[int, ...]] = {
    "vision_embedding": (0, 3),
    "vision": (0, 3),
    "projector": (0, 1, 3),
    "language": (1, 2, 3),
    "head": (1, 3),
}
_BYTE_TERMS: dict[LayerKind, tuple[int, ...]] = _TIME_TERMS
# Reading and encoding take a time for each unit and token, and one for each pack; no part is quadratic.
_LOAD_TERMS = (0, 1, 3)


def fit_costs(reports: Sequence[ProfileReport], nodes: int = 1) -> LayerCosts:
    """Fit non-negative coefficients to the timings of all ranks robustly, with equal weights of relative errors.

    The ranks are in order, equally many on each of the `nodes`.
    Raise ProfileError for a measurement that is negative or no number, and for a kind of layer without any.
    """
    timings = [_held_at_once(timing) for report in reports for timing in report.timings]
    loads = [timing for report in reports for timing in report.loads]
    try:
        of_ranks = ((report, *report.updates, *report.communications, *report.exchanges) for report in reports)
        for measured in (*timings, *loads, *chain.from_iterable(of_ranks)):
            check_measured(measured)
    except ValueError as error:
        raise ProfileError(
            f"the measured layer costs cannot be used: {error}; profile again on an idle machine"
        ) from error
    counts = {kind: (count, dict(reports[0].frozen_parameters)[kind]) for kind, count in reports[0].parameters}
    of_node = len(reports) // nodes if nodes > 1 else 0
    of_layouts = zip(*(report.communications for report in reports), strict=True)
    communications = tuple(_communication(timings, of_node) for timings in of_layouts)
    layers = {kind: _fit_layer([t for t in timings if t.layer == kind], kind, *counts[kind]) for kind in KINDS}
    layers["language"] = replace(layers["language"], tensor_parallel_parameters=reports[0].tensor_parallel_parameters)
    head = replace(layers["head"], tied_parameters=reports[0].tied_parameters)
    layers["head"] = _in_chunks(head, [t for t in timings if t.layer == "head"], reports[0].chunk_targets)
    return LayerCosts(
        layers=tuple(layers.items()),
        loading=LoadCost(
            pixels_seconds=_fit_load([load for load in loads if load.pixels]),
            labels_seconds=_fit_load([load for load in loads if not load.pixels]),
        ),
        link=communications[-1].link,
        updates=tuple(
            UpdateCost(
                zero=same[0].zero,
                data_parallel=same[0].data_parallel,
                seconds_per_parameter=slowest_exchange(
                    [timing.seconds_per_parameter for timing in same], len(reports), of_node
                ),
            )
            for same in zip(*(report.updates for report in reports), strict=True)
        ),
        residual=float(
            np.median(np.concatenate([np.abs(_time_ratios(timings, kind, layers[kind]) - 1) for kind in KINDS]))
        ),
        communications=communications,
        exchanges=fit_exchanges(reports, of_node),
        of_node=of_node,
        compile_seconds=_slowest_compile(reports),
        slow_calls=tuple(_slowest_calls(reports).values()),
        kept_states=reports[0].kept_states,
        added_features=reports[0].added_features,
    )


def _slowest_calls(reports: Sequence[ProfileReport]) -> dict[tuple[LayerKind, SlowCause], SlowCall]:
    """Return the calls of the rank that loses most by them, by kind of layer and cause."""
    calls = [call for report in reports for call in report.slow_calls]
    calls.sort(key=lambda call: sum(call[2]) - sum(call[3]))
    return {call[:2]: call for call in calls}


def _slowest_compile(reports: Sequence[ProfileReport]) -> float | None:
    """Return the seconds of the rank that compiled longest; None where layers were not compiled."""
    return max((report.compile_seconds for report in reports if report.compile_seconds is not None), default=None)


def _fit_layer(timings: Sequence[LayerTiming], kind: LayerKind, parameters: int, frozen: int) -> LayerCost:
    if not timings:
        if parameters:
            raise ProfileError(
                f"the profile has no times of the model's {kind} layers, so they would cost nothing; profile again "
                "with `autotune profile JOB --fresh`"
            )
        return LayerCost(  # of a kind that the model does not have
            forward_seconds=NOTHING,
            backward_seconds=NOTHING,
            recompute_seconds=NOTHING,
            kept_bytes=NOTHING,
            output_bytes=NOTHING,
            parameters=parameters,
        )
    sizes = _sizes(timings)

    def fit(quantity: Quantity, terms: tuple[int, ...]) -> Coefficients:
        return fit_not_negative(sizes, np.array([quantity(t) for t in timings], dtype=np.float64), terms)

    cost = LayerCost(
        forward_seconds=fit(lambda t: t.forward_seconds, _TIME_TERMS[kind]),
        backward_seconds=fit(lambda t: t.backward_seconds, _TIME_TERMS[kind]),
        recompute_seconds=fit(lambda t: t.recompute_seconds, _TIME_TERMS[kind]),
        kept_bytes=fit(lambda t: t.kept_bytes, _BYTE_TERMS[kind]),
        output_bytes=fit(lambda t: t.output_bytes, _BYTE_TERMS[kind]),
        shared_bytes=fit(lambda t: t.shared_bytes, _BYTE_TERMS[kind]),
        transient_bytes=fit(lambda t: t.transient_bytes, _BYTE_TERMS[kind]),
        selective_seconds=fit(lambda t: t.selective_seconds, _TIME_TERMS[kind]),
        selective_bytes=fit(lambda t: t.selective_bytes, _BYTE_TERMS[kind]),
        selective_peak_bytes=fit(lambda t: t.selective_peak_bytes, _BYTE_TERMS[kind]),
        weight_seconds=fit(lambda t: t.weight_seconds, _TIME_TERMS[kind]),
        deferral_seconds=fit(lambda t: t.deferral_seconds, _TIME_TERMS[kind]),
        weight_bytes=fit(lambda t: t.weight_bytes, _BYTE_TERMS[kind]),
        parameters=parameters,
        frozen_parameters=frozen,
    )
    kept = np.array([t.kept_bytes for t in timings], dtype=np.float64)
    # Every token of a probe of the head is a target.
    columns = np.column_stack((sizes, sizes[:, TOKENS]))
    ratios, spreads = _time_ratios(timings, kind, cost), [t.spread for t in timings]
    curve = fit_curve(kind, columns, ratios, spreads)
    if hosts := [t.host_seconds for t in timings if t.host_seconds]:
        seconds = np.array([t.forward_seconds + t.backward_seconds for t in timings])
        curve = with_floor(curve, kind, columns, float(np.median(hosts)) * ratios / seconds)
    return replace(
        cost,
        curve_sizes=curve[0],
        curve=curve[1],
        seconds_error=float(np.median(np.abs(_time_ratios(timings, kind, cost) - 1))),
        bytes_error=_largest_error(sizes, cost.kept_bytes, kept),
        # A quarter of the sizes may be noisier than this.
        noise=float(np.quantile([t.spread for t in timings], 0.75)),
    )


def _held_at_once(timing: LayerTiming) -> LayerTiming:
    """Return the timing of the head with all bytes of both passes: one that computes again keeps few in between."""
    if timing.layer != "head":
        return timing
    return replace(timing, kept_bytes=timing.kept_bytes + timing.transient_bytes, transient_bytes=0)


def _in_chunks(head: LayerCost, timings: Sequence[LayerTiming], most: int) -> LayerCost:
    """Return the cost with one line for the bytes of up to `most` targets, and one for those of more.

    Of more targets alone, no line shows which bytes do not depend on targets: none.
    """
    targets = np.array([timing.tokens for timing in timings], dtype=np.float64)
    if not 0 < most < targets.max(initial=most):
        return head
    held = np.array([timing.kept_bytes for timing in timings], dtype=np.float64)
    ones = np.ones(len(targets))
    sizes = np.column_stack((np.minimum(targets, most), np.maximum(targets - most, 0), 0 * ones, ones))
    found = fit_not_negative(sizes, held, (0, 1, 3) if targets.min() < most else (0, 1))
    of_first, of_further, _, constant = found
    if not of_first:
        return head
    return replace(
        head,
        kept_bytes=(0.0, of_first, 0.0, constant),
        chunk_targets=most,
        further_share=of_further / of_first,
        bytes_error=_largest_error(sizes, found, held),
    )


def _largest_error(sizes: Floats, found: Coefficients, measured: Floats) -> float:
    return float((np.abs(sizes @ np.array(found) - measured) / np.maximum(measured, 1)).max())


def _fit_load(timings: Sequence[LoadTiming]) -> Coefficients:
    if not timings:
        return NOTHING
    sizes = np.array([(t.units, t.tokens, 0, 1) for t in timings], dtype=np.float64)
    return fit_not_negative(sizes, np.array([t.seconds for t in timings]), _LOAD_TERMS)


def _communication(timings: Sequence[CommunicationTiming], of_node: int) -> CommunicationCost:
    """Return the cost of one layout from the timings of all ranks: a step waits for the slowest of them."""
    grid = Grid(pipeline=timings[0].pipeline, data=timings[0].data)
    inside: list[CommunicationTiming] = []
    between: list[CommunicationTiming] = []
    for rank, timing in enumerate(timings):
        if (stage := grid.coordinates(rank).stage) < grid.pipeline - 1:
            (between if of_node and grid.leaves_node(stage, of_node) else inside).append(timing)
    return CommunicationCost(
        pipeline=grid.pipeline,
        data=grid.data,
        link=_slowest(inside or between),
        bucket_bytes=timings[0].bucket_bytes,
        hidden_share=min(timing.hidden_share for timing in timings),
        between=_slowest(between) if between else None,
    )


def _slowest(timings: Sequence[CommunicationTiming]) -> LinkCost:
    return LinkCost(
        latency_seconds=max((timing.latency_seconds for timing in timings), default=0.0),
        seconds_per_byte=max((timing.seconds_per_byte for timing in timings), default=0.0),
    )


def _sizes(timings: Sequence[LayerTiming]) -> Floats:
    return np.array([(t.units, t.tokens, t.squares, 1) for t in timings], dtype=np.float64).reshape(-1, 4)


def _time_ratios(timings: Sequence[LayerTiming], kind: LayerKind, cost: LayerCost) -> Floats:
    """Return measured over fitted seconds of a kind of layer."""
    of_kind = [t for t in timings if t.layer == kind]
    measured = np.array([t.forward_seconds + t.backward_seconds for t in of_kind])
    fitted = _sizes(of_kind) @ (np.array(cost.forward_seconds) + np.array(cost.backward_seconds))
    ratios: Floats = measured / np.maximum(fitted, np.finfo(float).tiny)
    return ratios
