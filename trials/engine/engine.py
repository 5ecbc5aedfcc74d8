"""Engines that run the optimizer steps of a plan: DeepSpeed's two, or torch alone with data parallelism alone."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol, cast

import deepspeed
import torch
from deepspeed import comm
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.utils import clip_grad_norm_
from torch import nn

from trials.data.loader import MicroBatch
from trials.data.tokens import PackTokens, unpack
from trials.engine.base import BACKWARD, FORWARD, LOAD, OPTIMIZER, EngineBase, OneStage, without_dropout
from trials.engine.configuration import configuration, import_muon
from trials.engine.copying import States
from trials.engine.frozen_stages import Instructions, instructions_of
from trials.engine.gradients.clipping import count_in_norm, join_norms
from trials.engine.gradients.messages import in_buckets, sum_gradients
from trials.engine.gradients.node_reduction import NodeReduction
from trials.engine.replica_engine import ReplicaEngine
from trials.engine.sharded_engine import ShardedEngine
from trials.engine.state import OptimizerState
from trials.engine.stopwatch import Stopwatch
from trials.engine.zero_bubble import ComputeWeightGradients, ZeroBubbleSchedule
from trials.grid import RankCoordinates
from trials.job import TrainingSection
from trials.model.cut import cut
from trials.model.ends.head_loss import Targets
from trials.model.stage import StageModule
from trials.plan import Layout, Plan

_SECTIONS = {
    schedule.LoadMicroBatch: LOAD,
    schedule.ForwardPass: FORWARD,
    schedule.BackwardPass: BACKWARD,
    ComputeWeightGradients: BACKWARD,
    schedule.ReduceTiedGrads: OPTIMIZER,
    schedule.ReduceGrads: OPTIMIZER,
    schedule.OptimizerStep: OPTIMIZER,
}
"""The section of the stopwatch for each instruction of DeepSpeed's pipeline that is timed."""


class TrainingEngine(Protocol):
    """One rank's part in training a plan."""

    stage: StageModule
    stopwatch: Stopwatch
    state: OptimizerState

    @abstractmethod
    def step(self, batches: Iterator[MicroBatch], count: int, total_weight: float) -> float:
        """Run one optimizer step over `count` packs of this rank; all ranks must call it together.

        Return the mean loss over the targets of all packs of the step, on every rank. `total_weight` is the sum of
        their weights: their number, where packs have none.
        """

    @abstractmethod
    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> tuple[float, int]:
        """Run `count` packs of this rank forward, without dropout; all ranks must call it together.

        Return (cross-entropy times weight, summed over the target tokens of all ranks; number of these tokens), on
        every rank.
        """

    @property
    @abstractmethod
    def gradient_norm(self) -> float | None:
        """Norm of the whole model's gradient in the last step, before clipping; None where nothing needed it."""

    @abstractmethod
    def scale_learning_rates(self, factor: float) -> None:
        """Set the learning rates of the next steps to `factor` times the configured ones."""

    @abstractmethod
    def close(self) -> None:
        """Release all memory, so that the process can build another engine. Must be called once, at the end."""


def build_engine(
    plan: Plan, stage: StageModule, where: RankCoordinates, device: torch.device, training: TrainingSection
) -> TrainingEngine:
    """Build the engine for this rank. Every rank of the process group must call it."""
    import_muon()
    if plan.layout.pipeline > 1:
        return PipelineEngine(plan, stage, where, device, training)
    if plan.layout.whole_copies:
        return ReplicaEngine(plan, stage, device, training)
    if plan.layout.zero > 1:
        return ShardedEngine(plan, stage, device, training)
    return PlainEngine(plan, stage, device, training)


class _DeepSpeedEngine(EngineBase):
    """What both of DeepSpeed's engines share."""

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        super().__init__(plan, stage, device, training)
        self._configuration = configuration(plan.layout, training, stage.model.dtype)
        self._engine: Any

    @property
    def gradient_norm(self) -> float | None:
        # DeepSpeed computes it to clip, and for ZeRO.
        norm = self._engine.get_global_grad_norm()
        if norm is None:
            return None
        return float(norm) if norm >= 0 else math.nan  # -1 stands for one that is not finite

    def close(self) -> None:
        self._engine.destroy()
        # Its last tensors hold their graphs, whose hooks hold the engine: a cycle through C++ that no collector sees.
        vars(self._engine).clear()
        del self._engine, self.state

    def _take_state(self) -> None:
        join_norms(self._engine.optimizer)
        self._engine.allreduce_no_retain = partial(_average, self._engine)
        self._engine.clip_fp32_gradients = partial(_clip, self._engine)
        if self._plan.layout.reduce_within > 1:
            NodeReduction(self._plan.layout.grid, self._plan.layout.reduce_within).take_over(self._engine)
        self.state = OptimizerState(self._engine.optimizer, self._optimizer, self.stage)


