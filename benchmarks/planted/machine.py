"""A simulated machine of another form than the predictions.

Layers work in tiles of units and tokens, and attention grows with the power 1.9 of a sample's length. Each rank runs
its own list of passes, event by event. A message takes the sender's time, then the receiver's; a sender does not wait
for its receiver, unlike in the predictor's schedule. Each pass has noise of its own.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np

from autotune.workload import Prepared
from trials.costs.coefficients import KINDS, LayerKind
from trials.data.epoch import Epoch
from trials.model.cut import Cut, cut
from trials.outcome import Cause, StageMeasurement
from trials.plan import Plan
from trials.run.pool import Answers
from trials.tasks.answer import (
    CommunicationTiming,
    ExchangeTiming,
    LayerTiming,
    LoadTiming,
    ProfileReport,
    TrialReport,
    UpdateTiming,
)
from trials.tasks.request import Profile, Request, Trial

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_UNITS, _TOKENS = 2, 32
"""Units and tokens of a tile."""
_LAUNCH_SECONDS = 2e-4
_POWER = 1.9
_STATE_BYTES = 512
"""Bytes of a token's or a unit's states."""
_KEPT = 6
"""States that a layer keeps for its backward pass."""
_PARAMETERS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Speeds:
    """What the machine takes for each piece of work, in seconds."""

    unit: float
    """A unit in a vision layer."""
    token: float
    """A token in a language layer."""
    attention: float = 1e-9
    """A token to the power 1.9 in a language layer."""
    byte: float = 1e-10
    """A byte of a message, on either side."""
    read: float = 1e-6
    """A token or a unit that is read and encoded."""
    update: float = 1e-9
    """A parameter."""
    noise: float = 0.02
    """Standard deviation of a pass, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pack:
    units: int
    lengths: tuple[int, ...]
    """Of the sequences, pad tokens included."""
    targets: int

    @property
    def tokens(self) -> int:
        return sum(self.lengths)


@dataclass(kw_only=True)
class _Rank:
    """One rank during a step."""

    clock: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("load", "forward", "backward"), 0.0))

    def spend(self, what: str, seconds: float) -> None:
        self.clock += seconds
        self.seconds[what] += seconds


