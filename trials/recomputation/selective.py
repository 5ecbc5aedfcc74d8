"""Selective recomputation: layers keep what is expensive to compute, and compute the rest of it again from that.

Of each tensor that autograd saves, a layer keeps the bytes or those that they are computed from, whichever takes less
memory beyond what it keeps already. Only the operations of `_CHEAP` run again, on the same inputs, so that gradients
are equal bit by bit. The selective checkpoints of torch keep all outputs of expensive operations, and show hooks on
saved tensors none of them.
"""

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trials.recomputation.saving import SavingHooks, StorageView, bytes_of, hooks_around, saving

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")
_CHEAP = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        *("add", "sub", "rsub", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp", "tanh"),
        *("sigmoid", "silu", "gelu", "relu", "hardswish", "where", "clamp", "mean", "_to_copy", "clone", "cat"),
        *("native_layer_norm", "_fused_rms_norm"),
    )
)
"""Operations whose time is that of reading and writing their tensors, with the same result whenever they run."""


def run_selectively(layer: nn.Module, run: Callable[[_Input], _Output], states: _Input) -> _Output:
    """Return the states after a layer that keeps no tensor which operations of `_CHEAP` compute from others."""
    recording = _Recording(layer)
    with saving(SavingHooks(recording.pack, recording.unpack)), recording:
        return run(states)


class _Operand:
    """The bytes of a storage that a layer uses: kept, or computed again."""

    __slots__ = ("__weakref__", "_address", "again", "call", "device", "is_again", "kept", "saved", "size")

    def __init__(self, tensor: torch.Tensor, call: "_Call | None" = None) -> None:
        """The operand of a tensor that shows any part of its storage."""
        storage, self.device = tensor.untyped_storage(), tensor.device
        # As long as this exists, no other storage gets its address.
        self._address = StorageWeakRef(storage)
        self.call = call
        """The cheap operation that computed them; None where they have to be kept if they are needed."""
        self.size = storage.nbytes()
        self.kept: Any = None
        """What the hooks around the layer made of them; None while they are not needed, or computed again."""
        self.is_again = False
        """Whether they are computed again."""
        self.again: Any = None
        """What the hooks around the layer made of them when they were, as long as autograd needs them."""
        self.saved = 0
        """Number of tensors of this operand that autograd holds."""

    @property
    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if anything else still holds it."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._address.cdata)
        return found

    @property
    def is_settled(self) -> bool:
        """Whether the backward pass has them."""
        return self.is_again or self.kept is not None


class _View(NamedTuple):
    """A tensor as a view of an operand."""

    operand: _Operand
    shown: StorageView


class _SavedOperand:
    """A tensor that autograd has saved. What is computed again is freed with the last such tensor of its operand."""

    __slots__ = ("view",)

    def __init__(self, view: _View) -> None:
        self.view = view
        view.operand.saved += 1

    def __del__(self) -> None:
        operand = self.view.operand
        operand.saved -= 1
        if not operand.saved:
            operand.again = None


class _Call:
    """One call of a cheap operation. Its outputs hold it, and it holds its inputs."""

    __slots__ = ("_arguments", "_operation", "inputs", "outputs")

    def __init__(self, operation: Any, arguments: tuple[Any, Any]) -> None:
        self._operation, self._arguments = operation, arguments
        self.inputs = tuple({id(view.operand): view.operand for view in _each(arguments, _View)}.values())
        self.outputs: list[ref[_Operand]] = []

    def run(self, tensor_of: Callable[[_View], torch.Tensor]) -> Iterator[tuple[_Operand, torch.Tensor]]:
        """Yield the outputs whose operands still exist."""
        args, kwargs = _mapped(self._arguments, _View, tensor_of)
        for output, tensor in zip(self.outputs, _each(self._operation(*args, **kwargs), torch.Tensor), strict=True):
            if (operand := output()) is not None:
                yield operand, tensor


