"""Weights for the parts of the model that a stage holds: drawn from a seed, or read from safetensors files."""

import hashlib
import logging
import re
import zlib
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from trials.errors import ModelError
from trials.model.conversion import TensorSource, find_origins, refused_names
from trials.model.paths import allocate, buffers_at, part_at, tensors_at
from trials.model.refusals.folder import CONFIG, check_adapter
from trials.model.skeleton import Skeleton
from trials.model.weight_files import chosen_files, opened

_ADAPTER = re.compile(r"\.lora_[AB]\.")
_log = logging.getLogger(__name__)
# Choices: 16 MiB of each file are read, whatever its size.
_SAMPLES = 256
_SAMPLE_BYTES = 1 << 16
_OTHERS = "a file is missing, or the weights belong to another model; copy or download the whole model again"
_DROP = (
    "take the configuration that the weights were saved with, or leave the unknown ones out: load the model with "
    "from_pretrained and save it to another folder with save_pretrained"
)


def draw_weights(model: PreTrainedModel, paths: Iterable[str], seed: int, device: torch.device) -> None:
    """Allocate the modules at `paths` on `device` and draw their weights as the model's own initialisation does.

    Each path has a random stream of its own, so a layer gets the same weights under every split.
    """
    for path in paths:
        allocate(model, path, device)
        # In 32 bits: of a longer seed, torch's generator of CPUs leaves the rest out.
        torch.manual_seed(zlib.crc32(path.encode(), seed))
        _initialise(model, path)


def zero_weights(model: PreTrainedModel, paths: Iterable[str], _seed: int, device: torch.device) -> None:
    """Allocate the modules at `paths` on `device` and fill them with zeros: that takes a part of the time of a draw."""
    for path in paths:
        allocate(model, path, device)
        if buffers_at(model, path):  # they are computed
            _initialise(model, path)
            continue
        with torch.no_grad():
            for tensor in tensors_at(model, path).values():
                tensor.zero_()


def own_name(name: str) -> str | None:
    """Return the name that a tensor has in the model without adapters; None for a weight of an adapter."""
    return None if _ADAPTER.search(name) else name.replace(".base_layer.", ".")


def draw_buffers(model: PreTrainedModel, paths: Iterable[str], device: torch.device) -> None:
    """Allocate and compute the buffers of modules that have no parameters, such as the rotary embedding."""
    for path in paths:
        allocate(model, path, device)
        _initialise(model, path)


def read_weights(model: PreTrainedModel, paths: Iterable[str], source: "WeightFiles", device: torch.device) -> None:
    """Allocate the modules at `paths` on `device` and fill them from safetensors files.

    Raise ModelError when the files lack a tensor or have it in another shape.
    """
    for path in paths:
        allocate(model, path, device)
        stored = tensors_at(model, path)
        if any(name not in stored for name in buffers_at(model, path)):  # computed, and in no file
            _initialise(model, path)
        for name, tensor in stored.items():
            if (own := own_name(name)) is not None:
                _fill(tensor, own, source)