class Machine:
    """Answers profiles and trials of one job like ranks on such a machine; usable in place of a `WarmPool`."""

    def __init__(self, prepared: Prepared, speeds: Speeds, seed: int = 0) -> None:
        self._prepared, self._speeds = prepared, speeds
        self._random = np.random.default_rng(seed)
        self._clock = 0.0

    def clock(self) -> float:
        """Return the simulated seconds since the beginning."""
        return self._clock

    def now(self) -> datetime:
        """Return the simulated time."""
        return _BEGINNING + timedelta(seconds=self._clock)

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
    ) -> Answers | Cause:
        """Answer like `WarmPool.ask`, at once."""
        del timeout_seconds, on_wait
        match request.task:
            case Profile() as task:
                return Answers(reports=tuple(self._profile(task) for _ in range(request.plan.layout.world_size)))
            case Trial() as task:
                return self._trial(request.plan, task, on_step)
            case task:
                raise AssertionError(f"no {task.kind} in a search")

    def epoch_seconds(self, plan: Plan) -> float:
        """Return what an epoch truly takes."""
        epoch = self._prepared.epoch(plan.packing, plan.layout.data)
        return sum(self._step(plan, epoch, step)[0] for step in range(epoch.steps))

    # --- layers ---

    def _forward(self, kind: LayerKind, pack: _Pack) -> float:
        speeds = self._speeds
        units = _UNITS * math.ceil(pack.units / _UNITS)
        tokens = sum(_TOKENS * math.ceil(length / _TOKENS) for length in pack.lengths)
        attention = sum(math.pow(length, _POWER) for length in pack.lengths)
        work = {
            "vision_embedding": 0.05 * speeds.unit * units,
            "vision": speeds.unit * units,
            "projector": 0.05 * speeds.token * tokens,
            "language": speeds.token * tokens + speeds.attention * attention,
            "head": 0.2 * speeds.token * pack.targets,
        }
        return _LAUNCH_SECONDS + work[kind]

    def _kept(self, kind: LayerKind, pack: _Pack) -> int:
        return _KEPT * self._output(kind, pack)

    def _output(self, kind: LayerKind, pack: _Pack) -> int:
        rows = {"vision_embedding": pack.units, "vision": pack.units, "head": pack.targets}
        return _STATE_BYTES * rows.get(kind, pack.tokens)

    def _noisy(self, seconds: float) -> float:
        return seconds * math.exp(self._speeds.noise * self._random.standard_normal())

    def _profile(self, task: Profile) -> ProfileReport:
        packs = [
            _Pack(units=units, lengths=(tokens,) * samples, targets=samples * tokens)
            for units, (samples, tokens) in zip(task.sizes.unit_counts, task.sizes.sample_shapes, strict=True)
        ]
        speeds = self._speeds
        return ProfileReport(
            timings=tuple(self._timing(kind, pack) for kind in KINDS for pack in packs),
            loads=tuple(self._load_timing(pack, pixels=pixels) for pack in packs for pixels in (True, False)),
            parameters=tuple((kind, _PARAMETERS) for kind in KINDS),
            frozen_parameters=tuple((kind, 0) for kind in KINDS),
            updates=(
                UpdateTiming(zero=0, data_parallel=1, seconds_per_parameter=speeds.update),
                *(
                    UpdateTiming(zero=zero, data_parallel=2, seconds_per_parameter=speeds.update)
                    for zero in task.zero_stages
                ),
            ),
            communications=(
                CommunicationTiming(pipeline=1, data=2, latency_seconds=0, seconds_per_byte=0),
                CommunicationTiming(
                    pipeline=2,
                    data=1,
                    latency_seconds=_LAUNCH_SECONDS,
                    seconds_per_byte=2 * speeds.byte,
                ),
            ),
            exchanges=(ExchangeTiming(name="average", ranks=2, backward_seconds=2 * speeds.byte),),
        )

    def _timing(self, kind: LayerKind, pack: _Pack) -> LayerTiming:
        forward = self._forward(kind, pack)
        return LayerTiming(
            layer=kind,
            units=pack.units,
            tokens=pack.tokens,
            squares=sum(length**2 for length in pack.lengths),
            forward_seconds=self._noisy(forward),
            backward_seconds=self._noisy(_backward(forward)),
            kept_bytes=self._kept(kind, pack),
            output_bytes=self._output(kind, pack),
            recompute_seconds=self._noisy(_again(forward)) if kind in ("vision", "language") else 0.0,
            shared_bytes=0,
            transient_bytes=0,
            spread=self._speeds.noise,
        )

    def _load_timing(self, pack: _Pack, *, pixels: bool) -> LoadTiming:
        seconds = self._noisy(self.load(pack, pixels=pixels))
        return LoadTiming(pixels=pixels, units=pack.units, tokens=pack.tokens, seconds=seconds)

    def load(self, pack: _Pack, *, pixels: bool) -> float:
        """Return what reading and encoding a pack takes."""
        return self._speeds.read * (pack.units * 50 * pixels + 0.02 * pack.tokens)

    # --- trials ---

    def _trial(self, plan: Plan, task: Trial, on_step: Callable[[float], bool] | None) -> Answers:
        epoch = self._prepared.epoch(plan.packing, plan.layout.data)
        for step in task.warmup_steps:
            self._clock += self._step(plan, epoch, step)[0]
        seconds: list[float] = []
        ranks: list[list[dict[str, float]]] = []
        for step in task.timed_steps:
            took, parts = self._step(plan, epoch, step)
            seconds.append(took)
            ranks.append(parts)
            self._clock += took
            if on_step is not None and not on_step(took):
                break
        timed = [epoch.step(step) for step in task.timed_steps[: len(seconds)]]
        stages = (self._stage(plan, epoch, rank, seconds, parts) for rank, parts in enumerate(zip(*ranks, strict=True)))
        return Answers(
            reports=tuple(
                TrialReport(
                    step_seconds=tuple(seconds),
                    losses=(1.0,) * len(seconds),
                    samples=sum(step.samples for step in timed),
                    text_tokens=sum(step.text_tokens for step in timed),
                    vision_units=sum(step.vision_units for step in timed),
                    stage=stage,
                )
                for stage in stages
            )
        )

    def _stage(
        self, plan: Plan, epoch: Epoch, rank: int, seconds: Sequence[float], parts: Sequence[dict[str, float]]
    ) -> StageMeasurement:
        where = plan.layout.grid.coordinates(rank)
        mean = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}
        held = cut(plan)[where.stage]
        static = 12 * _PARAMETERS * _layers(held)
        packs = sorted((self._kept_by(held, _pack(epoch, n)) for n in range(len(epoch.packs))), reverse=True)
        in_flight = min(plan.layout.pipeline - where.stage, epoch.micro_batches)
        return StageMeasurement(
            stage=where.stage,
            data_rank=where.data_rank,
            load_seconds=mean["load"],
            forward_seconds=mean["forward"],
            backward_seconds=mean["backward"],
            optimizer_seconds=mean["optimizer"],
            idle_seconds=max(0.0, sum(seconds) / len(seconds) - sum(mean.values())),
            peak_bytes=static + sum(packs[:in_flight]),
            static_bytes=static,
            tensor_rank=where.tensor_rank,
        )

    def _kept_by(self, held: Cut, pack: _Pack) -> int:
        kept = 0
        for kind, count, again in _held(held):
            kept += (count - again) * self._kept(kind, pack) + again * self._output(kind, pack)
        return kept

    def _step(self, plan: Plan, epoch: Epoch, number: int) -> tuple[float, list[dict[str, float]]]:
        """Return (seconds of a step, seconds of the sections of each rank)."""
        layout, rows = plan.layout, epoch.rows(number)
        packs = [[_pack(epoch, number) for number in of_rank] for of_rank in rows.T]
        pipelines = [_Pipeline(self, cut(plan), of_rank).run() for of_rank in packs]
        parts: list[dict[str, float]] = []
        ends = []
        for rank in range(layout.world_size):
            where = layout.grid.coordinates(rank)
            mine = pipelines[where.data_rank][where.stage]
            last = max(each[where.stage].clock for each in pipelines)
            parameters = _PARAMETERS * _layers(cut(plan)[where.stage])
            update = self._speeds.update * parameters
            if layout.data > 1:
                update += 8 * self._speeds.byte * parameters
            # The reduction waits for the slowest data rank, inside the engine's update.
            parts.append({**mine.seconds, "optimizer": last - mine.clock + update})
            ends.append(last + update)
        return max(ends), parts

    def message(self, held: Cut, pack: _Pack) -> float:
        """Return what the states of a pack behind a stage take on either side."""
        kind: LayerKind = "projector" if held.projects or held.language else "vision"
        return 0.5 * _LAUNCH_SECONDS + self._speeds.byte * self._output(kind, pack)

    def forward(self, held: Cut, pack: _Pack) -> float:
        """Return what a forward pass of a stage takes this time."""
        return self._noisy(sum(count * self._forward(kind, pack) for kind, count, _ in _held(held)))

    def backward(self, held: Cut, pack: _Pack) -> float:
        """Return what a backward pass of a stage takes this time."""
        times = ((count, again, self._forward(kind, pack)) for kind, count, again in _held(held))
        return self._noisy(sum(count * _backward(forward) + again * _again(forward) for count, again, forward in times))


