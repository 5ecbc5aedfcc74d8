"""A plain training loop with packed samples, as an engineer writes it in an afternoon with PyTorch and transformers.

    torchrun --nproc-per-node 2 -m benchmarks.references.packed_loop runs.json

Imports nothing from autotune. Samples are tokenised once, packed first-fit-decreasing to one length, and dealt to the
ranks in random order, or sorted by cost in rows. DistributedDataParallel averages gradients; each sample has an
attention call of its own, on a GPU all have one call of FlashAttention; head and loss are computed for labelled rows,
or for all. `shards` is for models that one rank cannot hold: `fully_shard` in place of DistributedDataParallel, layer
by layer. With several lengths in a run, each is tried for a few steps, under a memory limit also with the vision
layers or all layers recomputed, and the fastest that keeps to the limit is used.
"""

import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

from benchmarks.references.kept_bytes import Kept, static_bytes
from benchmarks.references.loop_data import IGNORED, Batch, Data, Packs
from benchmarks.references.packs_by_hand import attend_to, first_fit_decreasing
from benchmarks.references.precision import Optimizer, Precision, dtype_of, rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. The file of runs has a list of these fields."""

    model: str
    """Folder of InternVL or Qwen2.5-VL in their Hugging Face form; weights are drawn where it has none."""
    data: str
    """Annotation file of `conversations`, JSON lines; images are relative to its folder."""
    progress: str
    """File that gets a line after each optimizer step."""
    lengths: tuple[int, ...] = ()
    """Text tokens of a pack; the fastest of several is used."""
    packs: str | None = None
    """File of packs that were made elsewhere, in place of `lengths`: for each step, rank and micro-batch, the samples
    and the (vision, language) layers to recompute."""
    recomputed: tuple[int, int] | None = None
    """Vision and language layers to recompute, from the first on. When absent, all, those of vision, or none: whichever
    is fastest."""
    matched: bool = True
    """Sort packs by cost and deal neighbours to the ranks of a row, rather than packs in random order."""
    target_rows: bool = True
    """Compute head and loss of labelled rows alone."""
    memory_limit: int | None = None
    """Most bytes of a rank: weights, gradients, moments, and what autograd keeps; on a GPU, those of torch's allocator.
    """
    shards: bool = False
    """Hold weights, gradients and moments in shards, and gather the weights of a layer for each pass; on CPUs alone."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    precision: Precision = "float32"
    workers: int = 0
    """Processes that load packs, 0 for this one."""
    global_batch: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    steps: int | None = None
    """Optimizer steps; an epoch when absent."""


# --- steps ---


Steps = list[list[list[list[int]]]]
"""Samples by step, rank, and micro-batch."""


def steps_of(data: Data, run: Run, length: int, costs: Sequence[float]) -> Steps:
    """Return an epoch: rows of a pack for each rank, as many to a step as make the global batch."""
    random, samples, ranks = Random(run.seed), data.samples, dist.get_world_size()
    packs = first_fit_decreasing([len(sample.ids) for sample in samples], length)
    while len(packs) % ranks:
        fullest = max(range(len(packs)), key=lambda one: len(packs[one]))
        pack = packs.pop(fullest)
        packs += [pack[::2], pack[1::2]]
    random.shuffle(packs)
    if run.matched:
        packs.sort(key=lambda pack: sum(costs[one] for one in pack))
    rows = [packs[start : start + ranks] for start in range(0, len(packs), ranks)]
    random.shuffle(rows)
    per_step = max(1, round(run.global_batch * len(rows) / len(samples)))
    return [
        [[row[rank] for row in rows[start : start + per_step]] for rank in range(ranks)]
        for start in range(0, len(rows), per_step)
    ]


# --- model ---


