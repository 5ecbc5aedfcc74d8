"""Layers that keep nothing on the device: what autograd saves of them is copied to the host, and fetched back.

Each storage is copied once, whole, so views, shared tensors and strides come back as they were. At most two layers of a
rank are on their way in a pass: a layer's memory is freed when the next such layer has run, and as the backward
pass reaches a layer, what the one before it keeps is fetched.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from trials.offload.transfers import Transfers
from trials.recomputation.saving import StorageView, bytes_of

# A choice: at 25 GB/s a copy of 64 KiB takes 2.6 us, about as long as its launch.
_LEAST_BYTES = 1 << 16
"""Smaller storages stay on the device: their copies would take longer to launch than to make."""


class Offloading:
    """The layers of one rank's stage that offload what they keep, for all packs in flight."""

    def __init__(self, transfers: Transfers, least_bytes: int = _LEAST_BYTES) -> None:
        self._transfers, self._least_bytes = transfers, least_bytes
        self._known: dict[int, ref[_Content]] = {}
        """The contents of the pack that runs forward, by their storage on the device."""
        self._last: _Layer | None = None
        """The last layer of the pack that runs forward."""
        self._leaving: _Layer | None = None
        """The layer whose contents are on their way to the host."""

    def begin_pack(self) -> None:
        """Begin the forward pass of another pack."""
        self._known.clear()
        self._last = None

    def run(self, module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        """Return the states after a layer, which has its backward pass later; its weights stay on the device."""
        layer = _Layer(before=self._last)
        # Asked when the layer runs, since DeepSpeed moves weights into storages of its own.
        weights = {each.untyped_storage()._cdata for each in chain(module.parameters(), module.buffers())}

        def saved(tensor: torch.Tensor) -> "torch.Tensor | _Saved":
            content = None if tensor.untyped_storage()._cdata in weights else self._content(tensor)
            return tensor if content is None else layer.saved(content, tensor)

        with saved_tensors_hooks(saved, _restored):
            output = run(states)
        if self._leaving is not None:
            self._leaving.leave()
        self._last = self._leaving = layer
        return output

    def end_pack(self, output: torch.Tensor) -> None:
        """Fetch what the last layer of the pack keeps as soon as the backward pass of the output begins."""
        if (last := self._last) is not None and output.requires_grad:
            output.register_hook(lambda _: self._begin_backward(last))

    def _begin_backward(self, last: "_Layer") -> None:
        """Fetch what the last layer of a pack keeps. That of another pack, whose forward pass was later, leaves."""
        if self._leaving is not last and self._leaving is not None:
            self._leaving.leave()
        self._leaving = None
        last.fetch()

    def _content(self, tensor: torch.Tensor) -> "_Content | None":
        """Return the content of a tensor's storage, on its way to the host; None where it stays on the device."""
        storage = tensor.untyped_storage()
        is_plain = tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()
        if tensor.device.type != self._transfers.device.type or not is_plain or storage.nbytes() < self._least_bytes:
            return None
        known = self._known.get(storage._cdata)
        content = None if known is None else known()
        if content is None:
            content = _Content(self._transfers, storage)
            self._known[storage._cdata] = ref(content)
        return content


class _Layer:
    """What one layer keeps of one pack; autograd holds it as long as it needs it."""

    def __init__(self, before: "_Layer | None") -> None:
        """`before` is the layer of the pack that has its backward pass next."""
        self._before = before
        self._kept: list[ref[_Content]] = []
        self._is_reached = False

    def saved(self, content: "_Content", tensor: torch.Tensor) -> "_Saved":
        self._kept.append(ref(content))
        return _Saved(layer=self, content=content, shown=StorageView.of(tensor))

    def reach(self) -> None:
        """Fetch what this layer keeps as its backward pass begins, and then what the one before it does."""
        if self._is_reached:
            return
        self._is_reached = True
        self.fetch()
        if self._before is not None:
            self._before.fetch()

    def fetch(self) -> None:
        for content in self._contents():
            content.fetch()

    def leave(self) -> None:
        for content in self._contents():
            content.leave()

    def _contents(self) -> "Iterator[_Content]":
        return (content for each in self._kept if (content := each()) is not None)


class _Content:
    """The bytes of a storage: on the device and on their way to the host, on the host, or fetched."""

    def __init__(self, transfers: Transfers, storage: torch.UntypedStorage) -> None:
        self._transfers, self._is_arriving = transfers, False
        self._done: torch.cuda.Event | None = None
        # As long as this exists, no other storage gets its address.
        self._address = StorageWeakRef(storage)
        self._on_device: torch.Tensor | None = bytes_of(storage, transfers.device)
        self._on_host = transfers.host_bytes(storage.nbytes())
        self._done = transfers.copy(self._on_host, self._on_device)

    def leave(self) -> None:
        """Free the memory of the device, which uses it again only after the copy."""
        self._transfers.await_end(self._done)
        self._on_device = None

    def fetch(self) -> None:
        """Copy the bytes back to the device, unless they are there."""
        if self._on_device is None:
            # Of the computing stream, which may use the memory of what it freed before.
            self._on_device = torch.empty_like(self._on_host, device=self._transfers.device)
            self._done, self._is_arriving = self._transfers.copy(self._on_device, self._on_host), True

    def storage(self) -> torch.UntypedStorage:
        """Return the bytes on the device, for what is launched next."""
        self.fetch()
        if self._is_arriving:
            self._transfers.await_end(self._done)
            self._is_arriving = False
        assert self._on_device is not None
        return self._on_device.untyped_storage()

    def __del__(self) -> None:
        # The memory is used again, or unmapped, which waits for the computing stream alone. A copy may still write it,
        # where autograd needed only a part of what was fetched, or read it: the last layer of a pack does not leave.
        self._transfers.await_end(self._done)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Saved:
    """A tensor that autograd has saved, as a view of a content."""

    layer: _Layer
    content: _Content
    shown: StorageView


def _restored(saved: torch.Tensor | _Saved) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    saved.layer.reach()
    return saved.shown.over(saved.content.storage())
