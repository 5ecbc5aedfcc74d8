"""Weights under ZeRO 3: each data rank holds a share of every one, and a layer's are gathered while it runs.

DeepSpeed gathers and frees weights by hooks of modules. Here a layer is one module to it (a "leaf"), so that its
weights come together and go together: a rank holds those of one layer at a time, and of the word embedding until the
end of the backward pass, as nothing before it has a gradient whose hook would free it. What a layer's recomputation
gathers stays for the backward pass behind it, and so do the weights of the head between its passes.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from deepspeed.runtime.zero import Init, parameter_offload
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import set_z3_leaf_module
from torch import nn

from trials.model.paths import part_at
from trials.model.stage import StageModule

SETTINGS = {
    "stage3_param_persistence_threshold": 0,  # small weights come with the others of their layer
    "stage3_prefetch_bucket_size": 0,  # without overlap, gathering ahead saves no time
    "stage3_max_reuse_distance": 1,  # keeps what the next module needs
    "stage3_allgather_sequential": True,  # a message for each weight, without a copy of them all
    "memory_efficient_linear": False,  # `_linear` takes its place
}
"""DeepSpeed's settings of ZeRO 3."""

_usual_linear = torch.nn.functional.linear


class _FrozenLinear(torch.autograd.Function):
    """A linear function of a frozen weight: like torch's own, it keeps nothing of its input."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return _usual_linear(states, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gradient.matmul(weight), None, None


def _linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Apply a linear layer without keeping a view of its weight, which would keep the gathered weight in memory."""
    is_frozen = not (weight.requires_grad or (bias is not None and bias.requires_grad))
    function: Any = _FrozenLinear if is_frozen else LinearFunctionForZeroStage3
    found: torch.Tensor = function.apply(states, weight, bias)
    return found


def share_weights(weights: Iterable[nn.Parameter], config: Mapping[str, Any]) -> None:
    """Leave this rank its shard of these weights, whose values are those of rank 0; every rank must call it.

    They stay the same objects, and are empty. DeepSpeed itself shards weights only when all of them are on the device.
    """
    Init(module=nn.ParameterList(weights), config_dict_or_path=dict(config))


def begin_gathering(stage: StageModule) -> None:
    """Let DeepSpeed gather the weights of each vision and language layer together; call it before its engine exists."""
    for path in _layers(stage):
        set_z3_leaf_module(stage.model.get_submodule(path), True)
    torch.nn.functional.linear = _linear  # type: ignore[assignment]


def gathered_together(stage: StageModule, paths: Iterable[str]) -> list[Sequence[nn.Parameter]]:
    """Return the weights under these paths of the chain that are gathered together, one group after the other."""
    layers, groups = _layers(stage), list[Sequence[nn.Parameter]]()
    for path in paths:
        part = part_at(stage.model, path)
        if path in layers:
            groups.append(list(stage.model.get_submodule(path).parameters()))
        elif isinstance(part, nn.Parameter):
            groups.append([part])
        else:
            groups += [list(module.parameters(recurse=False)) for module in part.modules()]
    return [group for group in groups if group]


def _layers(stage: StageModule) -> tuple[str, ...]:
    """Return the paths of the stage's vision and language layers."""
    chain, cut = stage.chain, stage.cut
    vision = (chain.vision_layers[number] for number in cut.vision)
    return (*vision, *(chain.language_layers[number] for number in cut.language))


def end_gathering() -> None:
    """Undo what outlives an engine with ZeRO 3: the replaced linear function, and modules that DeepSpeed holds."""
    torch.nn.functional.linear = _usual_linear
    parameter_offload.FWD_MODULE_STACK.clear()
    # A cache of the class, inside two wrappers, whose keys are modules.
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in cached.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


class GatheredWeights:
    """The weights that this rank has gathered at this moment, by the address of their storage."""

    def __init__(
        self, parameters: Iterable[Any], hold: Callable[[int, int], None], release: Callable[[int, int], None]
    ) -> None:
        """`hold` and `release` are called with (address, bytes) of each weight that is gathered and freed."""
        self._hold, self._release = hold, release
        self._held: dict[Any, tuple[int, int]] = {}
        self._by_address: dict[int, Any] = {}
        for parameter in parameters:
            # DeepSpeed gives each parameter these functions.
            for name in ("all_gather_coalesced", "all_gather", "partition"):
                setattr(parameter, name, self._watched(getattr(parameter, name), parameter))

    def whole(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the parameter whose gathered weight the tensor is; None for any other tensor, or a view of one."""
        parameter = self._by_address.get(tensor.untyped_storage().data_ptr())
        if parameter is None or tensor.shape != parameter.shape or tensor.stride() != parameter.stride():
            return None
        found: torch.Tensor = parameter
        return found

    def _watched(self, run: Callable[..., Any], parameter: Any) -> Callable[..., Any]:
        def watched(*arguments: Any, **options: Any) -> Any:
            changed = arguments[0] if arguments else options.get("param_list")
            changed = [parameter] if changed is None else list(changed)
            result = run(*arguments, **options)
            for each in changed:
                self._update(each)
            return result

        return watched

    def _update(self, parameter: Any) -> None:
        is_here = parameter.ds_status != ZeroParamStatus.NOT_AVAILABLE
        if is_here and parameter not in self._held:
            storage = parameter.data.untyped_storage()
            self._held[parameter] = storage.data_ptr(), storage.nbytes()
            self._by_address[storage.data_ptr()] = parameter
            self._hold(*self._held[parameter])
        elif not is_here and parameter in self._held:
            address, size = self._held.pop(parameter)
            del self._by_address[address]
            self._release(address, size)
