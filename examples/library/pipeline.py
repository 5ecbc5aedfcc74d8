"""Training of InternVL with DeepSpeed's pipeline: packs, split and recomputation of the best plan, layers of one's own.

    torchrun --nproc-per-node 2 pipeline.py job.yaml

The job has pretrained weights. Learning rate, betas and weight decay are those of the job; there is no schedule and no
clipping.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from autotune import EvenPackSampler, PackCollator, PackSampler, Plan, SampleDataset, best_plan
from trials.recomputation.selective import run_selectively

# What travels between layers is a tuple of two tensors: states, and int64 [2, T] with the ids and positions of tokens.
# DeepSpeed wants a gradient for each float tensor, and the same number of tensors between all stages.


class Embedding(nn.Module):
    """Patches of the tiles."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embeddings = model.model.vision_tower.embeddings

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        pixels, tokens = inputs
        return self.embeddings(pixels), tokens


class VisionLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        states, tokens = inputs
        return self.layer(states), tokens


class Projector(nn.Module):
    """Features of the images in the places of their tokens, between the embedded words."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.vision_tower.layernorm
        self.projector = model.model.multi_modal_projector
        self.words = model.get_input_embeddings()
        self.image_token, self.ratio = model.config.image_token_id, model.config.downsample_ratio
        self.shuffle = model.model.pixel_shuffle

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        states, tokens = inputs
        states = self.norm(states)[:, 1:]  # without the class token
        tiles, patches, width = states.shape
        side = int(patches**0.5)
        features = self.projector(self.shuffle(states.view(tiles, side, side, width), self.ratio).flatten(1, 2))
        words = self.words(tokens[0])
        joined = words.masked_scatter((tokens[0] == self.image_token)[:, None], features)
        return joined[None], tokens


class LanguageLayer(nn.Module):
    def __init__(self, layer: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.layer, self.rotary = layer, rotary

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        states, tokens = inputs
        positions = tokens[1]
        sample = (positions == 0).cumsum(0)
        visible = (sample[:, None] == sample) & (positions[:, None] >= positions)  # earlier tokens of the same sample
        embeddings = self.rotary(states, positions[None])
        return self.layer(states, attention_mask=visible[None, None], position_embeddings=embeddings), tokens


class Head(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm, self.projection = model.model.language_model.norm, model.lm_head

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.projection(self.norm(inputs[0]))[0]


class Recomputed(nn.Module):
    """A layer that keeps its input alone, and runs again in the backward pass."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return checkpoint(self.layer, inputs, use_reentrant=False)


class SelectivelyRecomputed(Recomputed):
    """A layer that keeps outputs of matrix products and attention, and computes the rest again from these."""

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return run_selectively(self.layer, self.layer, inputs)


class SplitPipeline(PipelineModule):
    """A pipeline whose stages end where the plan says, not where DeepSpeed's own rules do."""

    def __init__(self, layers: list[nn.Module], ends: list[int]) -> None:
        self.parts = [0, *ends]
        super().__init__(layers=layers, num_stages=len(ends), loss_fn=loss_of, dynamic_shape=True)  # packs differ

    def _partition_layers(self, **_: Any) -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def chain(model: Any, plan: Plan) -> tuple[list[nn.Module], list[int]]:
    """Return (all layers in order, number of layers up to the end of each stage)."""
    vision = [VisionLayer(layer) for layer in model.model.vision_tower.encoder.layer]
    rotary = model.model.language_model.rotary_emb
    language = [LanguageLayer(layer, rotary) for layer in model.model.language_model.layers]
    layers, ends = [Embedding(model)], []
    for stage in plan.stages:
        # The first layers of each kind are recomputed, those behind them selectively.
        for waiting, count, again, selective in (
            (vision, stage.vision, stage.recompute_vision, stage.selective_vision),
            (language, stage.language, stage.recompute_language, stage.selective_language),
        ):
            taken = [waiting.pop(0) for _ in range(count)]
            layers += [Recomputed(layer) for layer in taken[:again]]
            layers += [SelectivelyRecomputed(layer) for layer in taken[again : again + selective]]
            layers += taken[again + selective :]
            # The projector is on the stage of the last vision layer.
            if waiting is vision and not vision and count:
                layers.append(Projector(model))
        ends.append(len(layers))
    layers.append(Head(model))
    ends[-1] += 1
    return layers, ends


def loss_of(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, scale = target
    return cross_entropy(logits[:-1], labels[1:], reduction="sum") * scale


def with_scale(batches: Iterable[dict[str, torch.Tensor]], scale: float) -> Iterator[Any]:
    for batch in batches:
        tokens = torch.cat([batch["input_ids"], batch["position_ids"]])
        yield (batch["pixel_values"], tokens), (batch["labels"][0], torch.tensor(scale))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("job", help="job file with a best plan")
    job, rank = arguments.parse_args().job, int(os.environ["RANK"])
    # On a CPU, DeepSpeed would look for a compiler, and compile an operation of its own for up to a minute.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False)

    samples = SampleDataset(job)
    settings = samples.job.training
    ignored = settings.model_dump(
        include={"freeze", "learning_rates", "lora", "loss_weighting", "max_steps"}, exclude_defaults=True
    )
    if ignored:
        sys.exit(
            f"training.{', training.'.join(ignored)}: this loop does not follow it; remove it, or use `autotune launch`"
        )
    plan = best_plan(job).plan
    model = AutoModelForImageTextToText.from_pretrained(samples.job.model.path, dtype=torch.float32).train()
    if model.get_output_embeddings().weight is model.get_input_embeddings().weight:
        sys.exit("the word embedding is also the output projection: on two stages, their gradients have to be summed")
    data = plan.layout.data  # ranks of one stage are neighbours
    packs = EvenPackSampler(PackSampler(samples, plan, rank=rank % data, ranks=data), settings.epochs)
    loader = DataLoader(samples, batch_sampler=packs, collate_fn=PackCollator(samples, model))

    pipeline = SplitPipeline(*chain(model, plan))
    groups = [
        {"params": [p for p in pipeline.parameters() if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in pipeline.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    # As an object, since DeepSpeed would compile the AdamW of its configuration.
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": packs.micro_batches,
        "gradient_clipping": 0.0,  # its default is 1
        "zero_optimization": {"stage": plan.layout.zero},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=pipeline, optimizer=optimizer, config=config)

    batches = iter(loader)
    for number, step in enumerate(packs.steps):
        # DeepSpeed averages over the packs of a step and the data ranks.
        scale = packs.micro_batches * data / step.target_tokens
        loss = engine.train_batch(with_scale(batches, scale))
        if rank == 0:
            print(f"step {number} loss {loss:.7f}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
