"""Gradients of transformers' own model on single samples: without packing, stages or recomputation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from deepspeed import comm
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from trials.data.records.sample import IGNORED, Encoded
from trials.job import ModelSection, TrainingSection
from trials.model.decoder import forget_samples
from trials.model.family import Family, Images, load_family
from trials.model.paths import allocate
from trials.model.skeleton import Skeleton, build_skeleton, load_config
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_buffers, draw_weights


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Results:
    """Loss and gradients of one step."""

    loss: float
    gradients: dict[str, torch.Tensor]
    """float32 on the CPU, by the name of the parameter."""


def build_model(settings: ModelSection, training: TrainingSection, device: torch.device) -> PreTrainedModel:
    """Build the model with the weights of its folder, read by transformers, or with the random ones of the ranks.

    The job's adapters are added, and its frozen parameters get no gradients.
    """
    config = load_config(settings.path, trust_remote_code=settings.trust_remote_code)
    skeleton = build_skeleton(config, getattr(torch, settings.dtype))
    if settings.weights == "pretrained":
        loaded: nn.Module = skeleton.family.AUTO_MODEL.from_pretrained(settings.path, dtype=skeleton.model.dtype)
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
    model: PreTrainedModel, samples: Sequence[Encoded], shares: Sequence[float], keep: Callable[[str], bool]
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
    for sample, share in zip(samples, shares, strict=True):
        forget_samples(model)
        part = _mean_loss(model, family, sample) * share
        if part.requires_grad:
            part.backward()
        loss += part.detach()
    for hook in hooks:
        hook.remove()
    comm.all_reduce(loss)
    gradients = {}
    for name, each in sums.items():
        comm.all_reduce(each)
        if keep(name):
            gradients[name] = each.cpu()
    return Results(loss=loss.item(), gradients=gradients)


def without_dropout(model: nn.Module) -> None:
    """Set every dropout of the model to 0: masks differ between passes, so gradients could not be compared."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if name.endswith("dropout") and isinstance(value, float):
                setattr(module, name, 0.0)


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
    inputs = family.model_inputs(model.config, input_ids, images)
    mean: torch.Tensor = model(**inputs, labels=labels[None], use_cache=False).loss
    return mean.float()
