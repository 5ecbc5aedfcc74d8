"""Reports of ranks that profiled layers with known costs."""

import numpy as np

from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts
from trials.tasks.answer import (
    CommunicationTiming,
    ExchangeTiming,
    LayerTiming,
    LoadTiming,
    ProfileReport,
    UpdateTiming,
)

UNITS = (1, 2, 4, 8, 16, 24)
SHAPES = ((1, 64), (4, 64), (1, 256), (2, 256), (1, 600), (8, 128))


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
        recompute_seconds=float(columns @ cost.recompute_seconds) * noise[0],
        shared_bytes=tokens,
        transient_bytes=0,
        spread=0.01,
    )


def load_seconds(pixels: bool, units: int, tokens: int) -> float:
    return 2e-3 * units * pixels + 3e-6 * tokens + 4e-4


def reports_of(costs: LayerCosts, noise: float, ranks: int = 2) -> list[ProfileReport]:
    """Return reports of ranks with these layer costs and relative noise."""
    random = np.random.default_rng(0)

    def factors() -> tuple[float, float]:
        first, second = random.normal(1, noise, 2).tolist()
        return first, second

    return [
        ProfileReport(
            timings=tuple(timing(kind, size, costs[kind], factors()) for kind in KINDS for size in sizes_of(kind)),
            parameters=tuple((kind, costs[kind].parameters) for kind in KINDS),
            frozen_parameters=tuple((kind, costs[kind].frozen_parameters) for kind in KINDS),
            updates=(
                UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=(rank + 2) * 1e-9),
                UpdateTiming(zero=1, data_parallel=ranks, seconds_per_parameter=(rank + 5) * 1e-9),
            ),
            loads=tuple(
                LoadTiming(pixels=pixels, units=units, tokens=tokens, seconds=load_seconds(pixels, units, tokens))
                for pixels in (True, False)
                for units, tokens in ((1, 100), (3, 90), (2, 400), (8, 500), (9, 900))
            ),
            communications=tuple(
                CommunicationTiming(
                    pipeline=pipeline,
                    data=ranks // pipeline,
                    latency_seconds=1e-4 * (rank + 1) * (pipeline - 1),
                    seconds_per_byte=1e-9 * (rank + 1) * (pipeline - 1),
                )
                for pipeline in range(1, ranks + 1)
                if ranks % pipeline == 0
            ),
            exchanges=tuple(
                ExchangeTiming(
                    name="average",
                    ranks=ranks // pipeline,
                    pipeline=pipeline,
                    backward_seconds=1e-10 * (1 + rank % (ranks // pipeline)) * (ranks // pipeline - 1),
                )
                for pipeline in range(1, ranks)
                if ranks % pipeline == 0
            ),
        )
        for rank in range(ranks)
    ]
