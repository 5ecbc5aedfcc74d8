"""A plain training loop with packed samples, as an engineer writes it in an afternoon with PyTorch and transformers.

    torchrun --nproc-per-node 2 -m benchmarks.references.packed_loop runs.json

Imports nothing from autotune. Samples are tokenised once, packed first-fit-decreasing to one length, and dealt to the
ranks in random order, or sorted by cost in rows. DistributedDataParallel averages gradients; each sample has an
attention call of its own; head and loss are computed for labelled rows, or for all. With several lengths in a run, each
is tried for a few steps with everything recomputed and with nothing, and the fastest that keeps to the limit is used.
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
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from benchmarks.references.kept_bytes import Kept
from benchmarks.references.packs_by_hand import LENGTHS, first_fit_decreasing

IGNORED = -100
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
STATIC_BYTES = 16
"""Of a float32 parameter: weight, gradient, and AdamW's two moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training. The file of runs has a list of these fields."""

    model: str
    """Folder with weights: InternVL or Qwen2.5-VL in their Hugging Face form."""
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
    """Vision and language layers to recompute, from the first on; all or nothing, whichever is faster, when absent."""
    matched: bool = True
    """Sort packs by cost and deal neighbours to the ranks of a row, rather than packs in random order."""
    target_rows: bool = True
    """Compute head and loss of labelled rows alone."""
    memory_limit: int | None = None
    """Most bytes of a rank: weights, gradients, moments, and what autograd keeps."""
    global_batch: int = 16
    learning_rate: float = 1e-3
    weight_decay: float = 0.01
    seed: int = 0
    steps: int | None = None
    """Optimizer steps; an epoch when absent."""


