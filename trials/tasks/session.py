"""Sessions: the engine, data and memory meter of one rank for one request, built and closed together."""

import math
from collections import ChainMap
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from deepspeed import comm

from trials.arrays import Ints
from trials.data.epoch import Epoch, EpochSettings, Step, build_epoch
from trials.data.index import DatasetIndex
from trials.data.latest import LatestSamples
from trials.data.loader import MicroBatch, micro_batches
from trials.data.loss_weights import sample_weights
from trials.data.order import epoch_order
from trials.data.records.sample import Encoder
from trials.engine.compiled import compile_layers
from trials.engine.engine import TrainingEngine, build_engine
from trials.engine.gathering import share_weights
from trials.engine.memory import MemoryMeter, NoMeter, memory_meter
from trials.errors import NotFinite
from trials.grid import RankCoordinates
from trials.model.cut import check_layers, cut
from trials.model.inputs.encoders import load_encoder
from trials.model.paths import tensors_at
from trials.model.refusals.compiling import check_compilable
from trials.model.refusals.heads import check_degrees
from trials.model.refusals.tensor import check_tensor
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.stage import StageModule
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import WeightFiles, draw_buffers, draw_weights, read_weights
from trials.plan import Plan
from trials.sharing.group import SharingGroup, join_groups
from trials.tasks.request import Request, Training

_WHOLE = SharingGroup()

WeightSource: TypeAlias = Callable[[Sequence[str], torch.device], None]
"""Allocates the parts of a model at some paths on a device, and fills them."""


class BlankSample(NamedTuple):
    """A sample that could not be read."""

    targets: int
    reason: str
    """As one of the ranks says it, with file and line."""


@dataclass(slots=True, kw_only=True)
class Session:
    """The parts with which one rank trains."""

    request: Request
    coordinates: RankCoordinates
    device: torch.device
    engine: TrainingEngine
    meter: MemoryMeter
    index: DatasetIndex
    encoder: Encoder
    latest: LatestSamples = field(default_factory=lambda: LatestSamples("run the same command again"))
    """Those of this rank."""
    blank: dict[tuple[int, int, int, int], BlankSample] = field(default_factory=dict)
    """Samples that this rank could not read since they were taken. Their keys are the same for all ranks that have the
    pack: the reading, the first rank of the stage that has it, the pack, and the place in it."""
    _readings: int = 0

    def epoch(self, number: int) -> Epoch:
        """Build the packs and steps of epoch `number`: the same on every rank."""
        return self.build(number, self.request.plan, None)

    def build(self, number: int, plan: Plan, order: Ints | None) -> Epoch:
        """Build epoch `number` under a plan, of the samples in `order` where it is given."""
        settings = EpochSettings.of_job(self.request.job, self.request.weights)
        # The order is given to `build_epoch`, whose cache would otherwise keep the packs of every epoch of a training.
        shown = self.order(number) if order is None else order
        data = plan.layout.data
        return build_epoch(self.index, plan.packing, settings, data_parallel=data, number=number, order=shown)

    def order(self, number: int) -> Ints:
        """Return the samples of epoch `number` in their order, as rows of the index."""
        return epoch_order(self.index, self.request.job.training.seed, number)

    def batches(
        self,
        epoch: Epoch,
        steps: Sequence[int],
        workers: int | None = None,
        *,
        must_read: bool = True,
    ) -> Generator[MicroBatch, None, None]:
        """Yield this rank's packs of these steps in order; close it when done.

        Raise DataError for `on_error: fail`, and where most of the latest samples cannot be read, unless they need not
        be read: then any number of them may be blank. `workers` replace those of `data` in the job.
        """
        data = self.request.job.data
        self._readings += 1
        place = self.coordinates.rank % self.request.plan.layout.grid.of_stage
        for batch in micro_batches(
            epoch.index,
            epoch,
            steps,
            self.coordinates.data_rank,
            self.encoder,
            pixels=self.engine.stage.cut.embeds,
            workers=(data.workers or 0) if workers is None else workers,
            pin=self.device.type == "cuda",
            on_error=data.on_error if must_read else "skip",
            weighting=self.request.job.training.loss_weighting,
            within=self.engine.stage.tensor.share,
        ):
            for fault in batch.faults:
                key = self._readings, place - fault.sharer, fault.pack, fault.sample
                self.blank[key] = BlankSample(fault.targets, fault.reason)
            if must_read:
                self.latest.add(len(batch.tokens.lengths), [each.reason for each in batch.faults])
            yield batch

    def take_blank(self) -> list[BlankSample]:
        """Return the samples that any rank could not read since the last call; every rank must call it.

        Ranks of other nodes may lack other files, so that stages, or ranks that share a pack, differ.
        """
        of_ranks: list[dict[tuple[int, ...], BlankSample]] = [{}] * comm.get_world_size()
        comm.all_gather_object(of_ranks, self.blank)
        self.blank = {}
        return [sample for _, sample in sorted(ChainMap(*of_ranks).items())]

    def step(self, batches: Iterator[MicroBatch], step: Step) -> float:
        """Run one optimizer step and return its loss.

        Raise MemoryExceeded when this rank exceeds its limit, and NotFinite for a loss that is not finite.
        """
        weights = sample_weights(step.targets, self.request.job.training.loss_weighting)
        with self.meter.watch():
            loss = self.engine.step(batches, step.micro_batches, float(weights.sum()))
        if not math.isfinite(loss):
            raise not_finite("the loss of a step", loss)
        return loss


