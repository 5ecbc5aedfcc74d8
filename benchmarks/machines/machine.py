"""A simulated machine: what it truly takes for the steps of plans."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np

from autotune.prediction.predictor import Predictor
from benchmarks.machines.decoding import Decoding
from benchmarks.machines.dials import Dials
from benchmarks.machines.kernels import Device, Kernels, LayerSeconds
from benchmarks.machines.layers import ELEMENT_BYTES, LayerWork
from benchmarks.machines.links import Network, overlap
from benchmarks.machines.pipeline import stage_ends
from benchmarks.machines.structure import Structure
from tests.machines.truths import predicted_peaks
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS, LayerKind
from trials.data.epoch import Epoch
from trials.engine.static_memory import GRADIENT_BYTES
from trials.model.cut import Cut, cut
from trials.plan import Layout, Packing, Plan
from trials.stage import TOWERS

_ADAM_BYTES = 30
"""Bytes that Adam moves per parameter: float32 weight and two moments both ways, gradient in, 16-bit weight out."""
_PASS_SECONDS, _RECOMPUTE_SECONDS, _STEP_SECONDS = 1e-3, 6e-5, 15e-3
"""At dial 1: for each pass, for each recomputed layer in a backward pass, and for each step."""
_UNIT_LOAD, _TOKEN_LOAD, _PACK_LOAD = 1e-4, 5e-8, 1e-4
_MEMORY_WIDTH = 0.05
"""At dial 1: standard deviation of the logarithm of a peak over the predicted one."""
EpochOf: TypeAlias = Callable[[Packing, int], Epoch]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Seconds of the packs of a plan on its stages, [packs, stages]."""

    load: Floats
    """Loading by the rank itself."""
    ahead: Floats
    """Loading by its workers, at the rate of all of them."""
    forward: Floats
    backward: Floats
    messages: Floats
    """To the next stage, [packs, stages - 1]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Packs:
    """Packs of an epoch."""

    epoch: Epoch
    sizes: Floats
    """Units, tokens, squares and targets, [packs, 4]."""
    layers: dict[LayerKind, LayerSeconds]
    """Of each layer alone."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Steps:
    seconds: Floats
    """[steps]"""
    waits: Floats
    """Seconds in which each rank waits for its workers, [steps, data ranks, stages]."""