class WeightFiles:
    """The weights of a Hugging Face folder, by the model's own parameter names.

    A read loads the stored tensors of one tensor of the model: one, or all those that are merged or split.
    """

    def __init__(self, folder: Path, skeleton: Skeleton) -> None:
        """Read the files' headers. Raise ModelError when they cannot be read or contradict each other."""
        self.folder = folder
        self._files = chosen_files(folder)
        held = self._files.tensors()
        self._file_of = {key: path for key, (path, _) in held.items()}
        self._want = {name: tuple(tensor.shape) for name, tensor in skeleton.model.state_dict().items()}
        self._model = deepcopy(skeleton.model)  # A stage takes layers out of the skeleton's; no weights are copied.
        stored = {key: shape for key, (_, shape) in held.items()}
        self._origins, self._shapes = dict[str, TensorSource](), dict[str, tuple[int, ...]]()
        for origin in find_origins(self._model, stored):
            # On the meta device, merging and splitting give names and shapes without reading a tensor.
            made = origin.make(self._model, lambda key: torch.empty(stored[key], device="meta"))
            self._origins |= dict.fromkeys(made, origin)
            self._shapes |= {name: tuple(tensor.shape) for name, tensor in made.items()}
        self._same = dict[str, str]()
        for first, second in skeleton.tied.items():
            for name, other in ((first, second), (second, first)):
                if name not in self._origins and other in self._origins:
                    self._same[name] = other
        self._tied = skeleton.tied

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor of the model. Raise ModelError when no file holds it."""
        name = self._same.get(name, name)
        if name not in self._origins:
            raise ModelError(f"the weights in {self.folder} lack {name}; {_OTHERS}")
        return self._origins[name].make(self._model, self._load)[name]

    def _load(self, key: str) -> torch.Tensor:
        with opened(self._file_of[key]) as file:
            tensor: torch.Tensor = file.get_tensor(key)
        return tensor

    def check(self) -> None:
        """Raise ModelError unless the files hold exactly the model's tensors, in their shapes, and no adapter.

        Tensors that `from_pretrained` passes over in silence may be there. A warning names files that are passed over.
        """
        check_adapter(self.folder)
        for note in self._files.notes():
            _log.warning("%s", note)
        missing = self._want.keys() - self._origins.keys() - self._same.keys()
        unknown = refused_names(self._model, self._origins.keys() - self._want.keys())
        if missing or unknown:
            shown = min(missing) if missing else min(self._origins[name].keys[0] for name in unknown)
            raise ModelError(
                f"the weights in {self.folder} do not fit its {CONFIG}: {len(missing)} parameters are missing and "
                f"{len(unknown)} are unknown, for example {shown}; {_OTHERS if missing else _DROP}"
            )
        for name, shape in self._want.items():
            if name in self._shapes:
                _check_shape(name, self._shapes[name], shape)
        for name, original in self._tied.items():
            if name in self._same or original in self._same:
                continue
            # Some files hold both: then they must be equal, or one of them would be lost.
            first, second = self.read(name), self.read(original)
            if first.dtype != second.dtype or not torch.equal(first, second):
                raise ModelError(
                    f"{name} and {original} differ in {self.folder}, but by its {CONFIG}, or by transformers' default, "
                    "they are one tensor; set tie_word_embeddings to false there, at the top level and in text_config, "
                    "if both are wanted"
                )


def weights_fingerprint(folder: Path) -> str:
    """Return sixteen hexadecimal digits of a SHA-256 over samples of the weight files, spread evenly.

    Whole files would take minutes to read. Files of equal size in which no sample differs count as equal: training
    changes nearly all weights.
    """
    digest = hashlib.sha256()
    for path in chosen_files(folder).files:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                # The first sample is at the start of the file, the last at its end.
                file.seek(number * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _initialise(model: PreTrainedModel, path: str) -> None:
    part, owner = part_at(model, path), _owner(model, path)
    if isinstance(part, nn.Module):
        for module in _children_first(part):
            owner._init_weights(module)
    else:
        owner._init_weights(model.get_submodule(path.rpartition(".")[0]))


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    adapted = getattr(module, "base_layer", None)
    if isinstance(adapted, nn.Module):  # an adapter is drawn by itself, so that these weights are as without one
        yield from _children_first(adapted)
        return
    for child in module.children():
        yield from _children_first(child)
    yield module


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """Return the innermost sub-model around `path`: its own rules initialise its layers."""
    owner, names = model, path.split(".")
    for depth in range(1, len(names)):
        module = model.get_submodule(".".join(names[:depth]))
        owner = module if isinstance(module, PreTrainedModel) else owner
    return owner


@torch.no_grad()
def _fill(target: torch.Tensor, name: str, source: WeightFiles) -> None:
    tensor = source.read(name)
    _check_shape(name, tuple(tensor.shape), tuple(target.shape))
    target.copy_(tensor)


def _check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if shape != wanted:
        raise ModelError(
            f"{name} has shape {shape} in the files but {wanted} in the model; "
            "take the configuration that the weights were saved with"
        )
