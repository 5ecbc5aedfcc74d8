"""Language layers whose matrices several ranks hold together, by transformers' own plan for tensor parallelism.

Megatron-LM (arXiv 1909.08053), with the states between the blocks cut by tokens (arXiv 2205.05198, section 4.2): in
front of attention and MLP each rank gathers the states of all tokens; the last matrix of a block, of which it holds
columns, gives a part of the sum for all of them; and the sum goes to the ranks for their own tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoConfig, PretrainedConfig

from trials.sharing.group import SharingGroup

ROWS, COLUMNS, WHOLE = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""transformers' words for matrices whose rows or columns are dealt, and for modules that every rank has whole. A
matrix is stored transposed: its rows make the columns of what it computes."""
_LAYER = "layers.*."


def layer_plan(config: PretrainedConfig) -> dict[str, str]:
    """Return how the modules of a language layer are dealt, by their names in the layer: that of transformers.

    Where it has none, as for Qwen3-VL, the plan is that of Qwen3, whose names are those of most models.
    """
    plan = config.get_text_config().base_model_tp_plan or AutoConfig.for_model("qwen3").base_model_tp_plan or {}
    return {name.removeprefix(_LAYER): style for name, style in plan.items() if name.startswith(_LAYER)}


def matrices_of(layer: nn.Module, plan: Mapping[str, str]) -> dict[str, int]:
    """Return the names of the layer's matrices that are cut, each with the dimension along which it is."""
    names = {name for name, _ in layer.named_modules()}
    dimensions = {ROWS: 0, COLUMNS: 1}
    return {name: dimensions[style] for name, style in plan.items() if name in names and style in dimensions}


def cut_layer(layer: nn.Module, plan: Mapping[str, str], group: SharingGroup) -> dict[nn.Parameter, int]:
    """Keep this rank's slices of a language layer; return the cut parameters with the dimension along which they are.

    The layer takes and returns the states of this rank's tokens then.
    """
    cut: dict[nn.Parameter, int] = {}
    matrices = matrices_of(layer, plan)
    for name, dimension in matrices.items():
        block, _, last = name.rpartition(".")
        matrix: Any = layer.get_submodule(name)
        matrix.weight = _sliced(matrix.weight, dimension, group)
        cut[matrix.weight] = dimension
        if dimension == 1:
            setattr(layer.get_submodule(block), last, _SummedLinear(matrix, group))
        elif matrix.bias is not None:
            matrix.bias = _sliced(matrix.bias, 0, group)
            cut[matrix.bias] = 0

    def gather(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        # Before the block, not before each matrix: attention takes the number of tokens from what it is given.
        if "hidden_states" in named:
            return positional, {**named, "hidden_states": group.states_of_all(named["hidden_states"])}
        states, *others = positional
        return (group.states_of_all(states), *others), named

    for block in {name.rpartition(".")[0] for name in matrices}:
        layer.get_submodule(block).register_forward_pre_hook(gather, with_kwargs=True)
    return cut


def _sliced(parameter: Any, dimension: int, group: SharingGroup) -> nn.Parameter:
    part = group.slice_of(parameter.detach(), dimension)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


class _SummedLinear(nn.Module):
    """A linear layer of whose matrix each rank holds columns, the whole bias, and the tokens of its part of the sum."""

    def __init__(self, of_rank: Any, group: SharingGroup) -> None:
        """Take over the parameters of the layer that computes this rank's term of the sum."""
        super().__init__()
        self.weight, self.bias = of_rank.weight, of_rank.bias
        self._group = group

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        summed = self._group.summed_states(linear(states, self.weight))
        return summed if self.bias is None else summed + self.bias
