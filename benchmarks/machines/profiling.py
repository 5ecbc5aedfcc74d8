"""The profile of a simulated machine: its single layers, measured at the sizes and fitted by the fit of the product."""

from collections.abc import Iterator

import numpy as np

from autotune.dimensions.usual import zero_stages
from autotune.prediction.features import COSTS, scaled
from autotune.prediction.fit.costs import fit_costs
from autotune.search.execution.profiling import design
from benchmarks.machines.dials import Dials
from benchmarks.machines.machine import Machine
from trials.costs.coefficients import KINDS, LayerKind
from trials.costs.layer_costs import LayerCosts
from trials.data.index import DatasetIndex
from trials.grid import Grid
from trials.job import SearchSection
from trials.tasks.answer import (
    CommunicationTiming,
    ExchangeTiming,
    LayerTiming,
    LoadTiming,
    ProfileReport,
    UpdateTiming,
)
from trials.tasks.request import ProbeSizes, Profile
from trials.workload import DataProfile, ModelShape

_TEXT_TOKENS = (1, 256, 64, 1024)
"""Text next to the images of a probe, as in `trials.tasks.profiling.probes`."""
_PACK_SAMPLES = (1, 1, 2, 2, 4, 4)
"""Samples of the packs whose loading is timed, as in `trials.tasks.profiling.loading`."""
_WRONG = 1.3
"""Factor by which each factor is wrong at dial 1."""


def profiled(
    machine: Machine,
    bytes_of: LayerCosts,
    data: DataProfile,
    model: ModelShape,
    index: DatasetIndex,
    *,
    sees_all: bool = True,
) -> LayerCosts:
    """Return the costs that a profile of the machine gives. `bytes_of` gives the bytes of its layers.

    Unless it `sees_all`, it sees decoding where that `is_profiled` alone.
    """
    task = design(data, model, zero_stages(model, machine.devices), machine.devices, SearchSection().trial_timeout)
    report = _report(machine, bytes_of, task, index, sees_all=sees_all)
    costs = fit_costs([report] * machine.devices)  # all ranks measure alike
    return costs.with_workers(machine.decoding.workers if machine.decoding is not None else 0)


def distorted(costs: LayerCosts, dials: Dials, seed: int) -> LayerCosts:
    """Return the costs with each factor wrong by the dial, up or down at random."""
    signs = np.random.default_rng([seed, 6]).choice((-1.0, 1.0), len(COSTS))
    return scaled(costs, _WRONG ** (dials.profile * signs))


def _report(
    machine: Machine, bytes_of: LayerCosts, task: Profile, index: DatasetIndex, *, sees_all: bool
) -> ProfileReport:
    devices = machine.devices
    alone = UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=machine.update_per_parameter(1))
    together = machine.update_per_parameter(devices)
    degrees = (pipeline for pipeline in range(1, devices + 1) if devices % pipeline == 0)
    grids = [Grid(pipeline=pipeline, data=devices // pipeline) for pipeline in degrees]
    return ProfileReport(
        timings=(*_timings(machine, bytes_of, task.sizes), *_timings(machine, bytes_of, task.curve_sizes)),
        loads=tuple(_loads(machine, index, sees_all=sees_all)),
        parameters=tuple((kind, machine.works[kind].parameters) for kind in KINDS),
        frozen_parameters=tuple((kind, 0) for kind in KINDS),
        updates=(
            alone,
            *(
                UpdateTiming(zero=zero, data_parallel=devices, seconds_per_parameter=together)
                for zero in task.zero_stages
            ),
        ),
        communications=tuple(_communication(machine, grid) for grid in grids),
        exchanges=tuple(_averages(machine, grid) for grid in grids if grid.data > 1),
    )


def _communication(machine: Machine, grid: Grid) -> CommunicationTiming:
    network, dials = machine.network, machine.dials
    links = [network.message_factor(grid, dials, stage) for stage in range(grid.pipeline - 1)]
    return CommunicationTiming(
        pipeline=grid.pipeline,
        data=grid.data,
        latency_seconds=network.latency_seconds if links else 0.0,
        seconds_per_byte=network.seconds_per_byte * max(links, default=0.0),
    )


def _averages(machine: Machine, grid: Grid) -> ExchangeTiming:
    rings = [machine.network.ring_seconds(grid, machine.dials, stage) for stage in range(grid.pipeline)]
    return ExchangeTiming(name="average", ranks=grid.data, pipeline=grid.pipeline, backward_seconds=max(rings))


def _timings(machine: Machine, bytes_of: LayerCosts, sizes: ProbeSizes) -> Iterator[LayerTiming]:
    image_tokens = machine.works["projector"].rows_per_unit
    for number, units in enumerate(sizes.unit_counts):
        tokens = units * image_tokens + _TEXT_TOKENS[number % len(_TEXT_TOKENS)]
        yield _timing(machine, bytes_of, "vision_embedding", (units, 0, 0))
        yield _timing(machine, bytes_of, "vision", (units, 0, 0))
        yield _timing(machine, bytes_of, "projector", (units, tokens, 0))
    for samples, length in sizes.sample_shapes:
        yield _timing(machine, bytes_of, "language", (0, samples * length, samples * length**2))
        yield _timing(machine, bytes_of, "head", (0, samples * length, 0))


def _timing(machine: Machine, bytes_of: LayerCosts, kind: LayerKind, sizes: tuple[int, int, int]) -> LayerTiming:
    units, tokens, squares = sizes
    # All tokens of a probe are targets.
    seconds = machine.kernels.layer(machine.works[kind], np.array([(units, tokens, squares, tokens)], dtype=np.float64))
    forward, backward, selective = (
        float(np.maximum(computing, launching)[0])
        for computing, launching in (
            (seconds.forward, seconds.launch_forward),
            (seconds.backward, seconds.launch_backward),
            (seconds.selective, seconds.launch_selective),
        )
    )
    row, cost = np.array((*sizes, 1.0)), bytes_of[kind]
    kept, output, kept_selectively, most = (
        round(float(row @ np.array(each)))
        for each in (cost.kept_bytes, cost.output_bytes, cost.selective_bytes, cost.selective_peak_bytes)
    )
    return LayerTiming(
        layer=kind,
        units=units,
        tokens=tokens,
        squares=squares,
        forward_seconds=forward,
        backward_seconds=backward,
        kept_bytes=kept,
        output_bytes=output,
        recompute_seconds=forward if kind in ("vision", "language") else 0.0,
        shared_bytes=0,
        transient_bytes=0,
        selective_seconds=selective,
        selective_bytes=kept_selectively,
        selective_peak_bytes=most,
        spread=0.01,
    )


def _loads(machine: Machine, index: DatasetIndex, *, sees_all: bool) -> Iterator[LoadTiming]:
    chance = np.random.default_rng(0)
    for count in _PACK_SAMPLES:
        rows = chance.integers(len(index), size=count)
        units, tokens = int(index.vision_units[rows].sum()), int(index.text_tokens[rows].sum())
        for pixels in (True, False):
            sizes = (np.array([float(units)]), np.array([float(tokens)]))
            seconds = float(machine.load_seconds(*sizes, pixels=pixels)[0])
            if machine.decoding is not None and (machine.decoding.is_profiled or sees_all):
                seconds += float(machine.decoding.samples[rows].sum())
            yield LoadTiming(pixels=pixels, units=units, tokens=tokens, seconds=seconds)
