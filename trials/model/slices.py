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

    Where it has none for layers, as for Qwen3-VL, the plan is that of Qwen3, whose names are those of most models.
    """
    return _of_layers(config.get_text_config()) or _of_layers(AutoConfig.for_model("qwen3"))


def _of_layers(config: PretrainedConfig) -> dict[str, str]:
    plan = config.base_model_tp_plan or {}
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
    gathers = {name.rpartition(".")[0]: _Gather(group) for name in matrices}
    for name, dimension in matrices.items():
        block, _, last = name.rpartition(".")
        matrix: Any = layer.get_submodule(name)
        matrix.weight = _sliced(matrix.weight, dimension, group)
        cut[matrix.weight] = dimension
        # Behind a matrix cut by columns the bias is added once, to the sum, so every rank keeps it whole.
        if dimension == 0 and matrix.bias is not None:
            matrix.bias = _sliced(matrix.bias, 0, group)
            cut[matrix.bias] = 0
        module = _GatheredLinear(matrix, gathers[block]) if dimension == 0 else _SummedLinear(matrix, group)
        setattr(layer.get_submodule(block), last, module)
    for block, gather in gathers.items():
        # Before the block, not before each matrix: attention takes the number of tokens from what it is given.
        layer.get_submodule(block).register_forward_pre_hook(gather.begin, with_kwargs=True)
        layer.get_submodule(block).register_forward_hook(gather.end)
    return cut


def _sliced(parameter: Any, dimension: int, group: SharingGroup) -> nn.Parameter:
    # `slice_of` copies: a view would keep the whole weight in memory.
    part = group.slice_of(parameter.detach(), dimension)
    return nn.Parameter(part, requires_grad=parameter.requires_grad)


class _Gathered:
    """The states of all tokens of one pass through a block, gathered again for the backward pass.

    In between, a rank keeps those of its own tokens alone, which are `part` [1, t, hidden].
    """

    def __init__(self, part: torch.Tensor, group: SharingGroup) -> None:
        self.part = part
        self._group = group
        self._readers = 0
        self._again: torch.Tensor | None = None

    def expect_reader(self) -> None:
        """Gather again for one more matrix."""
        self._readers += 1

    def again(self, part: torch.Tensor) -> torch.Tensor:
        """Return the states once for each matrix; they are free after the last."""
        if self._again is None:
            self._again = self._group.states_of_all(part)
        whole, self._readers = self._again, self._readers - 1
        if not self._readers:
            self._again = None
        return whole


class _Gather:
    """The hooks of a block that gather the states in front of it."""

    current: _Gathered | None = None
    """Gathered states of the pass that runs."""

    def __init__(self, group: SharingGroup) -> None:
        self._group = group

    def begin(self, _: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
        if "hidden_states" in named:
            return positional, {**named, "hidden_states": self._begun(named["hidden_states"])}
        states, *others = positional
        return (self._begun(states), *others), named

    def end(self, *_: object) -> None:
        self.current = None  # What the backward pass needs is saved for it.

    def _begun(self, part: torch.Tensor) -> torch.Tensor:
        self.current = _Gathered(part.detach(), self._group)
        return self._group.states_of_all(part)


class _LinearOfGathered(torch.autograd.Function):
    """A linear layer that saves this rank's tokens of its input."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gathered: _Gathered
    ) -> torch.Tensor:
        ctx.save_for_backward(gathered.part, weight)
        ctx.gathered = gathered
        # A frozen matrix needs no input in the backward pass, so nothing is gathered for it.
        if ctx.needs_input_grad[1]:
            gathered.expect_reader()
        return linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        (gradient,) = gradients
        rows = gradient.flatten(0, -2)
        of_states, of_weight, of_bias, *_ = ctx.needs_input_grad
        return (
            gradient @ weight if of_states else None,
            rows.T @ ctx.gathered.again(part).flatten(0, -2) if of_weight else None,
            rows.sum(0) if of_bias else None,
            None,
        )


class _GatheredLinear(nn.Module):
    """A linear layer of whose matrix each rank holds rows, behind a gather."""

    def __init__(self, of_rank: Any, gather: _Gather) -> None:
        """Take over the parameters of the layer that computes this rank's part of the output."""
        super().__init__()
        self.weight, self.bias = of_rank.weight, of_rank.bias
        self._gather = gather

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        gathered = self._gather.current
        assert gathered is not None, "its block gathers the states before it calls its matrices"
        output: torch.Tensor = _LinearOfGathered.apply(  # type: ignore[no-untyped-call]
            states, self.weight, self.bias, gathered
        )
        return output


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
