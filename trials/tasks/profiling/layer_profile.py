"""Timing of each kind of layer alone: one layer of each is enough, however large the model."""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from trials.costs.coefficients import LayerKind, SlowCall
from trials.data.index import DatasetIndex
from trials.data.readable import check_readable
from trials.engine.compiled import compile_layers
from trials.engine.memory import SavedTensorMeter
from trials.engine.stopwatch import Stopwatch
from trials.job import ModelSection, TrainingSection
from trials.model.ends.head_loss import chunk_targets
from trials.model.inputs.encoders import load_encoder
from trials.model.weight_gradients import WeightGradients
from trials.model.weights import zero_weights
from trials.tasks.answer import LayerTiming, ProfileReport
from trials.tasks.profiling.ahead import HeadStart, host_seconds
from trials.tasks.profiling.differing import of_tower
from trials.tasks.profiling.loading import time_loading
from trials.tasks.profiling.one_of_each import OneOfEach, one_of_each
from trials.tasks.profiling.pace import slowest
from trials.tasks.profiling.probes import Probe, ProbeBytes, Run, probes
from trials.tasks.profiling.quiet import QuietTimes, Times, are_quiet, spread
from trials.tasks.profiling.slow_calls import time_slow_calls
from trials.tasks.profiling.tensor import tensor_parallel_parameters
from trials.tasks.request import ProbeSizes, Profile, Request

_QUICK_UNITS, _QUICK_TOKENS = 4, 512
"""Sizes at which one layer of the largest models takes less than a second on a CPU."""


def run_profile(request: Request, task: Profile, device: torch.device) -> ProfileReport:
    """Time every kind of layer at the sizes of `task`, on this rank's device.

    Raise DataError where this node lacks files of the data.
    """
    check_readable(DatasetIndex.load(request.index), load_encoder(request.job.model, request.job.data))
    stage = one_of_each(request.job.model, request.job.training, device)
    profiler = Profiler(stage, _takes_gradient(stage.parameters_by_kind), device, task.repeats)
    # Before they are compiled, since a function mode does not see the calls inside compiled layers.
    slow_calls = profiler.slow_calls(task.sizes)
    compile_seconds = _compile(stage, profiler, task, device) if request.job.training.compile else None
    rounds, of_all = None, None
    if (seconds := task.exchange_seconds) is not None:
        # They import DeepSpeed, which nothing else here needs.
        from trials.tasks.profiling.exchanges import ExchangeRounds, time_exchanges  # noqa: PLC0415

        of_all = partial(slowest, device)
        time_all = partial(time_exchanges, request, task, stage, device, seconds=seconds, bytes_of=profiler.sizes)
        rounds = ExchangeRounds(time_all, seconds, of_all)
        rounds.add()
    timings = profiler.timings(tuple(probes(stage, task.sizes, device)))
    if rounds:
        rounds.add()
    if are_quiet([timing.spread for timing in timings], task.curve_spread, of_all):
        timings += profiler.timings(tuple(probes(stage, task.curve_sizes, device)))
    layers = replace(
        _report(stage, timings),
        loads=time_loading(request, task.repeats),
        compile_seconds=compile_seconds,
        slow_calls=slow_calls,
    )
    if rounds is None:
        return layers
    rounds.add()
    found = rounds.medians()
    return replace(
        layers,
        communications=found.communications,
        exchanges=found.exchanges,
        updates=found.updates,
        shortened=found.shortened,
    )


def report_of_layers(
    stage: OneOfEach, profiler_of: Callable[[OneOfEach, dict[LayerKind, bool]], "Profiler"], sizes: ProbeSizes
) -> ProfileReport:
    """Return timings of the layers alone. A profiler gets the stage, and whether inputs of a kind have a gradient."""
    profiler = profiler_of(stage, _takes_gradient(stage.parameters_by_kind))
    probed = tuple(probes(stage, sizes, profiler.device))
    return _report(stage, profiler.timings(probed))


def _report(stage: OneOfEach, timings: Sequence[LayerTiming]) -> ProfileReport:
    parameters_of = stage.parameters_by_kind
    return ProfileReport(
        timings=tuple(timings),
        loads=(),
        parameters=tuple((kind, sum(each.numel() for each in of_kind)) for kind, of_kind in parameters_of.items()),
        frozen_parameters=tuple(
            (kind, sum(each.numel() for each in of_kind if not each.requires_grad))
            for kind, of_kind in parameters_of.items()
        ),
        tensor_parallel_parameters=tensor_parallel_parameters(stage),
        # The layers are timed apart, so their stage is not tied.
        tied_parameters=sum(stage.model.get_parameter(name).numel() for name in stage.tied),
        chunk_targets=chunk_targets(stage.model.config.get_text_config().vocab_size),
        kept_states=stage.kept_states,
        added_features=stage.chain.added,
    )


