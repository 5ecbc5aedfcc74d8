"""transformers' own conversion between stored tensors and those of a model in memory: names, merging, splitting."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils.loading_report import LoadStateDictInfo

from trials.errors import ModelError
from trials.model.refusals.refusal import refusing


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """The stored tensors from which one tensor of a model is made, or several when a converter splits them."""

    name: str
    """The first tensor that is made."""
    keys: tuple[str, ...]
    """In the order in which they are merged."""
    patterns: tuple[str, ...] = ()
    """For each key, which pattern of the converter it matches."""
    converter: WeightConverter | None = None
    """None when the tensor has another name at most."""

    def make(self, model: PreTrainedModel, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the model's tensors, by name. Raise ModelError when the stored ones do not fit together."""
        if self.converter is None:
            return {self.name: read(self.keys[0])}
        converter = deepcopy(self.converter)  # It collects tensors, and serves every layer.
        for key, pattern in zip(self.keys, self.patterns, strict=True):
            tensor: Any = read(key)
            converter.add_tensor(self.name, key, pattern, tensor)
        what = f"{self.name} cannot be made of {len(self.keys)} stored tensors such as {self.keys[0]}"
        with refusing(what, "copy or download the model's weights again"):
            made = converter.convert(self.name, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def find_origins(model: PreTrainedModel, keys: Iterable[str]) -> list[TensorSource]:
    """Return what `from_pretrained` makes of stored tensors with these names; some may be no tensors of the model.

    Raise ModelError when two stored tensors are the same one of the model.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    held = model.state_dict()
    parts: dict[str, list[tuple[str, str | None]]] = defaultdict(list)
    for key in sorted(keys, key=dot_natural_key):  # the order of experts when they are merged
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, held)
        if name not in held and key in held:  # It has its name in memory already, which the renaming spoils.
            name, pattern = key, None
        parts[name].append((key, pattern))
    return [_origin(name, found, converter_of) for name, found in parts.items()]


def _origin(
    name: str, parts: list[tuple[str, str | None]], converter_of: Mapping[str, WeightConverter]
) -> TensorSource:
    keys = tuple(key for key, _ in parts)
    patterns = tuple(pattern for _, pattern in parts if pattern is not None)
    if not patterns and len(keys) == 1:
        return TensorSource(name=name, keys=keys)
    if len(patterns) < len(keys):
        raise ModelError(f"the weight files hold {name} twice, as {' and '.join(keys[:2])}; remove one of them")
    return TensorSource(name=name, keys=keys, patterns=patterns, converter=converter_of[patterns[0]])


def refused_names(model: PreTrainedModel, unknown: Iterable[str]) -> set[str]:
    """Return the names, of `unknown` to the model, that `from_pretrained` does not pass over in silence."""
    report = LoadStateDictInfo(
        missing_keys=set(),
        unexpected_keys=set(unknown),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )
    model._adjust_missing_and_unexpected_keys(report)
    return report.unexpected_keys


def stored_form(model: PreTrainedModel, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of the model under the names, and merged or split, as `save_pretrained` writes them.

    A pipeline stage may convert its own: what is merged or split lies within one layer.
    """
    stored = revert_weight_conversion(model, dict(tensors))
    return {name: tensor.contiguous() for name, tensor in stored.items()}