class _Pipeline:
    """The ranks of one data rank during a step; each pass begins as soon as its message is there."""

    def __init__(self, machine: Machine, cuts: Sequence[Cut], packs: Sequence[_Pack]) -> None:
        self._machine, self._cuts, self._packs = machine, cuts, packs
        self._ranks = [_Rank() for _ in cuts]
        self._sent: dict[tuple[str, int, int], float] = {}
        """Time at which the sender of (pass, stage, pack) was done."""

    def run(self) -> list[_Rank]:
        orders = [list(_order(len(self._packs), len(self._cuts), stage)) for stage in range(len(self._cuts))]
        while any(orders):
            for stage, order in enumerate(orders):
                while order and self._runs(stage, *order[0]):
                    order.pop(0)
        return self._ranks

    def _runs(self, stage: int, what: str, number: int) -> bool:
        """Run a pass if its message has been sent, and send what the next rank needs; return whether it ran."""
        rank, pack, cuts = self._ranks[stage], self._packs[number], self._cuts
        source, target = (stage - 1, stage + 1) if what == "forward" else (stage + 1, stage - 1)
        if 0 <= source < len(cuts):
            if (what, source, number) not in self._sent:
                return False
            rank.clock = max(rank.clock, self._sent[what, source, number])
            rank.clock += self._machine.message(cuts[min(source, stage)], pack)
        if what == "forward":
            if stage in (0, len(cuts) - 1):
                rank.spend("load", self._machine.load(pack, pixels=stage == 0))
            rank.spend("forward", self._machine.forward(cuts[stage], pack))
        else:
            rank.spend("backward", self._machine.backward(cuts[stage], pack))
        if 0 <= target < len(cuts):
            rank.clock += self._machine.message(cuts[min(target, stage)], pack)
            self._sent[what, stage, number] = rank.clock
        return True


def _backward(forward: float) -> float:
    return 1.9 * forward + 5e-5


def _again(forward: float) -> float:
    return 1.02 * forward


def _held(held: Cut) -> Iterator[tuple[LayerKind, int, int]]:
    """Yield (kind, layers, recomputed ones)."""
    yield "vision_embedding", int(held.embeds), 0
    yield "vision", len(held.vision), held.levels[0].vision
    yield "projector", int(held.projects), 0
    yield "language", len(held.language), held.levels[0].language
    yield "head", int(held.heads), 0


def _layers(held: Cut) -> int:
    return sum(count for _, count, _ in _held(held))


def _pack(epoch: Epoch, number: int) -> _Pack:
    rows = epoch.packs.pack(number)
    lengths = [int(length) for length in epoch.index.text_tokens[rows]] or [1]
    if epoch.packs.padded:
        lengths = [max(lengths)] * len(lengths)
    units, targets = (int(column[rows].sum()) for column in (epoch.index.vision_units, epoch.index.target_tokens))
    return _Pack(units=max(1, units), lengths=tuple(lengths), targets=targets)


def _order(count: int, stages: int, stage: int) -> Iterator[tuple[str, int]]:
    """Yield the passes of a stage: as many forward passes as there are stages behind it, then both in turns."""
    ahead = min(stages - 1 - stage, count)
    for number in range(ahead):
        yield "forward", number
    for number in range(count):
        if number + ahead < count:
            yield "forward", number + ahead
        yield "backward", number
