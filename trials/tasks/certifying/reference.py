"""Gradients of transformers' own model on single samples: without packing, stages or recomputation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

import torch
from deepspeed import comm
from deepspeed.comm import ReduceOp
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import IGNORED, Encoded
from trials.job import ModelSection, TrainingSection
from trials.model.decoder import forget_samples
from trials.model.family import Family, Images, load_family, prompt_types
from trials.model.paths import allocate
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_buffers, draw_weights
from trials.tasks.certifying.norms import norm_of
from trials.tasks.certifying.plain_optimizer import clip_share


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Results:
    """Loss and gradients of one step."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """Before clipping, float32 on the CPU, by the name of the parameter."""
    norm: float
    """Of the gradient of the whole model, before clipping."""
    reading_errors: Mapping[str, float] = field(default_factory=dict)
    """Most that the reading of gradients may have changed them, as norms; none where they were not read."""

    def clipped(self, clip_norm: float | None) -> "Results":
        """Return the results with clipped gradients."""
        share = clip_share(self.norm, clip_norm)
        return replace(
            self,
            gradients={name: share * each for name, each in self.gradients.items()},
            reading_errors={name: share * each for name, each in self.reading_errors.items()},
        )


def build_model(settings: ModelSection, training: TrainingSection, device: torch.device) -> PreTrainedModel:
    """Build the model with the weights of its folder, read by transformers, or with the random ones of the ranks.

    The job's adapters are added, and its frozen parameters get no gradients.
    """
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    if settings.weights == "pretrained":
        loaded: nn.Module = skeleton.family.AUTO_MODEL.from_pretrained(
            settings.path, config=config, dtype=skeleton.model.dtype
        )
        model = cast(PreTrainedModel, loaded.to(device))
    else:
        model = _drawn(skeleton, config, training.seed, device)
    choose_trained(replace(skeleton, model=model), training)
    for path in [path for path, _ in model.named_modules() if path.endswith((".lora_A", ".lora_B"))]:
        allocate(model, path, device)
    draw_trained(model, skeleton.chain.parts, training)
    model.train()  # as under the plan
    return model


def _drawn(skeleton: Skeleton, config: PretrainedConfig, seed: int, device: torch.device) -> PreTrainedModel:
    # `config`, since that of the skeleton's model names the attention of packs.
    draw_weights(skeleton.model, (*skeleton.chain.parts, *skeleton.chain.unused), seed, device)
    draw_buffers(skeleton.model, skeleton.chain.buffers, device)
    weights = skeleton.model.state_dict()
    # Tied weights are drawn twice, but the model has one: that of the embedding.
    weights |= {name: weights[original] for name, original in skeleton.tied.items()}
    with torch.device(device):
        model: PreTrainedModel = skeleton.family.AUTO_MODEL.from_config(config, dtype=skeleton.model.dtype)
    model.load_state_dict(weights)
    return model


def model_results(
    model: PreTrainedModel,
    samples: Sequence[Encoded],
    shares: Sequence[float],
    keep: Callable[[str], bool],
) -> Results:
    """Run the samples of this rank through the model; sum loss and gradients over all ranks. Every rank must call it.

    `shares` [samples] are the shares of the samples' mean losses in the loss of the step. Gradients are summed in
    float32, and those that `keep` names are returned.
    """
    family = load_family(model.config)
    # Not `zeros_like`: a parameter need not be contiguous, which a reduction wants.
    sums = {name: torch.zeros(each.shape, device=each.device) for name, each in _trained(model)}
    hooks = [each.register_post_accumulate_grad_hook(partial(_take, sums[name])) for name, each in _trained(model)]
    loss = torch.zeros((), device=model.device)
    with _whole_convolutions():
        for sample, share in zip(samples, shares, strict=True):
            forget_samples(model)
            part = _mean_loss(model, family, sample) * share
            if part.requires_grad:
                part.backward()
            loss += part.detach()
    for hook in hooks:
        hook.remove()
    comm.all_reduce(loss)
    gradients, norms = dict[str, torch.Tensor](), list[float]()
    for name, each in sums.items():
        comm.all_reduce(each)
        norms.append(norm_of(each))
        if keep(name):
            gradients[name] = each.cpu()
    return Results(loss=loss.item(), gradients=gradients, norm=math.hypot(*norms))


class SharedWeights:
    """Weights of which each rank holds some, for all ranks. Every rank must make one, and read the same of them."""

    def __init__(
        self, held: Mapping[str, torch.Tensor], like: Mapping[str, torch.Tensor], device: torch.device
    ) -> None:
        """`held` are this rank's, on the CPU; `like` has tensors of the same names, shapes and types on every rank."""
        self._held, self._like, self._device = held, like, device
        rank, none = comm.get_rank(), comm.get_world_size()
        owners = torch.tensor([rank if name in held else none for name in like], device=device)
        comm.all_reduce(owners, op=ReduceOp.MIN)
        self._owners = {name: owner for name, owner in zip(like, owners.tolist(), strict=True) if owner < none}

    def __iter__(self) -> Iterator[str]:
        """Yield the names that a rank holds, in the same order on every rank."""
        return iter(self._owners)

    def __contains__(self, name: str) -> bool:
        return name in self._owners

    def read(self, name: str) -> torch.Tensor:
        """Return a weight in float32 on the device."""
        own = self._held.get(name) if self._owners[name] == comm.get_rank() else None
        shape = self._like[name].shape
        found = torch.empty(shape, device=self._device) if own is None else own.float().contiguous().to(self._device)
        comm.broadcast(found, src=self._owners[name])
        return found


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: SharedWeights) -> None:
    """Copy the weights that the ranks hold into the model; every rank must call it."""
    own = dict(model.named_parameters(remove_duplicate=False))
    for name in weights:
        own[name].copy_(weights.read(name))


def blank_model(settings: ModelSection, training: TrainingSection) -> PreTrainedModel:
    """Build the model without weights, on the meta device, with the job's adapters."""
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    choose_trained(skeleton, training)
    return skeleton.model


@contextmanager
def _whole_convolutions() -> Iterator[None]:
    """Keep cuDNN from rounding float32 in convolutions, as it does by default, unlike the products of a plan."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, each) for name, each in model.named_parameters() if each.requires_grad)


def _take(total: torch.Tensor, parameter: torch.Tensor) -> None:
    assert parameter.grad is not None, "the hook runs after the gradient is there"
    total += parameter.grad
    parameter.grad = None


def _mean_loss(model: PreTrainedModel, family: Family, sample: Encoded) -> torch.Tensor:
    """Return transformers' own loss of a sample, the mean over its targets; a constant 0 where it has none."""
    labels = torch.from_numpy(sample.labels).to(model.device)
    if not (labels[1:] != IGNORED).any():
        return torch.zeros((), device=model.device)
    input_ids, images = torch.from_numpy(sample.input_ids).to(model.device), None
    if sample.pixel_values is not None:
        pixels = torch.from_numpy(sample.pixel_values).to(model.device, model.dtype)
        grids = torch.from_numpy(sample.grids).to(model.device)
        images = Images(pixels=pixels, grids=grids, input_ids=input_ids)
    types = prompt_types(torch.from_numpy(sample.positions).to(model.device))
    inputs = family.model_inputs(model.config, input_ids, images) | types
    mean: torch.Tensor = model(**inputs, labels=labels[None], use_cache=False).loss
    return mean.float()
