"""Tensor degrees by which the language layers of a model cannot be cut."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from trials.errors import InvalidPlan
from trials.model.refusals.heads import heads_of
from trials.model.slices import COLUMNS, ROWS, WHOLE, layer_plan, matrices_of

_KNOWN = {ROWS, COLUMNS, WHOLE}


def check_tensor(config: PretrainedConfig, layers: Sequence[Any], degree: int, *, adapters: bool) -> None:
    """Raise InvalidPlan, with the arithmetic, for a tensor degree by which a model's language layers cannot be cut.

    `layers` are all of them, possibly without memory. `adapters` says whether LoRA adapters are trained.
    """
    if degree == 1:
        return
    if adapters:
        raise InvalidPlan(
            f"tensor degree {degree} does not work with LoRA adapters; use tensor 1, or remove training.lora"
        )
    name, plan = config.get_text_config().model_type, layer_plan(config)
    for layer in layers:
        if left := next(_not_cut(layer, plan), None):
            raise InvalidPlan(
                f"tensor degree {degree} cannot cut the language layers of {name!r}: {left} is in no part that "
                "transformers' plan (base_model_tp_plan) deals to ranks by rows or columns; use tensor 1"
            )
    for what, size in _sizes(config, layers).items():
        if size % degree:
            raise InvalidPlan(
                f"tensor degree {degree} cannot cut the {size} {what} of the language model: {size % degree} would be "
                f"left over; use tensor {' or '.join(map(str, possible_tensor_degrees(config, layers)))}"
            )


def possible_tensor_degrees(config: PretrainedConfig, layers: Sequence[Any]) -> tuple[int, ...]:
    """Return the tensor degrees by which language layers can be cut, ascending: 1 alone if their plan is another."""
    plan = layer_plan(config)
    if any(True for layer in layers for _ in _not_cut(layer, plan)):
        return (1,)
    common = math.gcd(*_sizes(config, layers).values())
    return tuple(each for each in range(1, common + 1) if common % each == 0)


def _sizes(config: PretrainedConfig, layers: Sequence[Any]) -> dict[str, int]:
    """Return the numbers that a tensor degree must divide, by what they count."""
    plan = layer_plan(config)
    heads, groups = heads_of(config.get_text_config())
    sizes = {"attention heads": heads, "key-value heads": groups}
    for layer in layers:
        for matrix, dimension in matrices_of(layer, plan).items():
            sizes[f"{('rows', 'columns')[dimension]} of {matrix}"] = layer.get_submodule(matrix).weight.shape[dimension]
    return sizes


def _not_cut(layer: nn.Module, plan: dict[str, str]) -> Iterator[str]:
    """Yield the layer's parameters that have no place in the plan.

    What mixes tokens, or is large, has a matrix. Outside of the blocks that take all tokens, vectors are weights of
    norms, which work on each token by itself; inside, they might have one entry for each head.
    """
    cut: defaultdict[str, set[int]] = defaultdict(set)
    for name, dimension in matrices_of(layer, plan).items():
        cut[f"{name.rpartition('.')[0]}."].add(dimension)
    # A block begins with matrices that are cut by rows, and ends with one that is cut by columns.
    yield from (block for block, dimensions in cut.items() if len(dimensions) == 1)
    for name, parameter in layer.named_parameters():
        is_planned = plan.get(name.rpartition(".")[0]) in _KNOWN
        if not (is_planned or (parameter.ndim == 1 and not name.startswith(tuple(cut)))):
            yield name
