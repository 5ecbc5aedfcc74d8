"""Weights for the parts of the model that a stage holds: drawn from a seed, or read from safetensors files."""

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def draw_weights(model: PreTrainedModel, paths: Iterable[str], seed: int, device: torch.device) -> None:
    """Allocates the modules at `paths` on `device` and draws their weights as the model's own initialisation does.

    Each path has a random stream of its own, so a layer gets the same weights under every split.
    """
    for path in paths:
        module = model.get_submodule(path).to_empty(device=device)
        torch.manual_seed((seed << 32) + zlib.crc32(path.encode()))
        _initialise(module, _owner(model, path))


def draw_buffers(model: PreTrainedModel, path: str, device: torch.device) -> None:
    """Allocates and computes the buffers of a module that has no parameters, such as the rotary embedding."""
    _initialise(model.get_submodule(path).to_empty(device=device), _owner(model, path))


def read_weights(model: PreTrainedModel, paths: Iterable[str], source: "WeightFiles", device: torch.device) -> None:
    """Allocates the modules at `paths` on `device` and fills them from safetensors files.

    Raises ModelError when the files lack a parameter or have it in another shape.
    """
    for path in paths:
        module = model.get_submodule(path).to_empty(device=device)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            _fill(tensor, f"{path}.{name}", source)


class WeightFiles:
    """The tensors of a Hugging Face weight folder, by name, read one at a time.

    `tied` maps a parameter to the one it shares its values with: the files may hold only the latter.
    """

    def __init__(self, folder: Path, tied: Mapping[str, str]) -> None:
        self.folder = folder
        self._file_of = _file_of_each_tensor(folder)
        for name, original in tied.items():
            if original in self._file_of:
                self._file_of.setdefault(name, self._file_of[original])
        self._tied = tied

    def read(self, name: str) -> torch.Tensor:
        """Raises ModelError when no file holds `name`."""
        if name not in self._file_of:
            raise ModelError(f"the weights in {self.folder} lack {name}; they belong to another model or version")
        with safe_open(self._file_of[name], framework="pt") as file:
            stored = name if name in file.keys() else self._tied[name]  # noqa: SIM118 (not a dict)
            tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def check(self, model: nn.Module) -> None:
        """Raises ModelError unless the files hold exactly the model's parameters."""
        want = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        missing, unexpected = want - set(self._file_of), set(self._file_of) - want
        if missing or unexpected:
            raise ModelError(
                f"the weights in {self.folder} do not fit the model: {len(missing)} parameters are missing and "
                f"{len(unexpected)} are unknown, for example {min(missing or unexpected)}; load the model once with "
                "transformers and save it again with save_pretrained"
            )


def _initialise(module: nn.Module, owner: PreTrainedModel) -> None:
    for child in _children_first(module):
        owner._init_weights(child)


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from _children_first(child)
    yield module


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost sub-model around `path`: its own rules initialise its layers."""
    owner, names = model, path.split(".")
    for depth in range(1, len(names)):
        module = model.get_submodule(".".join(names[:depth]))
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


def _file_of_each_tensor(folder: Path) -> dict[str, Path]:
    if (folder / _INDEX).is_file():
        weight_map = json.loads((folder / _INDEX).read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    if not (folder / _SINGLE).is_file():
        raise ModelError(f"{folder} has no {_SINGLE}; set `model.weights: random` or save the weights as safetensors")
    with safe_open(folder / _SINGLE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE)


@torch.no_grad()
def _fill(target: torch.Tensor, name: str, source: WeightFiles) -> None:
    tensor = source.read(name)
    if tensor.shape != target.shape:
        raise ModelError(f"{name} has shape {tuple(tensor.shape)} in the files but {tuple(target.shape)} in the model")
    target.copy_(tensor)
