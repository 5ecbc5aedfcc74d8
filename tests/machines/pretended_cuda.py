"""A pretended CUDA device: tensors without values, whose operations check devices and what the host waits for.

torch's FakeTensorMode makes such tensors, but a CPU build of torch has no autograd for CUDA. Python code sees a CUDA
device, and torch's C++ code one of a backend that is written in Python, which every build can run.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

CUDA = torch.device("cuda", 0)
_NAME = "pretended"
_HOOKS: list[Any] = []
"""Of the backend; torch keeps only pointers to them."""
_WAITING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount", "_unique", "_unique2",
        "unique_dim", "unique_consecutive", "masked_scatter_backward",
    )
}  # fmt: skip
"""Operations whose result, or its shape, the host reads from the device."""
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"}


class _Backend(backend_registration._DummyBackendModule):
    def is_available(self) -> bool:
        """Say no, as on a machine without a device: otherwise FakeTensorMode copies to it."""
        return False


class HostWaits(Exception):
    """The host would wait for the device."""


class _FakeMode(FakeTensorMode):
    """Tells C++ code, which asks by an operation, that tensors on CUDA are on the backend."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        answer: Any = super().__torch_dispatch__(func, types, args, _on_cuda(kwargs))
        if func is torch.ops.prim.device.default and answer.type == "cuda":
            return torch.device(_NAME, 0)
        return answer


def _on_cuda(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return options of an operation with CUDA in place of the backend."""
    given = dict(options or {})
    if given.get("device") is not None and given["device"].type == _NAME:
        given["device"] = CUDA
    return given


class PretendedCuda(TorchDispatchMode):
    """Makes tensors on a CUDA device that exists nowhere; tensors on the CPU are real.

    An operation on tensors of several devices raises, as on a real device. Inside `refusing_waits`, one for which the
    host would wait raises HostWaits.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = _FakeMode(allow_non_fake_inputs=True)
        self._refuses = False
        self._waits: list[str] = []
        self._patch = patch.object(torch, "tensor", _tensor)
        self._values = WeakIdKeyDictionary()
        """What was copied to the device as it was."""
        self._locked = WeakIdKeyDictionary()
        """Page-locked tensors on the CPU."""

    def __enter__(self) -> Self:
        _register()
        self._fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._patch.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._patch.stop()
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._fake.__exit__(kind, error, trace)

    @contextmanager
    def refusing_waits(self) -> Iterator[None]:
        self._refuses = True
        try:
            yield
        except (RuntimeError, SystemError):
            # An error in a thread of the backward pass becomes another one on its way to the main thread.
            self._check()
            raise
        finally:
            self._refuses = False
        self._check()

    def _check(self) -> None:
        if self._waits:
            raise HostWaits(self._waits[0])

    @contextmanager
    def allowing_waits(self) -> Iterator[None]:
        refuses, self._refuses = self._refuses, False
        try:
            yield
        finally:
            self._refuses = refuses

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = _on_cuda(kwargs)
        if func is torch.ops.prim.device.default:
            return func(*args)
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, torch.Tensor)]
        target = given.get("device") or torch.device("cpu")
        if given.pop("pin_memory", None):
            with _disable_current_modes():
                locked = func(*args, **given)
            self._locked[locked] = True
            return locked
        if target.type != "cuda" and not any(isinstance(each, FakeTensor) for each in tensors):
            with _disable_current_modes():
                return func(*args, **given)
        name = func._schema.name
        to_locked = name == "aten::copy_" and args[0] in self._locked and args[2:] == (True,)
        if to_locked:
            return args[0]
        if self._refuses and (why := _wait(name, args, given)):
            self._waits.append(f"{name} {why}")
            if threading.current_thread() is threading.main_thread():
                self._check()
        if name == "aten::_to_copy" and isinstance(args[0], FakeTensor) and target.type == "cpu" and "device" in given:
            return self._values[args[0]]
        made = func(*args, **given)
        if name == "aten::_to_copy" and not isinstance(args[0], FakeTensor):
            self._values[made] = args[0]
        return made


def _register() -> None:
    """Register the backend that stands for CUDA in C++ code, once and before the first backward pass of a process."""
    if _HOOKS:
        return
    hooks, guard = backend_registration._DummyPrivateUse1Hook(), backend_registration._DummyDeviceGuard()
    backend_registration.rename_privateuse1_backend(_NAME)
    torch._register_device_module(_NAME, _Backend())
    torch._C._acc.register_python_privateuseone_hook(hooks)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _HOOKS.extend((hooks, guard))


_MAKE = torch.tensor


def _tensor(data: Any, *, device: torch.device | str | None = None, **options: Any) -> torch.Tensor:
    """Make a tensor on the CPU and copy it, as torch does where no mode of Python sees it."""
    made = _MAKE(data, **options)
    return made if device is None else made.to(device)


def _wait(name: str, args: Sequence[Any], given: Mapping[str, Any]) -> str | None:
    """Return why the host would wait for an operation on tensors of which one is on the device."""
    if name in _WAITING:
        return "reads from the device"
    if name == "aten::repeat_interleave" and given.get("output_size") is None:
        return "reads its size from the device"
    if name in _INDEXING and any(index is not None and not _counts(index) for index in args[1]):
        return "takes a mask, or an index on the CPU"
    if name in ("aten::_to_copy", "aten::copy_"):
        source = args[1] if name == "aten::copy_" else args[0]
        target = args[0].device if name == "aten::copy_" else torch.device(given.get("device") or source.device)
        if source.device.type == "cuda" != target.type:
            return "copies to the CPU"
        is_asynchronous = given.get("non_blocking") or (name == "aten::copy_" and len(args) > 2 and args[2])
        if source.device.type != "cuda" == target.type and not is_asynchronous:
            return "copies to the device, and waits until that is done"
    return None


def _counts(index: torch.Tensor) -> bool:
    return index.device.type == "cuda" and index.dtype not in (torch.bool, torch.uint8)
