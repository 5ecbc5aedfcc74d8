"""Fit of layer costs: time and memory of each kind of layer as a function of a pack's size."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from statistics import fmean
from typing import TypeAlias

import numpy as np

from autotune.errors import ProfileError
from autotune.prediction.columns import TOKENS
from autotune.prediction.curves import fit_curve, with_floor
from autotune.prediction.robust_fit import fit_not_negative
from trials.arrays import Floats
from trials.grid import Grid
from trials.layer_costs import (
    KINDS,
    NOTHING,
    Coefficients,
    CommunicationCost,
    GatherCost,
    LayerCost,
    LayerCosts,
    LayerKind,
    LinkCost,
    LoadCost,
    SharingCost,
    SlowCall,
    SlowCause,
    TensorCost,
    UpdateCost,
)
from trials.tasks.answer import (
    CommunicationTiming,
    GatherTiming,
    LayerTiming,
    LoadTiming,
    ProfileReport,
    SharingTiming,
    TensorTiming,
)
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
_LOAD_TERMS = (0, 1, 3)
_EXCHANGE_TERMS = (1, 3)


def fit_costs(reports: Sequence[ProfileReport], nodes: int = 1) -> LayerCosts:
    """Fit non-negative coefficients to the timings of all ranks robustly, with equal weights of relative errors.

    The ranks are in order, equally many on each of the `nodes`.
    Raise ProfileError for a measurement that is negative or no number, and for a kind of layer without any.
    """
    timings = [timing for report in reports for timing in report.timings]
    loads = [timing for report in reports for timing in report.loads]
    try:
        of_ranks = (
            (report, *report.updates, *report.communications, *report.sharing, *report.tensor, *report.gathers)
            for report in reports
        )
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
    sharing = [*zip(*(report.sharing for report in reports), strict=True)]
    tensor = [*zip(*(report.tensor for report in reports), strict=True)]
    gathers = [*zip(*(report.gathers for report in reports), strict=True)]
    layers = {kind: _fit_layer([t for t in timings if t.layer == kind], kind, *counts[kind]) for kind in KINDS}
    layers["language"] = replace(layers["language"], dealt_parameters=reports[0].dealt_parameters)
    layers["head"] = replace(layers["head"], tied_parameters=reports[0].tied_parameters)
    for first, *_ in gathers:
        layers[first.layer] = replace(
            layers[first.layer],
            gathered_parameters=first.gathered_parameters,
            lingering_parameters=first.lingering_parameters,
        )
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
                seconds_per_parameter=_of_all([timing.seconds_per_parameter for timing in same], of_node),
            )
            for same in zip(*(report.updates for report in reports), strict=True)
        ),
        reduce_seconds_per_byte=communications[0].reduce_seconds_per_byte,
        residual=float(
            np.median(np.concatenate([np.abs(_time_ratios(timings, kind, layers[kind]) - 1) for kind in KINDS]))
        ),
        communications=communications,
        sharing=tuple(
            _fit_sharing([of_ranks for of_ranks in sharing if of_ranks[0].degree == degree])
            for degree in sorted({of_ranks[0].degree for of_ranks in sharing})
        ),
        tensor=tuple(
            _fit_tensor([of_ranks for of_ranks in tensor if of_ranks[0].degree == degree])
            for degree in sorted({of_ranks[0].degree for of_ranks in tensor})
        ),
        gathers=(_gather_cost(reports, gathers, of_node),) if gathers else (),
        host_seconds_per_byte=_slowest_copies(reports),
        of_node=of_node,
        compile_seconds=_slowest_compile(reports),
        compiled_shares=tuple(
            (of_ranks[0][0], fmean(share for _, share, _ in of_ranks), max(spread for *_, spread in of_ranks))
            for of_ranks in zip(*(report.compiled_shares for report in reports), strict=True)
        ),
        slow_calls=tuple(_slowest_calls(reports).values()),
    )


def _slowest_calls(reports: Sequence[ProfileReport]) -> dict[tuple[LayerKind, SlowCause], SlowCall]:
    """Return the calls of the rank that loses most by them, by kind of layer and cause."""
    calls = [call for report in reports for call in report.slow_calls]
    calls.sort(key=lambda call: sum(call[2]) - sum(call[3]))
    return {call[:2]: call for call in calls}


def _slowest_compile(reports: Sequence[ProfileReport]) -> float | None:
    """Return the seconds of the rank that compiled longest; None where layers ran as they are."""
    return max((report.compile_seconds for report in reports if report.compile_seconds is not None), default=None)


def _slowest_copies(reports: Sequence[ProfileReport]) -> tuple[float, float] | None:
    """Return the seconds per byte of the rank whose copies to the host, and back, take longest."""
    timed = [report.host_seconds_per_byte for report in reports if report.host_seconds_per_byte is not None]
    return (max(out for out, _ in timed), max(back for _, back in timed)) if timed else None


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
        bytes_error=float((np.abs(sizes @ np.array(cost.kept_bytes) - kept) / np.maximum(kept, 1)).max()),
        # A quarter of the sizes may be noisier than this.
        noise=float(np.quantile([t.spread for t in timings], 0.75)),
    )


def _fit_load(timings: Sequence[LoadTiming]) -> Coefficients:
    sizes = np.array([(t.units, t.tokens, 0, 1) for t in timings], dtype=np.float64)
    return fit_not_negative(sizes, np.array([t.seconds for t in timings]), _LOAD_TERMS)


def _fit_sharing(sizes: Sequence[Sequence[SharingTiming]]) -> SharingCost:
    """Return the costs of one sequence degree from the timings of all ranks, by size."""
    degree = sizes[0][0].degree
    parts = np.array([(0, ranks[0].tokens / degree, ranks[0].squares / degree, 1) for ranks in sizes])

    def seconds(quantity: Callable[[SharingTiming], float]) -> Coefficients:
        return _fit_exchange(parts, degree, [[quantity(rank) for rank in ranks] for ranks in sizes])

    def held(quantity: Callable[[SharingTiming], int]) -> Coefficients:
        most = [max(map(quantity, ranks)) for ranks in sizes]
        return fit_not_negative(parts, np.array(most, dtype=np.float64), _BYTE_TERMS["language"])

    return SharingCost(
        degree=degree,
        language_forward_seconds=seconds(lambda rank: rank.language_forward_seconds),
        language_backward_seconds=seconds(lambda rank: rank.language_backward_seconds),
        projector_forward_seconds=seconds(lambda rank: rank.projector_forward_seconds),
        projector_backward_seconds=seconds(lambda rank: rank.projector_backward_seconds),
        kept_bytes=held(lambda rank: rank.kept_bytes),
        shared_bytes=held(lambda rank: rank.shared_bytes),
        transient_bytes=held(lambda rank: rank.transient_bytes),
    )


def _fit_tensor(sizes: Sequence[Sequence[TensorTiming]]) -> TensorCost:
    """Return the costs of one tensor degree from the timings of all ranks, by size."""
    degree = sizes[0][0].degree
    parts = np.array([(0, ranks[0].tokens / degree, 0, 1) for ranks in sizes])
    return TensorCost(
        degree=degree,
        forward_seconds=_fit_exchange(parts, degree, [[rank.forward_seconds for rank in ranks] for ranks in sizes]),
        backward_seconds=_fit_exchange(parts, degree, [[rank.backward_seconds for rank in ranks] for ranks in sizes]),
    )


def _gather_cost(
    reports: Sequence[ProfileReport], gathers: Sequence[Sequence[GatherTiming]], of_node: int
) -> GatherCost:
    """Return the costs of ZeRO 3 from the timings of all ranks, by kind of layer."""
    of_kinds = {ranks[0].layer: _of_all([timing.seconds for timing in ranks], of_node) for ranks in gathers}
    embedding, vision, projector, language, head = (of_kinds.get(kind, 0.0) for kind in KINDS)
    return GatherCost(
        data=len(reports),
        seconds=(embedding, vision, projector, language, head),
        scatter_seconds_per_byte=_of_all([report.scatter_seconds_per_byte for report in reports], of_node),
    )


def _of_all(seconds: Sequence[float], of_node: int) -> float:
    """Return the seconds of an exchange of all ranks, `of_node` on each of several nodes, for those of each rank.

    All begin together, and the last one waits for no other, so that its time is the least. On several nodes a rank
    behind the link between them receives more by it, and ends later than its neighbours on the node; the next exchange
    waits for it. So the least is taken of ranks at the same place of their nodes, and the most of the places.
    """
    places = np.array(seconds).reshape(-1, of_node or 1)
    return float(places.min(axis=0).max())


def _fit_exchange(parts: Floats, degree: int, seconds: Sequence[Sequence[float]]) -> Coefficients:
    """Return the coefficients of `parts` [sizes, 4] for the seconds of all ranks, by size."""
    # The last rank of a group waits for no other, and a step waits for the slowest group.
    slowest = [np.array(of_ranks).reshape(-1, degree).min(axis=1).max() for of_ranks in seconds]
    return fit_not_negative(parts, np.array(slowest), _EXCHANGE_TERMS)


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
        reduce_seconds_per_byte=max(timing.reduce_seconds_per_byte for timing in timings),
        within=timings[0].within,
        within_seconds_per_byte=max(timing.within_seconds_per_byte for timing in timings),
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