def quick_slow_calls(
    model: ModelSection, training: TrainingSection, device: torch.device, *, has_images: bool
) -> tuple[SlowCall, ...]:
    """Return `LayerCosts.slow_calls` in seconds, of layers without weights at small sizes.

    `has_images` says whether the data have any.
    """
    stage = one_of_each(model, training, device, zero_weights)
    units = _QUICK_UNITS if stage.cut.vision else 0
    profiler = Profiler(stage, _takes_gradient(stage.parameters_by_kind), device, repeats=1)
    sizes = ProbeSizes(unit_counts=(units,), sample_shapes=((1, _QUICK_TOKENS),), image_units=units * has_images)
    return profiler.slow_calls(sizes)


def _compile(stage: OneOfEach, profiler: "Profiler", task: Profile, device: torch.device) -> float:
    """Compile the layers of the stage; return the seconds until each kind has run at each size."""
    began = time.perf_counter()
    compile_layers(stage)
    profiler.warm_up(probes(stage, task.sizes, device))
    return time.perf_counter() - began


def _takes_gradient(parameters_of: Mapping[LayerKind, Sequence[nn.Parameter]]) -> dict[LayerKind, bool]:
    """Return for each kind whether its input has a gradient, as the input of the first layer that trains has."""
    found, before = dict[LayerKind, bool](), False
    for kind, parameters in parameters_of.items():
        itself = any(parameter.requires_grad for parameter in parameters)
        found[kind] = before or (itself and kind in ("vision", "language"))
        before = before or itself
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """Bytes that one run of a probe allocates; none are kept where there is no backward pass."""

    kept: int
    transient: int
    output: int