class PlainEngine(OneStage, _DeepSpeedEngine):
    """One stage on every rank: data parallelism with tensor ranks, or first in each node."""

    def __init__(self, plan: Plan, stage: StageModule, device: torch.device, training: TrainingSection) -> None:
        super().__init__(plan, stage, device, training)
        # Unmanaged: the number of packs in a step may change, and `step` is where gradients are reduced.
        config = self._configuration | {"managed_gradient_accumulation": False}
        mpu = None
        if plan.layout.tensor > 1:
            mpu = PipelineParallelGrid(topology=_topology(plan.layout))
            count_in_norm(stage)
        self._engine, *_ = deepspeed.initialize(
            model=stage, optimizer=self._optimizer, config=config, dist_init_required=False, mpu=mpu
        )
        self._take_state()

    def _loss(self, inputs: States, targets: Targets) -> torch.Tensor:
        loss: torch.Tensor = self._engine(inputs, targets)
        return loss

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:  # noqa: ARG002 (averages follow in `_update`)
        self._engine.backward(loss)

    def _update(self) -> None:
        sum_gradients(self._engine, self.stage)
        self._engine.step()


class PipelineEngine(_DeepSpeedEngine):
    """Stages on different ranks, with DeepSpeed's 1F1B schedule, or ZB-H1 by its instructions."""

    def __init__(
        self,
        plan: Plan,
        stage: StageModule,
        where: RankCoordinates,
        device: torch.device,
        training: TrainingSection,
    ) -> None:
        super().__init__(plan, stage, device, training)
        self._engine, *_ = deepspeed.initialize(
            model=_Pipeline(plan, stage, where),
            optimizer=self._optimizer,
            # Its partitioned messages expect that tensor ranks send the same states, of one shape in all packs.
            config=self._configuration | {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}},
            dist_init_required=False,
        )
        self._take_state()
        self._count_of_targets = 0
        """Targets of the packs that the last stage has run; an evaluation counts them from 0."""
        runs = {
            **self._engine._INSTRUCTION_MAP,
            schedule.LoadMicroBatch: _load,
            schedule.RecvActivation: _receive,
            schedule.ForwardPass: self._forward,
            schedule.ReduceTiedGrads: self._reduce_copies,
        }
        if stage.cut.most_deferred:
            runs = {**runs, **self._deferring(stage, runs)}
        usual = {kind: self._timed(_SECTIONS[kind], run) if kind in _SECTIONS else run for kind, run in runs.items()}
        self._engine._INSTRUCTION_MAP = instructions_of(stage, usual)

    def _deferring(self, stage: StageModule, runs: Instructions) -> Instructions:
        """Let the stage defer its weight gradients, and the schedule say when they are computed."""
        deferred = stage.defer_weight_gradients()

        def backward(engine: Any, buffer_id: int) -> None:
            deferred.begin_pack()
            runs[schedule.BackwardPass](engine, buffer_id=buffer_id)

        def receive_gradient(engine: Any, buffer_id: int) -> None:
            runs[schedule.RecvGrad](engine, buffer_id=buffer_id)
            # It holds the gradient, which may be deferred, and would receive the next states.
            engine._grad_layer_buf.clear()

        def new_schedule() -> ZeroBubbleSchedule:
            own = self._engine
            return ZeroBubbleSchedule(
                micro_batches=own.micro_batches,
                stages=own.num_stages,
                stage_id=own.stage_id,
                most_deferred=stage.cut.most_deferred,
            )

        self._engine._train_schedule = new_schedule
        return {
            schedule.RecvGrad: receive_gradient,
            schedule.BackwardPass: backward,
            ComputeWeightGradients: lambda _: deferred.compute(),
        }

    def _reduce_copies(self, engine: Any) -> None:
        """Add up gradients of weights that tensor ranks hold whole, and of both copies of a tied weight."""
        sum_gradients(engine, self.stage)
        engine._exec_reduce_tied_grads()

    def _timed(self, section: str, run: Callable[..., None]) -> Callable[..., None]:
        def run_timed(engine: Any, **arguments: Any) -> None:
            with self.stopwatch.section(section):  # looked up at each call: a caller may set another stopwatch
                run(engine, **arguments)

        return run_timed

    def step(self, batches: Iterator[MicroBatch], count: int, total_weight: float) -> float:
        self._engine.set_train_batch_size(count * self._plan.layout.data)
        scale = count * self._plan.layout.data / total_weight
        loss = self._engine.train_batch(self._copied(batches, scale))
        return float(self._of_tensor_ranks(loss))

    def evaluate(self, batches: Iterator[MicroBatch], count: int) -> tuple[float, int]:
        self._count_of_targets = 0
        with without_dropout(self.stage):
            loss = self._engine.eval_batch(self._copied(batches, 1.0), num_micro_batches=count)
            mean = float(self._of_tensor_ranks(loss))
        # Its two buffers would hold the last packs' states until the next step has other ones.
        for buffers in self._engine.pipe_buffers.values():
            buffers[:] = [None] * len(buffers)
        count_of_targets = torch.tensor(self._count_of_targets, device=self._device)
        comm.all_reduce(count_of_targets)
        return mean * count * self._plan.layout.data, int(count_of_targets)

    def _forward(self, engine: Any, buffer_id: int) -> None:
        """Run a pack forward; on the last stage without the targets of samples that the first one could not read."""
        if engine.is_last_stage():
            labels, received = (engine.pipe_buffers[each] for each in ("labels", "inputs"))
            own, targets = labels[buffer_id]
            labels[buffer_id] = _learnt(targets, unpack(*own)[1], unpack(*received[buffer_id])[1], self.stage)
            self._count_of_targets += len(labels[buffer_id].rows)
        engine._exec_forward_pass(buffer_id=buffer_id)

    def _of_tensor_ranks(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of the losses, which DeepSpeed has averaged over the ranks with the same slices alone."""
        if self.stage.tensor.group is not None:
            comm.all_reduce(loss, group=self.stage.tensor.group)
        return loss


def _clip(engine: Any) -> None:
    """Clip the gradients of a training without ZeRO as DeepSpeed does, and keep their norm, which it would drop."""
    engine._global_grad_norm = clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping(), mpu=engine.mpu)


def _average(
    engine: Any, gradients: Iterable[torch.Tensor], *, dp_group: Any, dp_world_size: int | None = None, **_: Any
) -> None:
    """Average gradients over data ranks, joined in buckets. DeepSpeed would copy half a billion of them at once."""
    for bucket in in_buckets(gradients):
        engine.allreduce_and_copy(bucket, dp_group, dp_world_size)


def _load(engine: Any, buffer_id: int) -> None:
    """Take over the next pack as it is: DeepSpeed would copy it once more, and its tokens to the device."""
    inputs, targets = next(engine.data_iterator)
    if engine.is_first_stage():
        engine.pipe_buffers["inputs"][buffer_id] = inputs
    if engine.is_last_stage():
        engine.pipe_buffers["labels"][buffer_id] = inputs, targets


def _receive(engine: Any, buffer_id: int) -> None:
    """Receive the states and tokens of a pack; the tokens steer the host, which waits for them here."""
    engine._exec_recv_activations(buffer_id=buffer_id)
    floats, integers = engine.pipe_buffers["inputs"][buffer_id]
    engine.pipe_buffers["inputs"][buffer_id] = floats, integers.cpu()


def _learnt(targets: Targets, own: PackTokens, received: PackTokens, stage: StageModule) -> Targets:
    """Return the targets of the samples that have the same tokens on the first stage, which sent `received`.

    A sample that it could not read is blank there, and its answer would be learnt without the image. Raise DataError
    where ranks that share the pack have not read the same samples.
    """
    sharing = stage.sharing[received.level]
    sharing.check_alike(own.checksum, targets.rows.device)
    if torch.equal(own.input_ids, received.input_ids):
        return targets
    pairs = zip(own.input_ids.split(own.lengths), received.input_ids.split(own.lengths), strict=True)
    alike = torch.cat([torch.full_like(mine, torch.equal(mine, first), dtype=torch.bool) for mine, first in pairs])
    part = sharing.share.part(len(alike))
    kept = alike[part].to(targets.rows.device)[targets.rows]
    return Targets(*(each[kept] if each.dim() else each for each in targets))


class _Pipeline(PipelineModule):  # type: ignore[misc]
    """DeepSpeed's view of the chain: one "layer" per stage, since `Cut` decides what a stage holds."""

    def __init__(self, plan: Plan, stage: StageModule, where: RankCoordinates) -> None:
        self._tied = None
        layers = [LayerSpec(nn.Identity) for _ in plan.stages]
        layers[where.stage] = stage
        super().__init__(
            layers=layers,
            topology=_topology(plan.layout),
            loss_fn=stage.loss,
            partition_method="uniform",
            dynamic_shape=True,
        )
        self._tied = _tie_embeddings(plan, stage, where)
        count_in_norm(stage, self._tied[0] if self._tied and not stage.cut.projects else None)

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Return the word embedding and the output projection when they are one weight on two stages."""
        return [self._tied] if self._tied else []


def _tie_embeddings(plan: Plan, stage: StageModule, where: RankCoordinates) -> tuple[nn.Parameter, Any] | None:
    """Copy a tied weight from its first stage to its last; return it with the group that sums its gradients."""
    if not stage.tied:
        return None
    embedding_stage = next(number for number, part in enumerate(cut(plan)) if part.projects)
    head_stage = len(plan.stages) - 1
    if embedding_stage == head_stage:
        return None
    mine: tuple[nn.Parameter, Any] | None = None
    for pipeline in plan.layout.grid.pipelines():
        ranks = [pipeline[embedding_stage], pipeline[head_stage]]
        group = comm.new_group(ranks)  # a collective of all ranks, members or not
        if where.rank in ranks:
            model = stage.model
            holder = model.get_input_embeddings() if where.rank == ranks[0] else model.get_output_embeddings()
            weight = cast(nn.Parameter, holder.weight)
            comm.broadcast(weight.data, src=ranks[0], group=group)
            mine = (weight, group) if weight.requires_grad else None
    return mine


def _topology(layout: Layout) -> PipeModelDataParallelTopology:
    """Return DeepSpeed's form of the grid."""
    return PipeModelDataParallelTopology(num_pp=layout.pipeline, num_mp=layout.tensor, num_dp=layout.data)
