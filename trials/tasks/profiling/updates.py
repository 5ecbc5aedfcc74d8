"""Timing of what follows the passes of a step: reduction of gradients and the optimizer, as the engine runs them."""

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from deepspeed import comm

from trials.data.loader import MicroBatch
from trials.engine.base import OPTIMIZER
from trials.engine.engine import build_engine
from trials.engine.optimizer import build_optimizer
from trials.engine.static_memory import GRADIENT_BYTES
from trials.engine.stopwatch import Stopwatch
from trials.job import TrainingSection
from trials.model.family import join_samples
from trials.model.stage import StageModule
from trials.plan import Layout, Padded, Plan
from trials.stage import Stage as PlanStage
from trials.tasks.answer import UpdateTiming
from trials.tasks.profiling.caches import Caches
from trials.tasks.profiling.pace import Pace
from trials.tasks.request import Profile, Request

_WARMUP = 2
"""Steps in which the optimizer allocates its states and the engine its buffers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeRates:
    """Exchanges of all ranks in data parallel, as they were timed."""

    reduction: float
    """Seconds per byte of averaging gradients."""
    gathering: float
    """Seconds per parameter of gathering weights of which each rank holds a shard."""


def time_updates(
    request: Request, task: Profile, build: Callable[[], StageModule], rates: ExchangeRates, pace: Pace
) -> tuple[UpdateTiming, ...]:
    """Time updates of a single rank, and of all ranks in data parallel with each ZeRO stage. Every rank must call it.

    Those of a single rank are the engine's where it is alone, else those of the optimizer.
    `build` makes a stage with one layer of each kind. On links over which a step takes too long, its update is that of
    a single rank; with ZeRO 1 it is divided by the ranks, which then gather the weights.
    """
    ranks = comm.get_world_size()
    layouts = [Layout(pipeline=1, data=ranks, zero=zero) for zero in task.zero_stages] if ranks > 1 else []
    # Each stage is freed before the next one is built: of a large model, only one fits.
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in build().parameters()]
    size = sum(count for count, trains in counts if trains)
    if ranks > 1:
        alone = _optimizer_seconds(build(), request.job.training, task.repeats) / size
    else:
        layout = Layout(pipeline=1, data=1, zero=task.zero_stages[0])
        alone = _engine_seconds(request, layout, build(), task.repeats) / size
    timings = [UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=alone)]
    reducing, sending = rates.reduction * size * GRADIENT_BYTES, rates.gathering * sum(count for count, _ in counts)
    for layout in layouts:
        computing = alone / ranks if layout.zero else alone
        exchanging = reducing + (rates.gathering * size if layout.zero else 0.0)
        # An engine that is built sends all weights to all ranks.
        if repeats := pace.repeats(f"update with ZeRO {layout.zero}", max(exchanging, sending), task.repeats):
            # An engine leaves its hooks on the parameters, so each has its own.
            together = _engine_seconds(request, layout, build(), repeats)
            # On a slow link the small difference has a large error.
            per_parameter = max(computing, (together - reducing) / size)
        else:
            per_parameter = computing + (rates.gathering if layout.zero else 0.0)
        timings.append(UpdateTiming(zero=layout.zero, data_parallel=ranks, seconds_per_parameter=per_parameter))
    return tuple(timings)


class _OfUpdates(Stopwatch):
    """Empties the caches before an update: one layer of each kind would fit into them, and a stage does not."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._caches = Caches(device)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        if name == OPTIMIZER:
            self._caches.empty()
            if comm.is_initialized():
                comm.barrier()  # ranks end it at different times
        with super().section(name):
            yield


def _optimizer_seconds(stage: StageModule, training: TrainingSection, repeats: int) -> float:
    stage.float()  # the engine updates float32 copies of bfloat16 weights
    parameters = [parameter for parameter in stage.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = build_optimizer(stage, training)
    stopwatch = _OfUpdates(parameters[0].device)
    seconds = []
    for _ in range(_WARMUP + repeats):
        with stopwatch.section(OPTIMIZER):
            optimizer.step()
        seconds.append(stopwatch.read()[OPTIMIZER])
    return statistics.median(seconds[_WARMUP:])


def _engine_seconds(request: Request, layout: Layout, stage: StageModule, repeats: int) -> float:
    held = PlanStage(vision=len(stage.cut.vision), language=len(stage.cut.language))
    plan = Plan(packing=Padded(samples=1), layout=layout, stages=(held,))
    # Only the optimizer's step is timed, so one vision unit and a token are enough.
    images = stage.family.random_images(stage.model.config, 1)
    ids = torch.cat((images.input_ids, torch.zeros(1, dtype=torch.long)))
    batch = MicroBatch(
        pixel_values=images.pixels,
        tokens=join_samples(stage.family, stage.model.config, [(ids, images.grids)]),
        labels=torch.zeros_like(ids),
    )
    device = next(stage.parameters()).device
    where = layout.grid.coordinates(comm.get_rank())
    engine = build_engine(plan, stage, where, device, request.job.training)
    engine.stopwatch = _OfUpdates(device)
    seconds = []
    try:
        for _ in range(_WARMUP + repeats):
            comm.barrier()
            engine.step(iter([batch]), 1, len(batch.labels))
            seconds.append(engine.stopwatch.read()[OPTIMIZER])
    finally:
        engine.close()
    return statistics.median(seconds[_WARMUP:])