# --- data ---


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A conversation as tokens, and its images as names."""

    ids: list[int]
    labels: list[int]
    """Shifted: that of a token is the next one where it is a target."""
    images: tuple[Path, ...]
    units: int
    """Tiles, or merged patches."""
    grids: torch.Tensor | None


class Data:
    """All samples of an annotation file, tokenised once. Images are decoded when a pack is used."""

    def __init__(self, model: str, data: str) -> None:
        self.config = AutoConfig.from_pretrained(model)
        self.is_tiled = self.config.model_type == "internvl"
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._images = AutoImageProcessor.from_pretrained(model, backend="pil")
        self._folder = Path(data).parent
        records = [json.loads(line) for line in Path(data).read_text().splitlines()]
        self.samples = [self._sample(record) for record in records]

    def pixels(self, images: Sequence[Path]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the pixels of a sample's images, and the grids of images in their own resolution."""
        pictures = []
        for path in images:
            with Image.open(path) as image:
                pictures.append(image.convert("RGB"))
        options: dict[str, Any] = {}
        if self.is_tiled:
            options = {"crop_to_patches": True, "max_patches": max(1, self._images.max_patches // len(images))}
        found = [self._images([picture], return_tensors="pt", **options) for picture in pictures]
        grids = None if self.is_tiled else torch.cat([each["image_grid_thw"] for each in found])
        return torch.cat([each["pixel_values"] for each in found]), grids

    def blank(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the pixels and grids of an image that stands in a pack without one, so that all ranks train alike."""
        vision = self.config.vision_config
        if self.is_tiled:
            return torch.zeros(1, 3, *vision.image_size), None
        merge = vision.spatial_merge_size
        values = 3 * vision.temporal_patch_size * vision.patch_size**2
        return torch.zeros(merge * merge, values), torch.tensor([[1, merge, merge]])

    def _sample(self, record: dict[str, Any]) -> Sample:
        named = record.get("image", [])
        images = tuple(self._folder / name for name in ([named] if isinstance(named, str) else named))
        grids, counts = None, list[int]()
        if images:
            sizes = []
            for path in images:
                with Image.open(path) as image:
                    sizes.append((image.height, image.width))
            counts, grids = self._counts(sizes)
        ids, labels = self._turns(record["conversations"], counts)
        return Sample(ids=ids, labels=[*labels[1:], IGNORED], images=images, units=sum(counts), grids=grids)

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> tuple[list[int], torch.Tensor | None]:
        """Return the tiles or merged patches of each image of (height, width)."""
        if self.is_tiled:
            options = {"crop_to_patches": True, "max_patches": max(1, self._images.max_patches // len(sizes))}
            return [self._images.get_number_of_image_patches(*size, options) for size in sizes], None
        merge = self.config.vision_config.spatial_merge_size
        grids = [self._images([Image.new("RGB", (width, height))])["image_grid_thw"][0] for height, width in sizes]
        table = torch.tensor([list(map(int, grid)) for grid in grids])
        return [int(grid.prod()) // merge**2 for grid in table], table

    def _turns(self, turns: Sequence[dict[str, str]], counts: Sequence[int]) -> tuple[list[int], list[int]]:
        shown = iter(counts)
        ids, labels = list[int](), list[int]()
        for turn in turns:
            role, text = ROLES[turn["from"]], turn["value"]
            while "<image>" in text:
                text = text.replace("<image>", self._image(next(shown)), 1)
            for piece, is_target in ((f"<|im_start|>{role}\n", False), (f"{text}<|im_end|>\n", role == "assistant")):
                found = self._tokenizer(piece, add_special_tokens=False)["input_ids"]
                ids += found
                labels += found if is_target else [IGNORED] * len(found)
        return ids, labels

    def _image(self, count: int) -> str:
        if self.is_tiled:
            return f"<img>{'<IMG_CONTEXT>' * (self.config.image_seq_length * count)}</img>"
        return f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"


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
        self.model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(run.model, dtype=torch.float32)
        self.model.config.get_text_config()._attn_implementation = "per_sample"
        self.model.train()
        self._data, self._target_rows = data, run.target_rows

    def forward(self, pack: Sequence[int]) -> torch.Tensor:
        samples = [self._data.samples[one] for one in pack]
        LENGTHS[:] = [len(sample.ids) for sample in samples]
        shown = [self._data.pixels(sample.images) for sample in samples if sample.images]
        ids = torch.tensor([token for sample in samples for token in sample.ids])[None]
        labels = torch.tensor([label for sample in samples for label in sample.labels])
        pixels, grids = zip(*(shown or [self._data.blank()]), strict=True)
        inputs: dict[str, Any] = {"position_ids": torch.cat([self._positions(each) for each in samples], dim=-1)}
        if grids[0] is not None:
            inputs["image_grid_thw"] = torch.cat(grids)
        if shown:
            states = self.model.model(input_ids=ids, pixel_values=torch.cat(pixels), use_cache=False, **inputs)
            nothing: torch.Tensor | float = 0.0
        else:
            grid = inputs.pop("image_grid_thw", None)
            options = {} if grid is None else {"image_grid_thw": grid}
            found = self.model.model.get_image_features(torch.cat(pixels), **options)
            features = getattr(found, "pooler_output", found)
            nothing = 0.0 * sum(each.sum() for each in (features if isinstance(features, list | tuple) else [features]))
            states = self.model.model(input_ids=ids, use_cache=False, **inputs)
        rows = states.last_hidden_state[0]
        if self._target_rows:
            rows, labels = rows[labels != IGNORED], labels[labels != IGNORED]
        logits = self.model.lm_head(rows)
        return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") + nothing

    def _positions(self, sample: Sample) -> torch.Tensor:
        """Return the positions of one sample, [1, tokens], or [3, 1, tokens] in time, height and width."""
        if self._data.is_tiled:
            return torch.arange(len(sample.ids))[None]
        if sample.grids is None:
            return torch.arange(len(sample.ids)).expand(3, 1, -1)
        ids = torch.tensor(sample.ids)[None]
        kinds = (ids == self.model.config.image_token_id).int()
        positions: torch.Tensor = self.model.model.get_rope_index(ids, kinds, image_grid_thw=sample.grids)[0]
        return positions

    def recompute(self, vision: int, language: int) -> None:
        """Recompute the first layers of each tower in the backward pass."""
        inner = self.model.model
        tower = inner.vision_tower.encoder.layer if self._data.is_tiled else inner.visual.blocks
        for layers, count in ((tower, vision), (inner.language_model.layers, language)):
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
    def layers(self) -> tuple[int, int]:
        inner = self.model.model
        tower = inner.vision_tower.encoder.layer if self._data.is_tiled else inner.visual.blocks
        return len(tower), len(inner.language_model.layers)


def _checkpoint(function: Any, *inputs: Any, **options: Any) -> Any:
    return torch.utils.checkpoint.checkpoint(function, *inputs, use_reentrant=False, **options)


# --- memory ---


def peak_bytes(packed: Packed, packs: Sequence[Sequence[int]]) -> int:
    """Return the most bytes of the packs with most tokens and most units, static ones included."""
    samples = packed._data.samples
    kept = Kept(list(packed.parameters()))
    for key in (lambda one: sum(len(samples[n].ids) for n in one), lambda one: sum(samples[n].units for n in one)):
        with kept.watch():
            packed(max(packs, key=key)).backward()
        packed.zero_grad(set_to_none=True)
    return kept.most + STATIC_BYTES * sum(each.numel() for each in packed.parameters() if each.requires_grad)


# --- training ---


def train(run: Run) -> None:
    """Train on the ranks of torchrun."""
    torch.manual_seed(run.seed)
    data = Data(run.model, run.data)
    packed = Packed(run, data)
    shown = next(number for number, sample in enumerate(data.samples) if sample.images)
    packed([shown]).backward()
    for parameter in packed.parameters():  # what no loss depends on, such as InternVL's last norm
        parameter.requires_grad_(parameter.grad is not None)
    packed.zero_grad(set_to_none=True)
    replica = DistributedDataParallel(packed, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(packed.parameters(), lr=run.learning_rate, weight_decay=run.weight_decay)
    freed = None
    if run.packs:
        given = json.loads(Path(run.packs).read_text())
        steps: Steps = [[[samples for samples, _ in of_rank] for of_rank in step] for step in given]
        freed = [[[layers for _, layers in of_rank] for of_rank in step] for step in given]
    else:
        steps = _swept(run, data, packed, replica, optimizer)
    start = time.perf_counter()
    for number, step in enumerate(steps[: run.steps]):
        loss = _step(data, replica, optimizer, step, freed[number][dist.get_rank()] if freed else None)
        now = time.perf_counter()
        if dist.get_rank() == 0:
            samples = sum(len(pack) for of_rank in step for pack in of_rank)
            line = {"step": number + 1, "seconds": now - start, "samples": samples, "loss": loss}
            with Path(run.progress).open("a") as file:
                file.write(f"{json.dumps(line)}\n")
        start = now


def _step(
    data: Data, replica: Any, optimizer: Any, step: list[list[list[int]]], freed: list[tuple[int, int]] | None = None
) -> float:
    """Make one optimizer step; return its mean loss over the targets.

    `freed` are the layers to recompute of each of the rank's micro-batches, where they differ.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    targets = sum(
        label != IGNORED for of_rank in step for pack in of_rank for one in pack for label in data.samples[one].labels
    )
    total = torch.zeros(())
    for number, pack in enumerate(step[rank]):
        if freed:
            replica.module.recompute(*freed[number])
        with nullcontext() if number + 1 == len(step[rank]) else replica.no_sync():
            loss = replica(pack) * (ranks / targets)
            loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    dist.all_reduce(total)
    return float(total) / ranks


def _swept(run: Run, data: Data, packed: Packed, replica: Any, optimizer: Any) -> Steps:
    """Return the steps with the fastest length; set whether all is recomputed. All ranks choose alike."""
    found: list[tuple[float, int, tuple[int, int]]] = []
    before = {name: each.clone() for name, each in packed.state_dict().items()}
    for length, freed in _variants(run, packed):
        packed.recompute(*freed)
        steps = steps_of(data, run, length, packed.costs)
        peak = torch.tensor(float(peak_bytes(packed, [pack for step in steps for of in step for pack in of])))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if run.memory_limit and peak > run.memory_limit:
            continue
        chosen = steps[:: max(1, len(steps) // 6)][:6]
        _step(data, replica, optimizer, chosen[0])
        began = time.perf_counter()
        for step in chosen:
            _step(data, replica, optimizer, step)
        seconds = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(seconds)
        samples = sum(len(pack) for step in chosen for of_rank in step for pack in of_rank)
        found.append((samples / float(seconds), length, freed))
    if not found:
        raise SystemExit(f"no length of {run.lengths} keeps to {run.memory_limit} bytes")
    _, length, freed = max(found)
    if dist.get_rank() == 0:
        print(json.dumps({"length": length, "recomputed": freed, "swept": found}))
    packed.load_state_dict(before)
    optimizer.state.clear()
    packed.recompute(*freed)
    return steps_of(data, run, length, packed.costs)


def _variants(run: Run, packed: Packed) -> Iterator[tuple[int, tuple[int, int]]]:
    for length in run.lengths:
        if run.recomputed is not None:
            yield length, run.recomputed
            continue
        yield length, (0, 0)
        if run.memory_limit:
            yield length, packed.layers


def main() -> None:
    dist.init_process_group("gloo")
    for each in json.loads(Path(sys.argv[1]).read_text()):
        train(Run(**each))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