class Machine:
    """Times of plans on one simulated machine, without noise; a truth of `SimulatedLauncher`."""

    def __init__(
        self,
        works: dict[LayerKind, LayerWork],
        devices: int,
        epoch_of: EpochOf,
        memory: Predictor,
        *,
        device: Device,
        network: Network,
        dials: Dials,
        seed: int,
        decoding: Decoding | None = None,
    ) -> None:
        """`memory` gives the bytes of plans; its times are not used. Without `decoding` loading takes little."""
        self.works, self.devices, self.device, self.network, self.dials = works, devices, device, network, dials
        self.decoding, self._seed = decoding, seed
        self.structure = Structure(seed, dials)
        self.kernels = Kernels(device, dials)
        self._epoch_of, self._memory = epoch_of, memory
        self._packs = lru_cache(maxsize=256)(self._built)
        self._passes = lru_cache(maxsize=16)(self._timed)
        self._steps = lru_cache(maxsize=20_000)(self._simulated)

    # --- the truth of a launcher ---

    def epoch_seconds(self, plan: Plan) -> float:
        return float(self._steps(plan).seconds.sum())

    def step_seconds(self, plan: Plan) -> Floats:
        return self._steps(plan).seconds

    def step_samples(self, plan: Plan) -> Ints:
        epoch = self._packs(plan.packing, plan.layout.data).epoch
        counts = epoch.packs.counts
        return np.array([counts[epoch.rows(step)].sum() for step in range(epoch.steps)])

    def stage_seconds(self, plan: Plan, steps: Sequence[int], rank: int) -> tuple[float, float, float, float]:
        where = plan.layout.grid.coordinates(rank)
        epoch, passes = self._packs(plan.packing, plan.layout.data).epoch, self._passes(plan)
        packs = np.concatenate([epoch.rows(step)[:, where.data_rank] for step in steps])
        load, forward, backward = (
            float(side[packs, where.stage].sum()) / len(steps)
            for side in (passes.load, passes.forward, passes.backward)
        )
        held = cut(plan)[where.stage]
        waits = self._steps(plan).waits[list(steps), where.data_rank, where.stage]
        return (
            load + float(waits.mean()),
            forward,
            backward,
            self._reduction(plan.layout, held, where.stage) + self._update(plan.layout, held),
        )

    def peaks(self, plan: Plan, steps: Sequence[int]) -> tuple[int, ...]:
        random = np.random.default_rng([self._seed, 8, int(plan.id, 16)])
        predicted = predicted_peaks(self._memory, plan, steps)
        errors = np.exp(_MEMORY_WIDTH * self.dials.memory * random.standard_normal(len(predicted)))
        return tuple(np.rint(predicted * errors).astype(int).tolist())

    # --- single layers and links, which a profile measures too ---

    def load_seconds(self, units: Floats, tokens: Floats, *, pixels: bool) -> Floats:
        """Return the seconds of loading packs of these sizes, [packs]."""
        seconds: Floats = pixels * _UNIT_LOAD * units + _TOKEN_LOAD * tokens + _PACK_LOAD
        return seconds

    def update_per_parameter(self, data: int) -> float:
        """Return the seconds of the optimizer for each parameter of a stage, with ZeRO 1 over `data` ranks."""
        return self._adam_seconds / data + self._gathering(data)

    @property
    def _adam_seconds(self) -> float:
        return _ADAM_BYTES / self.device.memory_bytes_per_second

    def _gathering(self, data: int) -> float:
        return ELEMENT_BYTES * (data - 1) / data * self.network.seconds_per_byte

    # --- plans ---

    def _built(self, packing: Packing, data: int) -> _Packs:
        epoch = self._epoch_of(packing, data)
        found = epoch.pack_sizes()
        sizes = np.stack([found.units, found.tokens, found.squares, found.targets], axis=1).astype(np.float64)
        return _Packs(
            epoch=epoch, sizes=sizes, layers={kind: self.kernels.layer(self.works[kind], sizes) for kind in KINDS}
        )

    def _timed(self, plan: Plan) -> _Passes:
        packs, cuts = self._packs(plan.packing, plan.layout.data), cut(plan)
        factor = self.structure.factor(plan)
        forward, backward = (
            factor * np.stack(of_stages, axis=1)
            for of_stages in zip(*(self._stage_passes(packs.layers, held) for held in cuts), strict=True)
        )
        units, tokens, _, _ = packs.sizes.T
        load, ahead = np.zeros((2, *forward.shape))
        load[:, 0] = self.load_seconds(units, tokens, pixels=True)
        if len(cuts) > 1:
            load[:, -1] = self.load_seconds(units, tokens, pixels=False)
        if self.decoding is not None:
            of_epoch = packs.epoch.packs
            pack_of_sample = np.repeat(np.arange(len(of_epoch)), of_epoch.counts)
            decoded = self.decoding.packs_seconds(of_epoch.samples, pack_of_sample, len(of_epoch))
            # The stage of the labels decodes the images too, to know of the same faults.
            (ahead if self.decoding.workers else load)[:, [0, -1]] += decoded[:, None]
        messages = [self._message(plan.layout, number, held, units, tokens) for number, held in enumerate(cuts[:-1])]
        return _Passes(
            load=load,
            ahead=ahead,
            forward=forward,
            backward=backward,
            messages=np.stack(messages, axis=1) if messages else np.zeros((len(units), 0)),
        )

    def _stage_passes(self, layers: dict[LayerKind, LayerSeconds], held: Cut) -> tuple[Floats, Floats]:
        """Return the seconds (forward, backward) of packs on one stage, each [packs]."""
        level = held.levels[0]
        again: dict[LayerKind, int] = {tower: level.whole(tower) for tower in TOWERS}
        selective: dict[LayerKind, int] = {tower: level.selective(tower) for tower in TOWERS}
        forward, backward, launch_forward, launch_backward = np.zeros((4, len(layers["head"].forward)))
        for kind, count in _counts(held).items():
            layer, repeated, partly = layers[kind], again.get(kind, 0), selective.get(kind, 0)
            forward = forward + count * layer.forward
            backward = backward + count * layer.backward + repeated * layer.forward + partly * layer.selective
            launch_forward = launch_forward + count * layer.launch_forward
            launch_backward = launch_backward + count * layer.launch_backward
            launch_backward = launch_backward + repeated * layer.launch_forward + partly * layer.launch_selective
        recomputed = sum(again.values()) + sum(selective.values())
        fixed, repeats = self.dials.fixed * _PASS_SECONDS, self.dials.fixed * _RECOMPUTE_SECONDS * recomputed
        # The host launches kernels while the device computes, so the slower of both decides.
        return np.maximum(forward, launch_forward) + fixed, np.maximum(backward, launch_backward) + fixed + repeats

    def _message(self, layout: Layout, stage: int, held: Cut, units: Floats, tokens: Floats) -> Floats:
        vision, language = self.works["vision"], self.works["language"]
        if held.projects or held.language:
            values = tokens * language.products[0].inputs
        else:
            values = units * vision.rows_per_unit * vision.products[0].inputs
        network = self.network
        factor = network.message_factor(layout.grid, self.dials, stage)
        seconds: Floats = network.latency_seconds + factor * network.seconds_per_byte * ELEMENT_BYTES * values
        return seconds

    def _simulated(self, plan: Plan) -> _Steps:
        packs, passes, layout = self._packs(plan.packing, plan.layout.data), self._passes(plan), plan.layout
        loaded, cuts = passes.load + passes.forward, cut(plan)
        reduction = np.array([self._reduction(layout, held, stage) for stage, held in enumerate(cuts)])
        update = np.array([self._update(layout, held) for held in cuts])
        rows = [packs.epoch.rows(step) for step in range(packs.epoch.steps)]
        is_buffered = self.decoding is None or self.decoding.is_buffered
        seconds, waits = [], []
        for _, alike in groupby(rows, key=len):
            block = np.stack(list(alike))  # [steps, micro-batches, data ranks]
            of_ranks = block.transpose(0, 2, 1).reshape(-1, block.shape[1])
            forward, backward, messages = loaded[of_ranks], passes.backward[of_ranks], passes.messages[of_ranks]
            before = np.roll(passes.forward[of_ranks] + backward, 1, axis=1)
            late = (not is_buffered) * np.maximum(passes.ahead[of_ranks] - before, 0)
            forward = forward + late
            ends = stage_ends(forward, backward, messages, overlap(self.dials)).reshape(len(block), layout.data, -1)
            waiting = late.sum(axis=1).reshape(ends.shape)
            if is_buffered:  # a rank ends no earlier than its workers have loaded its packs
                waiting = np.maximum(passes.ahead[block].sum(axis=1) - ends, 0)
                ends = ends + waiting
            # Gradients of the last layers are averaged while the last pass goes on.
            last = passes.backward[block[:, -1]].min(axis=1)
            exposed = reduction - overlap(self.dials) * np.minimum(reduction, last)
            seconds.append((ends.max(axis=1) + exposed + update).max(axis=1))
            waits.append(waiting)
        return _Steps(seconds=np.concatenate(seconds) + self.dials.fixed * _STEP_SECONDS, waits=np.concatenate(waits))

    def _reduction(self, layout: Layout, held: Cut, stage: int) -> float:
        """Return the seconds of averaging a stage's gradients over its data ranks."""
        if layout.data == 1:
            return 0.0
        return self._parameters(held) * GRADIENT_BYTES * self.network.ring_seconds(layout.grid, self.dials, stage)

    def _update(self, layout: Layout, held: Cut) -> float:
        seconds = self.update_per_parameter(layout.data)
        if layout.data > 1:
            # Without distortion, gathering from any number of ranks takes as long as from all.
            usual = self._adam_seconds / layout.data + self._gathering(self.devices)
            seconds = usual * (seconds / usual) ** self.dials.communication
        return self._parameters(held) * seconds

    def _parameters(self, held: Cut) -> int:
        return sum(count * self.works[kind].parameters for kind, count in _counts(held).items())


def _counts(held: Cut) -> dict[LayerKind, int]:
    """Return the layers of a stage by kind."""
    return {
        "vision_embedding": int(held.embeds),
        "vision": len(held.vision),
        "projector": int(held.projects),
        "language": len(held.language),
        "head": int(held.heads),
    }