def not_finite(what: str, value: float) -> NotFinite:
    """Return the error for a value that is NaN or infinite, with the remedies."""
    return NotFinite(
        f"{what} is {value}; lower training.learning_rate or learning_rates, set training.clip_norm or a longer "
        "training.warmup, or check the data"
    )


@contextmanager
def open_session(request: Request, rank: int, device: torch.device) -> Iterator[Session]:
    """Build this rank's part of the plan. Every rank of the process group must call it."""
    torch.manual_seed(request.job.training.seed)
    degrees, grid = request.plan.packing.degrees, request.plan.layout.grid
    where = grid.coordinates(rank)
    # Tensor ranks of one data rank, which hold a copy of the stage together.
    sharing = {degree: join_groups(grid.sharing_ranks(degree), rank) for degree in sorted({1, *degrees})}
    attending = sharing
    if grid.tensor > 1:
        attending = {degree: join_groups(grid.attending_ranks(degree), rank) for degree in sorted({*degrees})}
    stage = build_stage(request, where.stage, device, sharing[1])
    if request.job.training.compile:
        compile_layers(stage)
    stage.sharing = tuple(sharing[degree] for degree in degrees)
    stage.attending = tuple(attending[degree] for degree in degrees)
    engine = build_engine(request.plan, stage, where, device, request.job.training)
    session = Session(
        request=request,
        coordinates=where,
        device=device,
        engine=engine,
        meter=_meter(request, stage, device),
        index=DatasetIndex.load(request.index),
        encoder=load_encoder(request.job.model, request.job.data),
    )
    try:
        yield session
    finally:
        engine.close()


def _meter(request: Request, stage: StageModule, device: torch.device) -> MemoryMeter:
    """Return the meter of a rank: none for a training on a CPU whose job has no limit, as it slows the passes."""
    is_bounded = request.job.hardware.memory_limit is not None or not isinstance(request.task, Training)
    if device.type == "cpu" and not is_bounded:
        return NoMeter()
    return memory_meter(device, stage, request.plan.layout, request.memory_limit_bytes)


def build_stage(request: Request, number: int, device: torch.device, tensor: SharingGroup = _WHOLE) -> StageModule:
    """Build stage `number` of the plan with its weights, on `device`: the slices of one of the `tensor` ranks.

    With ZeRO 3 a rank holds its shares of the weights, so every rank of the process group must call it.
    """
    skeleton, fill = _skeleton(request)
    check_layers(
        request.plan,
        vision_layers=len(skeleton.chain.vision_layers),
        language_layers=len(skeleton.chain.language_layers),
        dtype=request.job.model.dtype,
    )
    if request.job.training.compile:
        check_compilable(request.plan.layout)
    degree = request.plan.layout.tensor
    config, layers = skeleton.model.config, skeleton.modules(skeleton.chain.language_layers)
    check_tensor(config, layers, degree, adapters=request.job.training.lora.rank is not None)
    check_degrees(config.get_text_config(), request.plan.packing.degrees, degree)
    stage = StageModule(skeleton, cut(request.plan)[number])
    layout, training = request.plan.layout, request.job.training
    # Part by part: all parts whole may need more memory than the slices that a rank keeps.
    for path in stage.paths:
        fill((path,), device)
        stage.keep_slices(path, tensor)
        draw_trained(stage.model, (path,), training)
        if layout.shards_weights:
            share_weights(stage, path, stays=False)
    draw_buffers(stage.model, stage.chain.buffers, device)
    stage.tie()
    return stage


def unused_tensors(request: Request, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the weights that no stage holds by their names, on the CPU, as the training found them.

    `device` is the rank's, where random ones are drawn: with the same seed a GPU draws other numbers than a CPU.
    """
    skeleton, fill = _skeleton(request)
    fill(skeleton.chain.unused, device)
    tensors = (tensors_at(skeleton.model, path) for path in skeleton.chain.unused)
    return {name: tensor.cpu() for each in tensors for name, tensor in each.items()}


def _skeleton(request: Request) -> tuple[Skeleton, WeightSource]:
    """Return the job's model without weights, and where they come from."""
    settings = request.job.model
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    model, seed = skeleton.model, request.job.training.seed
    if settings.weights == "random":
        choose_trained(skeleton, request.job.training)
        return skeleton, lambda paths, device: draw_weights(model, paths, seed, device)
    # Names in the files depend on the whole model, which a stage cuts, without adapters.
    files = WeightFiles(Path(settings.path), skeleton)
    choose_trained(skeleton, request.job.training)
    return skeleton, lambda paths, device: read_weights(model, paths, files, device)
