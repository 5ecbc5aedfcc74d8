"""Traps: what makes the steps of a job slow although they are right, each with its seconds of a step and a remedy."""

import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autotune.machine.device_problems import Finding
from autotune.machine.devices import device_names, locked
from autotune.machine.hardware import default_workers
from autotune.prediction.columns import CONSTANT, WITHOUT_TARGETS, of_kind
from trials import wire
from trials.arrays import Floats
from trials.costs.coefficients import KINDS, Coefficients, LayerKind, SlowCall, SlowCause
from trials.costs.layer_costs import LayerCosts
from trials.errors import AutotuneError
from trials.job import Job
from trials.launchers.commands import EXPANDABLE, allocator_setting
from trials.machine.shared_memory import shared_memory_bytes
from trials.tasks.profiling.quick_calls import QuickCalls
from trials.units import number_of
from trials.workload import Hardware, Workload

_LEAST_SHARE = 0.05
"""Share of a step from which a trap is worth a remedy."""
_SLOW: Mapping[SlowCause, tuple[str, str]] = {
    "convolution": (
        "a convolution in {of} that is slow here",
        "another version of torch or cuDNN may run it faster; code of your own can multiply its patches "
        "(`torch.nn.functional.unfold`) with its weight",
    ),
    "dropout": (
        "attention in {of} without a fused kernel, because of its dropout",
        "set its dropout, such as `attention_dropout`, to 0 in config.json of the model folder",
    ),
    "dtype": (
        "attention in {of} without a fused kernel, because of the type of its numbers",
        "set model.dtype to bfloat16",
    ),
    "mask": (
        "attention in {of} without a fused kernel, because of its mask",
        "shorter samples (data.max_tokens) have less of it; a newer torch may have a kernel for masks",
    ),
    "widths": (
        "attention in {of} without a fused kernel, because keys and values differ in width",
        "a newer torch may have a kernel for them",
    ),
}
_OF: Mapping[LayerKind, str] = {
    "vision_embedding": "the patch embedding",
    "vision": "the vision layers",
    "projector": "the projector",
    "language": "the language layers",
    "head": "the head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trap:
    """What makes steps slow."""

    name: str
    seconds: float | None
    """Seconds of a step; None for a trap that shows only in a training."""
    remedy: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Load:
    """The mean step of one rank, where all ranks have an equal share of the work."""

    sizes: Floats
    """Columns of a step's samples, as one pack, [5]."""
    layers: Mapping[LayerKind, int]

    @classmethod
    def of(cls, work: Workload) -> "Load":
        data, model = work.data, work.model
        share = work.global_batch_samples / data.samples / work.hardware.devices
        squares = sum(tokens**2 * samples for _, tokens, samples in data.histogram)
        targets = data.target_share * data.text_tokens
        sizes = share * np.array((data.vision_units, data.text_tokens, squares, 0.0, targets))
        # All samples count as one pack: how many packs a plan makes of them is not known here.
        sizes[CONSTANT] = 1.0
        counts = (1, model.vision_layers, 1, model.language_layers, 1)
        return cls(sizes=sizes, layers=dict(zip(KINDS, counts, strict=True)))

    def seconds(self, kind: LayerKind, *coefficients: Coefficients) -> float:
        """Return the seconds of a step in all layers of a kind."""
        return self.layers[kind] * sum(float(self.sizes @ of_kind(kind, each)) for each in coefficients)

    def computing(self, costs: LayerCosts) -> float:
        """Return the seconds of a step in both passes of all layers."""
        return sum(self.seconds(kind, cost.forward_seconds, cost.backward_seconds) for kind, cost in costs.layers)


def tried_traps(job: Job, work: Workload, costs: LayerCosts | None, *, runs: bool) -> Iterator[Finding]:
    """Yield the traps of a job, by its profile, or by layers that are tried for some seconds where a device `runs`.

    None are tried while another process uses the device.
    """
    workers = job.data.workers
    if workers is None:
        workers = default_workers(work.hardware, job.search.parallel, shared_bytes=shared_memory_bytes())
    calls = costs.slow_calls if costs else ()
    try:
        if costs is None and runs:
            with locked(device_names(work.hardware, 1)[:1]):
                calls = _tried_calls(job, work)
    except AutotuneError as error:
        why, _, remedy = str(error).rpartition("; ")
        yield Finding(what=f"no convolution or attention was tried: {why}", remedy=remedy)
    yield from trap_findings(work, calls, costs, workers, os.environ)


def _tried_calls(job: Job, work: Workload) -> tuple[SlowCall, ...]:
    """Return the slow calls of the job's layers on the first device. Raise AutotuneError where they cannot run.

    They run in a process that ends: a device keeps memory for each process until then, and a server of tools lives on.
    """
    asked = QuickCalls(
        model=job.model,
        training=job.training,
        accelerator=work.hardware.accelerator,
        has_images=work.data.vision_units > 0,
    )
    command = (sys.executable, "-P", "-m", "trials.tasks.profiling.quick_calls")
    done = subprocess.run(command, input=wire.encode(asked), capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise AutotuneError(f"{last}; free the memory of the device, or measure with `autotune profile JOB`")
    found: tuple[SlowCall, ...] = wire.decode(tuple[SlowCall, ...], done.stdout)
    return found


def trap_findings(
    work: Workload, calls: Sequence[SlowCall], costs: LayerCosts | None, workers: int, environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield the traps of a job, with these slow calls and the costs of a profile; None where there is none.

    `workers` are the loading processes of a rank, `environment` its variables. With a profile, what takes less than 5 %
    of a step is left out.
    """
    load = Load.of(work)
    step = None if costs is None else load.computing(costs)
    traps = [*_of_calls(load, calls)]
    if work.hardware.accelerator == "cuda":
        traps += _of_allocator(environment)
    if costs is not None:
        traps += [*_of_frozen(load, costs), *_of_loading(work.hardware, load, costs, workers)]
    for trap in traps:
        if trap.seconds is None:
            yield Finding(what=trap.name, remedy=trap.remedy)
        elif step is None or trap.seconds >= _LEAST_SHARE * step:
            of_step = "a step" if step is None else f"a step, in which the layers take {_text(step)}"
            yield Finding(what=f"{trap.name} costs {_text(trap.seconds)} of {of_step}", remedy=trap.remedy)


def _of_calls(load: Load, calls: Sequence[SlowCall]) -> Iterator[Trap]:
    for kind, cause, slow, fast in calls:
        name, remedy = _SLOW[cause]
        seconds = load.seconds(kind, slow) - load.seconds(kind, fast)
        yield Trap(name=name.format(of=_OF[kind]), seconds=seconds, remedy=remedy)


def _of_allocator(environment: Mapping[str, str]) -> Iterator[Trap]:
    name, setting = allocator_setting(environment)
    if EXPANDABLE not in setting:
        yield Trap(
            name=f"{name}={','.join(setting)} leaves gaps between packs of changing sizes in the memory of a device; "
            "where it is nearly full, steps wait until the allocator has returned its memory and taken it again",
            seconds=None,
            remedy=f"add {EXPANDABLE} to it, or unset it",
        )


def _of_frozen(load: Load, costs: LayerCosts) -> Iterator[Trap]:
    for kind, cost in costs.layers:
        if cost.frozen_parameters < cost.parameters:
            return  # what comes behind has a backward pass for these
        if cost.has_backward or any(cost.kept_bytes):
            yield Trap(
                name=f"the backward pass of {_OF[kind]}, though nothing up to there trains,",
                seconds=load.seconds(kind, cost.backward_seconds),
                remedy="their code must not require gradients of its states (`requires_grad_`, "
                "`enable_input_require_grads`)",
            )


def _of_loading(hardware: Hardware, load: Load, costs: LayerCosts, workers: int) -> Iterator[Trap]:
    loading = float(load.sizes[WITHOUT_TARGETS] @ np.array(costs.loading.pixels_seconds))
    computing = load.computing(costs)
    # Without one, ranks compute on the cores on which they load, so that loading is a part of their work.
    spare = hardware.spare_cores()
    # Workers load while the rank computes, so it waits only for what takes longer.
    waits = loading if workers == 0 else loading / workers - computing
    if waits <= 0 or (spare == 0 and loading <= computing):
        return
    processes = number_of(workers, "loading process", "loading processes")
    needed = math.ceil(loading / computing) if computing else 1
    yield Trap(
        name=f"waiting for data, which a process loads in {_text(loading)} for a step of its rank, with {processes}",
        seconds=waits,
        remedy=f"set data.workers to {needed}"
        if workers < needed <= spare
        else "let images be made smaller by the processor (preprocessor_config.json of the model folder), or give the "
        "ranks more cores and data.workers",
    )


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
