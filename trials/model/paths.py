"""Paths of a model's parts: modules, and parameters that lie in no module of the chain, such as `image_newline`."""

from collections.abc import Iterator

import torch
from torch import nn


def part_at(model: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """Return the module or parameter at `path`."""
    parent, _, name = path.rpartition(".")
    part: nn.Module | nn.Parameter = getattr(model.get_submodule(parent), name)
    return part


def tensors_at(model: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """Return the parameters and stored buffers under `path`, by their names in the model."""
    part = part_at(model, path)
    if isinstance(part, nn.Parameter):
        return {path: part}
    return {f"{path}.{name}": tensor for name, tensor in part.state_dict(keep_vars=True).items()}


def buffers_at(model: nn.Module, path: str) -> set[str]:
    """Return the names in the model of all buffers under `path`, stored or not."""
    part = part_at(model, path)
    return {f"{path}.{name}" for name, _ in part.named_buffers()} if isinstance(part, nn.Module) else set()


def parameters_at(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name in the model, parameter) for each parameter under `path`."""
    for name, tensor in tensors_at(model, path).items():
        if isinstance(tensor, nn.Parameter):
            yield name, tensor


def allocate(model: nn.Module, path: str, device: torch.device) -> None:
    """Give the part at `path` memory on `device`."""
    part = part_at(model, path)
    if isinstance(part, nn.Module):
        part.to_empty(device=device)
    else:
        # `to_empty` would allocate all of the module around it, which other stages hold.
        parent, _, name = path.rpartition(".")
        empty = nn.Parameter(torch.empty_like(part, device=device), requires_grad=part.requires_grad)
        setattr(model.get_submodule(parent), name, empty)


def remove(model: nn.Module, path: str) -> None:
    """Remove the part at `path`. A module's place stays taken, so that the names of the others do not change."""
    parent, _, name = path.rpartition(".")
    is_module = isinstance(part_at(model, path), nn.Module)
    setattr(model.get_submodule(parent), name, nn.Identity() if is_module else None)