class Packed(torch.nn.Module):
    """The model with the loss of a pack, summed over its targets."""

    def __init__(self, run: Run, data: Data) -> None:
        super().__init__()
        self.model: PreTrainedModel = _model(run)
        config = self.model.config
        config.get_text_config()._attn_implementation = "packed_flash" if run.device == "cuda" else "per_sample"
        if run.device == "cuda" and not data.is_tiled:  # else each window has a call of its own
            config.vision_config._attn_implementation = "packed_flash"
        self.model.train()
        self._data, self._run = data, run

    def batches(self, packs: Sequence[Sequence[int]]) -> Iterator[Batch]:
        """Yield the inputs of packs, on the device."""
        positions = getattr(self.model.model, "get_rope_index", None)
        workers, on_device = self._run.workers, self._run.device == "cuda"
        inputs = Packs(self._data, positions, packs, self.model.dtype)
        for batch in DataLoader(inputs, batch_size=None, num_workers=workers, pin_memory=on_device):
            yield {
                name: each.to(self._run.device, non_blocking=True) if isinstance(each, torch.Tensor) else each
                for name, each in batch.items()
            }

    def forward(self, batch: Batch) -> torch.Tensor:
        attend_to(batch["lengths"], batch["ends"])
        with rounding(self._run.precision, self._run.device):
            return self._loss(batch)

    def _loss(self, batch: Batch) -> torch.Tensor:
        labels, pixels = batch["labels"], batch["pixels"]
        inputs: dict[str, Any] = {"position_ids": batch["positions"]}
        grids = {} if batch["grids"] is None else {"image_grid_thw": batch["grids"]}
        nothing: torch.Tensor | float = 0.0
        if batch["shows"]:
            inputs |= {"pixel_values": pixels, **grids}
        else:
            found = self.model.model.get_image_features(pixels, **grids)
            features = getattr(found, "pooler_output", found)
            nothing = 0.0 * sum(each.sum() for each in (features if isinstance(features, list | tuple) else [features]))
        states = self.model.model(input_ids=batch["ids"], use_cache=False, **inputs)
        rows = states.last_hidden_state[0]
        if self._run.target_rows:
            rows, labels = (each.index_select(0, batch["targets"]) for each in (rows, labels))
        logits = self.model.lm_head(rows)
        return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") + nothing

    def recompute(self, vision: int, language: int) -> None:
        """Recompute the first layers of each tower in the backward pass."""
        for layers, count in zip(self.towers, (vision, language), strict=True):
            for number, layer in enumerate(layers):
                layer.gradient_checkpointing = number < count
                layer._gradient_checkpointing_func = _checkpoint

    @property
    def costs(self) -> list[float]:
        """Of each sample: parameters times the tokens that they see."""
        config, inner = self._data.config, self.model.model
        tower = inner.vision_tower if self._data.is_tiled else inner.visual
        seeing, vision = sum(each.numel() for each in tower.parameters()), config.vision_config
        language = sum(each.numel() for each in inner.language_model.layers.parameters())
        per_unit = (
            math.prod(vision.image_size) // math.prod(vision.patch_size)
            if self._data.is_tiled
            else vision.spatial_merge_size**2
        )
        return [len(each.ids) * language + each.units * per_unit * seeing for each in self._data.samples]

    @property
    def towers(self) -> tuple[Any, Any]:
        """Layers of the vision and of the language model."""
        inner = self.model.model
        return (
            inner.vision_tower.encoder.layer if self._data.is_tiled else inner.visual.blocks,
            inner.language_model.layers,
        )


def _model(run: Run) -> PreTrainedModel:
    dtype = dtype_of(run.precision)
    model: Any
    if any(Path(run.model).glob("*.safetensors")):
        model = AutoModelForImageTextToText.from_pretrained(run.model, dtype=dtype)
    else:
        with torch.device(run.device):
            model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(run.model), dtype=dtype)
    return cast(PreTrainedModel, model.to(run.device))


def _checkpoint(function: Any, *inputs: Any, **options: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **options)


# --- memory ---


def peak_bytes(packed: Packed, extremes: Sequence[Sequence[int]], ranks: int = 1) -> int:
    """Return the most bytes of some packs on the CPU, static ones included, which `ranks` hold in shards."""
    kept = Kept(list(packed.parameters()))
    for batch in packed.batches(extremes):
        with kept.watch():
            packed(batch).backward()
        packed.zero_grad(set_to_none=True)
    return kept.most + static_bytes(packed, [layer for tower in packed.towers for layer in tower], ranks)


def fits(run: Run, packed: Packed, optimizer: Optimizer, packs: Sequence[list[int]]) -> bool:
    """Return whether the packs with most tokens and most units fit on all ranks.

    `packed` is a whole model, also where ranks train with shards.
    """
    samples = packed._data.samples
    extremes = [
        max(packs, key=lambda one: sum(len(samples[n].ids) for n in one)),
        max(packs, key=lambda one: sum(samples[n].units for n in one)),
    ]
    if run.device == "cpu":
        ranks = dist.get_world_size() if run.shards else 1
        over = run.memory_limit is not None and peak_bytes(packed, extremes, ranks) > run.memory_limit
    else:
        try:
            _step(packed, packed, optimizer, [extremes], packed.batches(extremes), alone=True)
            over = False
        except torch.cuda.OutOfMemoryError:
            over = True
        packed.zero_grad(set_to_none=True)
        if over:  # also of what the optimizer has begun to hold
            optimizer.forget()
            torch.cuda.empty_cache()
    most = torch.tensor(float(over))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return not most


# --- training ---


