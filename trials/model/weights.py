"""Weights for the parts of the model that a stage holds: drawn from a seed, or read from safetensors files."""

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError
from trials.model.folder import read_index
from trials.regular_file import check_regular

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16
_SHOWN = 60
_AGAIN = "copy or download the model's weights again"


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
        with _open(self._file_of[name]) as file:
            stored = name if name in file.keys() else self._tied[name]  # noqa: SIM118 (not a dict)
            tensor: torch.Tensor = file.get_tensor(stored)
        return tensor

    def check(self, model: nn.Module) -> None:
        """Raises ModelError unless the files hold exactly the model's parameters, in their shapes."""
        parameters = dict(model.named_parameters(remove_duplicate=False))
        want = set(parameters)
        missing, unexpected = want - set(self._file_of), set(self._file_of) - want
        if missing or unexpected:
            raise ModelError(
                f"the weights in {self.folder} do not fit the model: {len(missing)} parameters are missing and "
                f"{len(unexpected)} are unknown, for example {min(missing or unexpected)}; load the model once with "
                "transformers and save it again with save_pretrained"
            )
        for path in sorted(set(self._file_of.values())):
            with _open(path) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    if name in parameters:
                        _check_shape(name, file.get_slice(name).get_shape(), parameters[name])


def weights_fingerprint(folder: Path) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over samples of the weight files, spread evenly.

    Whole files would take minutes to read. Files of equal size in which no sample differs count as equal: training
    changes nearly all weights.
    """
    digest = hashlib.sha256()
    for path in sorted(set(_file_of_each_tensor(folder).values())):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


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
    if not folder.is_dir():
        raise ModelError(f"the weights of model {folder} are not on this machine; download them and give their folder")
    if (folder / _INDEX).exists():
        return _listed_files(folder / _INDEX)
    if not (folder / _SINGLE).exists():
        raise ModelError(f"{folder} has no {_SINGLE}; set `model.weights: random` or save the weights as safetensors")
    with _open(folder / _SINGLE) as file:
        return dict.fromkeys(file.keys(), folder / _SINGLE)


def _listed_files(index: Path) -> dict[str, Path]:
    weight_map = read_index(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{index} has no weight_map, so it is no index of weights; {_AGAIN}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or Path(file).name != file:
            raise ModelError(
                f"{index} names {ascii(file)[:_SHOWN]} for {name[:_SHOWN]}, which is no safetensors file of its "
                f"folder; {_AGAIN}"
            )
    return {name: index.parent / file for name, file in weight_map.items()}


def _open(path: Path) -> Any:
    """A safetensors file; entering and reading it raise nothing more once its header is read."""
    try:
        check_regular(path)
        return safe_open(path, framework="pt")
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"weight file {path} cannot be read ({error}); {_AGAIN}") from error


@torch.no_grad()
def _fill(target: torch.Tensor, name: str, source: WeightFiles) -> None:
    tensor = source.read(name)
    _check_shape(name, tensor.shape, target)
    target.copy_(tensor)


def _check_shape(name: str, shape: Sequence[int], target: torch.Tensor) -> None:
    if tuple(shape) != tuple(target.shape):
        raise ModelError(
            f"{name} has shape {tuple(shape)} in the files but {tuple(target.shape)} in the model; "
            "take the configuration that the weights were saved with"
        )