class Profiler:
    """Times and bytes of the layers of a stage, on this rank's device."""

    def __init__(
        self, stage: OneOfEach, takes_gradient: dict[LayerKind, bool], device: torch.device, repeats: int
    ) -> None:
        self._stage, self.device, self._repeats = stage, device, repeats
        self._stopwatch, self._head_start = Stopwatch(device), HeadStart(device)
        self._takes_gradient = takes_gradient
        self._probes: list[Probe] = []
        self._quiet = QuietTimes(lambda numbers: [self._times(self._probes[number]) for number in numbers])

    def timings(self, probes: Sequence[Probe]) -> tuple[LayerTiming, ...]:
        """Return medians over the repeats, of layers of a tower that differ the mean of the tower.

        Probes take turns, also with those of earlier calls: at one speed.
        """
        self.warm_up(probes)
        measured = [self.sizes(probe) for probe in probes]
        self._probes += probes
        times = self._quiet.measured(range(len(self._probes) - len(probes), len(self._probes)), self._repeats)
        hosts = host_seconds(probes, self._states, self.device, self._repeats)
        timings = (
            replace(_timing(probe, *each), host_seconds=hosts.get(probe.layer, 0.0))
            for probe, each in zip(probes, zip(times, measured, strict=True), strict=True)
        )
        return tuple(of_tower(probes, timings))

    def warm_up(self, probes: Iterable[Probe]) -> None:
        """Run each probe once, so that buffers are allocated, code is loaded, and layers are compiled."""
        for probe in probes:
            self._times(probe)

    def slow_calls(self, sizes: ProbeSizes) -> tuple[SlowCall, ...]:
        """Return `LayerCosts.slow_calls`, from the most units and the longest sample of `sizes`."""
        largest = replace(
            sizes,
            unit_counts=(max(sizes.unit_counts),),
            sample_shapes=(max(sizes.sample_shapes, key=lambda shape: shape[0] * shape[1] ** 2),),
        )
        probed = probes(self._stage, largest, self.device)
        return time_slow_calls(probed, lambda probe: probe.run(self._states(probe)), self.device)

    def _times(self, probe: Probe) -> Times:
        forward, backward, _ = self._pass(probe, probe.run, probe.layer)

        def added(run: Run | None, name: str | None) -> float:
            return sum(self._pass(probe, run, name)) - forward - backward if run else 0.0

        deferring = forward, backward, 0.0
        if probe.deferred is not None:
            deferring = self._pass(probe, probe.deferred[0], f"deferred {probe.layer}", probe.deferred[1])

        # The host follows each operation of a selective layer, so that a device may have to wait for it in a step too.
        return Times(
            forward,
            backward,
            added(probe.recomputed, f"recomputed {probe.layer}"),
            added(probe.selective, None),
            deferring[2],
            sum(deferring) - forward - backward,
        )

    def _pass(
        self, probe: Probe, run: Run, name: str | None, deferred: WeightGradients | None = None
    ) -> tuple[float, float, float]:
        """Return the seconds (forward, backward, deferred), under the same memory meter as a training.

        What has a name has a head start before a device, so that they are the device's alone.
        """
        states = self._states(probe)
        if name:
            self._head_start.give(name)
        began = time.perf_counter()
        # On a CPU the meter's hooks cost time on every saved tensor, in a training too.
        with nullcontext() if self.device.type == "cuda" else self._meter().watch():
            with self._stopwatch.section("forward"):
                output = run(states)
            if output.requires_grad:
                gradient = torch.ones_like(output)
                if deferred:
                    deferred.begin_pack()
                with self._stopwatch.section("backward"):
                    output.backward(gradient)
                if deferred:
                    with self._stopwatch.section("deferred"):
                        deferred.compute()
        if name:
            self._head_start.took(name, time.perf_counter() - began)
        seconds = self._stopwatch.read()
        return seconds["forward"], seconds.get("backward", 0.0), seconds.get("deferred", 0.0)

    def sizes(self, probe: Probe) -> ProbeBytes:
        """Return the bytes of one layer: what the second of two in a row adds, where a stage can hold several."""
        one = self._bytes(probe, probe.run)
        kept = self._bytes(probe, probe.twice).kept - one.kept if probe.twice else one.kept
        # The rest of the first one, such as rotary embeddings, is kept once.
        shared, transient = max(0, one.kept - kept), max(0, one.transient)
        selective = self._bytes(probe, probe.selective) if probe.selective else None
        return ProbeBytes(
            kept=kept,
            shared=shared,
            transient=transient,
            output=one.output,
            selective=selective.kept - shared if selective else 0,
            selective_peak=selective.kept + max(0, selective.transient - transient) if selective else 0,
            weight=self._deferred_bytes(self._states(probe), *probe.deferred) if probe.deferred else 0,
        )

    def _deferred_bytes(self, states: torch.Tensor, run: Run, deferred: WeightGradients) -> int:
        """Return the bytes that are kept after the backward pass."""
        meter, is_cuda = self._meter(), self.device.type == "cuda"
        before = torch.cuda.memory_allocated(self.device) if is_cuda else 0
        with nullcontext() if is_cuda else meter.watch():
            output = run(states)
            if not output.requires_grad:
                return 0
            deferred.begin_pack()
            output.backward(torch.ones_like(output))
            del output
            states.grad = None
            kept = torch.cuda.memory_allocated(self.device) - before if is_cuda else meter.live_bytes
            deferred.compute()
        return kept

    def _bytes(self, probe: Probe, run: Run) -> _Bytes:
        states, meter = self._states(probe), self._meter()
        if self.device.type == "cuda":
            return self._device_bytes(states, run)
        with meter.watch():
            output = run(states)
            kept = peak = meter.live_bytes
            # Both may compute again, and then hold more than between their passes.
            if (run is probe.selective or probe.layer == "head") and output.requires_grad:
                output.backward(torch.ones_like(output))
                peak = meter.peak_bytes
        return _Bytes(kept=kept, transient=peak - kept, output=output.numel() * output.element_size())

    def _device_bytes(self, states: torch.Tensor, run: Run) -> _Bytes:
        """Return the allocator's bytes: an output counts as kept, since the next layer keeps it as its input."""
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        output = run(states)
        after = torch.cuda.memory_allocated(self.device)
        size = output.numel() * output.element_size()
        if not output.requires_grad:
            return _Bytes(kept=0, transient=torch.cuda.max_memory_allocated(self.device) - before, output=size)
        torch.cuda.reset_peak_memory_stats(self.device)
        output.backward(torch.ones_like(output))
        peak = torch.cuda.max_memory_allocated(self.device)
        return _Bytes(kept=after - before, transient=peak - after, output=size)

    def _states(self, probe: Probe) -> torch.Tensor:
        # Layers pass a gradient on to those before them, where one of these trains.
        return probe.states.detach().clone().requires_grad_(self._takes_gradient[probe.layer])

    def _meter(self) -> SavedTensorMeter:
        return SavedTensorMeter(list(self._stage.parameters()), 0, 1 << 62)


def _timing(probe: Probe, times: Sequence[Times], sizes: ProbeBytes) -> LayerTiming:
    forward, backward, again, selective, weights, deferral = (
        statistics.median(values) for values in zip(*times, strict=True)
    )
    return LayerTiming(
        layer=probe.layer,
        units=probe.units,
        tokens=probe.tokens,
        squares=probe.squares,
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=max(0.0, again),
        kept_bytes=sizes.kept,
        shared_bytes=sizes.shared,
        transient_bytes=sizes.transient,
        output_bytes=sizes.output,
        selective_seconds=max(0.0, selective),
        selective_bytes=sizes.selective,
        selective_peak_bytes=sizes.selective_peak,
        weight_seconds=weights,
        deferral_seconds=max(0.0, deferral),
        weight_bytes=sizes.weight,
        spread=spread(times),
    )