def train(run: Run) -> None:
    """Train on the ranks of torchrun."""
    torch.manual_seed(run.seed)
    if run.device == "cuda":
        torch.cuda.set_device(dist.get_rank())
        total = torch.cuda.get_device_properties().total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (run.memory_limit or total) / total))
    data = Data(run.model, run.data)
    packed = Packed(run, data)
    shown = next(number for number, sample in enumerate(data.samples) if sample.images)
    packed(next(packed.batches([[shown]]))).backward()
    for parameter in packed.parameters():  # what no loss depends on, such as InternVL's last norm
        parameter.requires_grad_(parameter.grad is not None)
    packed.zero_grad(set_to_none=True)
    measured = Packed(run, data) if run.shards else packed
    for mine, whole in zip(packed.parameters(), measured.parameters(), strict=True):
        whole.requires_grad_(mine.requires_grad)
    replica = _replica(run, packed)
    optimizer = Optimizer(packed.parameters(), learning_rate=run.learning_rate, weight_decay=run.weight_decay)
    freed = None
    if run.packs:
        given = json.loads(Path(run.packs).read_text())
        steps: Steps = [[[samples for samples, _ in of_rank] for of_rank in step] for step in given]
        freed = [[[layers for _, layers in of_rank] for of_rank in step] for step in given]
    else:
        steps = _swept(run, packed, replica, optimizer, measured)
    steps = steps[: run.steps]
    batches = packed.batches([pack for step in steps for pack in step[dist.get_rank()]])
    start = time.perf_counter()
    for number, step in enumerate(steps):
        loss = _step(packed, replica, optimizer, step, batches, freed=freed[number][dist.get_rank()] if freed else None)
        now = time.perf_counter()
        if dist.get_rank() == 0:
            samples = [data.samples[one] for of_rank in step for pack in of_rank for one in pack]
            line = {"step": number + 1, "seconds": now - start, "samples": len(samples), "loss": loss}
            line["text_tokens"] = sum(len(sample.ids) for sample in samples)
            if run.device == "cuda":
                line["peak_bytes"] = torch.cuda.max_memory_allocated()
            with Path(run.progress).open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        start = now


def _replica(run: Run, packed: Packed) -> Any:
    """Return the module that makes the passes, and averages gradients of the ranks."""
    if run.shards:
        for unit in (*packed.towers[0], *packed.towers[1], packed):  # the last has all weights outside of layers
            fully_shard(unit)
        return packed
    if dist.get_world_size() == 1:
        return packed
    return DistributedDataParallel(packed, gradient_as_bucket_view=True)


def _step(
    packed: Packed,
    replica: Any,
    optimizer: Optimizer,
    step: list[list[list[int]]],
    batches: Iterator[Batch],
    *,
    freed: list[tuple[int, int]] | None = None,
    alone: bool = False,
) -> float:
    """Make one optimizer step; return its mean loss over the targets.

    `freed` are the layers to recompute of each of the rank's micro-batches, where they differ. `alone`, the rank makes
    it without the others.
    """
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    targets = sum(
        label != IGNORED
        for of_rank in step
        for pack in of_rank
        for one in pack
        for label in packed._data.samples[one].labels
    )
    total = torch.zeros((), device=packed.model.device)
    for number in range(len(step[rank])):
        if freed:
            packed.recompute(*freed[number])
        # Gradients of whole layers would take the memory that shards save.
        waits = isinstance(replica, DistributedDataParallel) and number + 1 < len(step[rank])
        with replica.no_sync() if waits else nullcontext():
            loss = replica(next(batches)) * (ranks / targets)
            loss.backward()
        total += loss.detach()
    optimizer.step()
    if ranks > 1:
        dist.all_reduce(total)
    return float(total) / ranks


def _swept(run: Run, packed: Packed, replica: Any, optimizer: Optimizer, measured: Packed) -> Steps:
    """Return the steps with the fastest length; set what is recomputed. All ranks choose alike.

    `measured` is a whole model, which says what fits.
    """
    found: list[tuple[float, int, tuple[int, int]]] = []
    before = {name: each.cpu().clone() for name, each in packed.state_dict().items()}
    (vision, language), data, costs = packed.towers, packed._data, packed.costs
    mean = sum(costs) / len(costs)
    for length, freed in variants(run, (len(vision), len(language))):
        for model in (packed, measured):
            model.recompute(*freed)
        steps = steps_of(data, run, length, costs)
        if not fits(run, measured, optimizer, [pack for step in steps for of in step for pack in of]):
            continue
        chosen = steps[:: max(1, len(steps) // 6)][:6]
        batches = packed.batches([pack for step in (chosen[0], *chosen) for pack in step[dist.get_rank()]])
        _step(packed, replica, optimizer, chosen[0], batches)
        began = time.perf_counter()
        for step in chosen:
            _step(packed, replica, optimizer, step, batches)
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds)
        # Steps have different numbers of samples, of different sizes.
        work = sum(costs[one] for step in chosen for of_rank in step for pack in of_rank for one in pack)
        found.append((work / mean / float(seconds), length, freed))
    if not found:
        raise SystemExit(f"no length of {run.lengths} keeps to {run.memory_limit} bytes")
    _, length, freed = max(found)
    if dist.get_rank() == 0:
        print(json.dumps({"length": length, "recomputed": freed, "swept": found}), flush=True)
    packed.load_state_dict(before)
    optimizer.forget()
    packed.recompute(*freed)
    return steps_of(data, run, length, costs)


def variants(run: Run, layers: tuple[int, int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the lengths to try, each with the (vision, language) layers to recompute, of a model with `layers`."""
    for length in run.lengths:
        if run.recomputed is not None:
            yield length, run.recomputed
            continue
        yield length, (0, 0)
        if run.memory_limit:
            yield length, (layers[0], 0)
            yield length, layers


def main() -> None:
    runs = [Run(**each) for each in json.loads(Path(sys.argv[1]).read_text())]
    dist.init_process_group("cpu:gloo,cuda:nccl" if runs[0].device == "cuda" else "gloo")
    for each in runs:
        train(each)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
