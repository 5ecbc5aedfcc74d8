"""Bytes of the tensors that a rank holds while it builds its stage."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trials import wire
from trials.engine.group import process_group
from trials.tasks.request import Request
from trials.tasks.session import build_stage


class HeldTensors(TorchDispatchMode):
    """The bytes of storages that operations of this thread made; those of views count once, on `meta` not at all."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, StorageWeakRef] = {}
        self.peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        self._storages = {key: held for key, held in self._storages.items() if not held.expired()}
        # Of the present, as a storage may have been emptied.
        return sum(torch.UntypedStorage._new_with_weak_ptr(each.cdata).nbytes() for each in self._storages.values())

    def __torch_dispatch__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        made = function(*arguments, **(options or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return made


def bytes_to_build(file: Path) -> tuple[int, int]:
    """Return the most bytes that this rank holds while it builds stage 0 of the request in `file`, and those after."""
    request = wire.decode(Request, file.read_text())
    rank, ranks = int(os.environ["RANK"]), request.plan.layout.world_size
    with process_group(rank, rank, ranks, f"file://{file}.rendezvous") as device, HeldTensors() as tensors:
        stage = build_stage(request, 0, device)
        held = tensors.held_bytes
        del stage
    return tensors.peak_bytes, held
