"""LoRA adapters of peft, added to the model before it is cut and drawn from the seed."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError
from trials.job import LoraSection
from trials.model.paths import part_at
from trials.model.skeleton import Skeleton
from trials.workload import Part

NAME = "default"
"""Default name of an adapter in peft."""
# A choice: models have about ten kinds of linear layers.
_SHOWN = 12


def add_adapters(skeleton: Skeleton, lora: LoraSection) -> LoraConfig:
    """Add adapters to the skeleton's model, whose other weights peft freezes; return their configuration.

    Raise ModelError for targets that are no linear layer of the parts, and for a projector that trains whole but that
    peft cannot save with the adapter.
    """
    if lora.train_projector:
        _check_saved(skeleton)
    assert lora.rank is not None  # else there are no adapters
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=_targets(skeleton, lora), bias="none")
    inject_adapter_in_model(config, skeleton.model, adapter_name=NAME, low_cpu_mem_usage=True)
    for _, layer in _layers(skeleton.model):
        layer.lora_A.to(skeleton.model.dtype)
        layer.lora_B.to(skeleton.model.dtype)
    return config


def _check_saved(skeleton: Skeleton) -> None:
    for path in skeleton.chain.paths_of("projector"):
        if not isinstance(part_at(skeleton.model, path), nn.Module):
            raise ModelError(
                f"training.lora.train_projector: {path} is a weight outside modules, which peft cannot save with an "
                "adapter; set parts: [projector, ...] for adapters in the projector"
            )


def draw_adapters(model: PreTrainedModel, paths: Iterable[str], seed: int) -> None:
    """Draw the adapters under `paths` as peft does, A at random and B as 0, each from a random stream of its own."""
    for path in paths:
        part = part_at(model, path)
        for name, layer in _layers(part) if isinstance(part, nn.Module) else ():
            torch.manual_seed(zlib.crc32(f"{path}.{name}".encode(), seed))  # as for random weights
            layer.reset_lora_parameters(NAME, init_lora_weights=True)


def _layers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, layer) for name, layer in module.named_modules() if isinstance(layer, LoraLayer))


def linear_layers(skeleton: Skeleton, parts: Iterable[Part]) -> list[str]:
    """Return the names of the linear layers of these parts that may have an adapter."""
    modules = _modules(skeleton, _paths(skeleton, parts))
    return [name for name, module in modules.items() if isinstance(module, nn.Linear)]


def _paths(skeleton: Skeleton, parts: Iterable[Part]) -> list[str]:
    paths = [path for part in parts for path in skeleton.chain.paths_of(part)]
    # The word embedding and the head have no adapters: they may be one weight on two stages.
    return [path for path in paths if path not in (skeleton.chain.projector[-1], *skeleton.chain.head)]


def _modules(skeleton: Skeleton, paths: Iterable[str]) -> dict[str, nn.Module]:
    return {
        f"{path}.{name}".rstrip("."): module
        for path in paths
        if isinstance(part := part_at(skeleton.model, path), nn.Module)
        for name, module in part.named_modules()
    }


def _targets(skeleton: Skeleton, lora: LoraSection) -> list[str]:
    """Return the names of the modules that get an adapter, as peft matches them: a name, or the end of one."""
    paths = _paths(skeleton, lora.parts)
    modules, linear = _modules(skeleton, paths), linear_layers(skeleton, lora.parts)
    known = ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in linear))[:_SHOWN])
    where = ", ".join(lora.parts)
    if not linear:
        raise ModelError(f"training.lora.parts: {where} has no linear layer; name another part")
    if lora.targets is None:
        return linear
    for target in lora.targets:
        if not any(is_named(name, target) for name in linear):
            what = "no linear layer" if any(is_named(name, target) for name in modules) else "no module"
            raise ModelError(f"training.lora.targets: {target} is {what} of {where}; known there: {known}")
    chosen = [name for name in linear if any(is_named(name, target) for target in lora.targets)]
    _check_layers(paths, chosen, lora)
    return chosen


def _check_layers(paths: Sequence[str], chosen: Sequence[str], lora: LoraSection) -> None:
    """Raise ModelError for adapters in some of the layers of a part: the profile measures one layer for all."""
    of_list: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        before, _, number = path.rpartition(".")
        if number.isdigit():
            of_list[before].append(path)
    for before, layers in of_list.items():
        without = [path for path in layers if not any(name.startswith(f"{path}.") for name in chosen)]
        if without and len(without) < len(layers):
            raise ModelError(
                f"training.lora.targets: {', '.join(lora.targets or ())} leaves {len(without)} of the {len(layers)} "
                f"layers in {before} without an adapter; name modules that all of them have, such as q_proj"
            )


def is_named(name: str, target: str) -> bool:
    """Return whether a target of adapters, the name of a layer or the end of one, names this layer."""
    return name == target or name.endswith(f".{target}")
