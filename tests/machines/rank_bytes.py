"""Bytes that the model of a rank takes while it trains two steps of a request.

Counted are the storages of weights, gradients and optimizer states, after the passes of the second step and before its
update. Buffers for communication are left out.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.tensor_fragment import tensor_fragment

from trials import wire
from trials.engine.base import OPTIMIZER
from trials.engine.group import process_group
from trials.engine.memory import module_static_bytes
from trials.engine.stopwatch import Stopwatch
from trials.tasks.request import Request
from trials.tasks.session import Session, open_session


class _HeldBytesProbe(Stopwatch):
    """Measures a session at the beginning of each update."""

    def __init__(self, session: Session) -> None:
        super().__init__(torch.device("cpu"))
        self._session = session
        self.held_bytes = 0

    def section(self, name: str) -> Any:
        if name == OPTIMIZER:
            self.held_bytes = held_bytes(self._session)
        return super().section(name)


def held_bytes(session: Session) -> int:
    engine: Any = session.engine
    roots = [list(engine.stage.parameters()), vars(engine.state._wrapper), engine.state._optimizer.state]
    roots += [vars(each) for each in engine.stage.shards]
    seen: set[int] = set()
    storages = {}
    for tensor in (tensor for root in roots for tensor in _tensors(root, seen)):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def _tensors(value: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors in `value`, with their gradients and what DeepSpeed has attached to them."""
    if id(value) in seen:
        return
    seen.add(id(value))
    inner: list[Any] = []
    if isinstance(value, torch.Tensor):
        yield value
        inner = [value.grad, vars(value)]
    elif isinstance(value, tensor_fragment):
        inner = [vars(value)]
    elif isinstance(value, dict):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    for each in inner:
        yield from _tensors(each, seen)


def measured_bytes(files: Sequence[Path]) -> list[dict[str, int]]:
    """Return the bytes of each request, on the rank that this process is."""
    return [_bytes_of(file) for file in files]


def _bytes_of(file: Path) -> dict[str, int]:
    request = wire.decode(Request, file.read_text())
    rank = int(os.environ["RANK"])
    with (
        process_group(rank, rank, request.plan.layout.world_size, f"file://{file}.rendezvous") as device,
        open_session(request, rank, device) as session,
    ):
        probe = _HeldBytesProbe(session)
        session.engine.stopwatch = probe
        epoch = session.epoch(0)
        with closing(session.batches(epoch, [0, 1])) as batches:
            for number in (0, 1):
                session.step(batches, epoch.step(number))
        stage = session.engine.stage
        trained = (each for each in stage.parameters() if each.requires_grad)
        return {
            "held": probe.held_bytes,
            "expected": module_static_bytes(stage, request.plan.layout),
            "trained": sum(each.numel() for each in trained),
        }