class _Recording(TorchDispatchMode):
    """The forward pass of a layer, and what its backward pass computes again of it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._around = hooks_around()
        # As they are when it runs: DeepSpeed moves weights into storages of its own.
        weights = (each.untyped_storage() for each in chain(layer.parameters(), layer.buffers()))
        self._weights = {storage._cdata: storage for storage in weights}
        self._operands: dict[int, _Operand] = {}
        """Operands by the address of their storage, during the forward pass."""
        self._is_packing = False

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if error[0] is None:
            self._drop_computable()
        self._operands.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_packing:
            return func(*args, **(kwargs or {}))
        # Operations of torch.distributed write into their tensors, and do not declare it.
        if func._schema.is_mutable or func.namespace == "c10d":
            for tensor in _each((args, kwargs), torch.Tensor):
                self._change(tensor)
        found = func(*args, **(kwargs or {}))
        if func._overloadpacket in _CHEAP and not func._schema.is_mutable:
            self._record(_Call(func, _mapped((args, kwargs or {}), torch.Tensor, self._view)), found)
        return found

    def _record(self, call: _Call, found: Any) -> None:
        for tensor in _each(found, torch.Tensor):
            # A call that returns its input has computed nothing.
            operand = self._operands.setdefault(tensor.untyped_storage()._cdata, _Operand(tensor, call))
            call.outputs.append(ref(operand))

    def _view(self, tensor: torch.Tensor) -> _View:
        address = tensor.untyped_storage()._cdata
        operand = self._operands.get(address)
        if operand is None:
            operand = self._operands[address] = _Operand(tensor)
            if address in self._weights:
                operand.kept = self._around.pack(tensor)
        return _View(operand, StorageView.of(tensor))

    def _change(self, tensor: torch.Tensor) -> None:
        """Let nothing be computed again from a tensor that an operation is about to write."""
        changed = self._operands.get(tensor.untyped_storage()._cdata)
        if changed is None:
            return
        for operand in [*self._operands.values()]:
            if operand is changed or (operand.call is not None and changed in operand.call.inputs):
                if operand.is_again:
                    self._keep(operand)
                operand.call = None

    # --- the forward pass: what is kept ---

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd holds in place of a tensor that it saves."""
        if tensor.untyped_storage()._cdata in self._weights:
            return self._around.pack(tensor)
        self._is_packing = True
        try:
            view = self._view(tensor)
            self._settle(view.operand)
            return _SavedOperand(view)
        finally:
            self._is_packing = False

    def _settle(self, operand: _Operand) -> None:
        """Keep the bytes of an operand, or those that it can be computed from, if these take less."""
        if operand.is_settled:
            return
        if operand.call is not None and self._price_of_inputs(operand.call) < operand.size:
            operand.is_again = True
            for each in operand.call.inputs:
                self._settle(each)
        else:
            self._keep(operand)

    def _price(self, operand: _Operand) -> float:
        """Return the bytes to keep so that the backward pass has an operand; infinite where nothing holds it."""
        if operand.is_settled:
            return 0.0
        alone = float(operand.size) if operand.storage is not None else torch.inf
        return alone if operand.call is None else min(alone, self._price_of_inputs(operand.call))

    def _price_of_inputs(self, call: _Call) -> float:
        return sum(map(self._price, call.inputs))

    def _keep(self, operand: _Operand) -> None:
        storage = operand.storage
        if storage is None:
            storage = self._computed(operand, {}).untyped_storage()
        operand.kept = self._around.pack(bytes_of(storage, operand.device))
        operand.is_again, operand.again = False, None

    def _drop_computable(self) -> None:
        """Keep nothing that can be computed from what was kept after it."""
        for operand in self._operands.values():
            if operand.kept is None or operand.call is None:
                continue
            if not self._price_of_inputs(operand.call):
                operand.is_again, operand.kept = True, None
                for each in operand.call.inputs:
                    self._settle(each)
            else:
                operand.call = None  # which holds its inputs

    # --- the backward pass: what is computed again ---

    def unpack(self, saved: Any) -> torch.Tensor:
        """Return a tensor that autograd has saved."""
        if not isinstance(saved, _SavedOperand):
            return self._around.unpack(saved)
        with torch.no_grad():
            return self._tensor(saved.view, {})

    def _tensor(self, view: _View, found: dict[_Operand, torch.Tensor]) -> torch.Tensor:
        return view.shown.over(self._computed(view.operand, found).untyped_storage())

    def _computed(self, operand: _Operand, found: dict[_Operand, torch.Tensor]) -> torch.Tensor:
        """Return a tensor with the storage of an operand; `found` has operands that were computed for another."""
        for held in (operand.kept, operand.again):
            if held is not None:
                return self._around.unpack(held)
        if operand not in found:
            assert operand.call is not None, "what is neither kept nor computed again was saved"
            for output, tensor in operand.call.run(lambda view: self._tensor(view, found)):
                found[output] = tensor
                # Autograd asks for it later, or for another tensor of the same operand.
                if output.saved and output.is_again:
                    output.again = self._around.pack(tensor)
        return found[operand]


def _each(values: Any, kind: type) -> Iterator[Any]:
    """Yield the values of this type in tuples, lists and dictionaries."""
    if isinstance(values, kind):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _each(value, kind)
    elif isinstance(values, dict):
        yield from _each(tuple(values.values()), kind)


def _mapped(values: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Return tuples, lists and dictionaries with a function's results in place of the values of this type."""
    if isinstance(values, kind):
        return function(values)
    if isinstance(values, tuple | list):
        return type(values)(_mapped(value, kind, function) for value in values)
    if isinstance(values, dict):
        return {name: _mapped(value, kind, function) for name, value in values.items()}
    return values
