"""Ranks of which one comes to a rendezvous, or is done with its files, later than collectives wait."""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Backend, _get_default_group, _get_default_timeout, _set_pg_timeout

from trials import wire
from trials.engine.group import env_rendezvous, process_group, wait_for_all
from trials.tasks.certifying import saved
from trials.tasks.request import Request, Training
from trials.tasks.session import open_session
from trials.tasks.training import training

_LIMIT, _LATE = timedelta(seconds=1), 2.0
_LIMIT_OF_STEPS, _LATE_IN_STEPS = timedelta(seconds=3), 4.5
"""The same for ranks that also compute."""
PASSES = 3


def orders_of_passes(folder: Path, port: int) -> list[bool]:
    """Return for each rendezvous whether the rank that came last had been there when this one went on.

    Rank 0, which serves the store, comes last and ends first.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    rank = int(os.environ["RANK"])
    found = []
    with process_group(rank, rank, int(os.environ["WORLD_SIZE"]), env_rendezvous(str(folder))):
        _set_pg_timeout(_LIMIT)
        for number in range(PASSES):
            late = folder / f"late-{number}"
            if rank == number % 2:
                time.sleep(0.0 if rank else _LATE)
                late.touch()
            wait_for_all()
            found.append(late.exists())
    return found


def resumed_steps(file: Path) -> int:
    """Return the steps of a training that is launched twice.

    In the second launch rank 0 is late to verify the output, and rank 1 to read its part of the checkpoint.
    """
    rank, request = int(os.environ["RANK"]), wire.decode(Request, file.read_text())
    assert isinstance(request.task, Training)
    with process_group(rank, rank, 2, f"file://{file}.rendezvous") as device:
        with open_session(request, rank, device) as session:
            training.run_training(session, replace(request.task, max_steps=1), lambda: None)
        with open_session(request, rank, device) as session:
            where, name = (session.engine.state, "create_moments") if rank else (training, "open_output")
            with patch.object(where, name, _late(getattr(where, name), _LATE_IN_STEPS)):
                _set_pg_timeout(_LIMIT_OF_STEPS)
                return training.run_training(session, request.task, lambda: None).steps


def faults_of_slow_loading(folder: Path) -> list[str]:
    """Return the faults of saved weights that rank 0 tries to load for longer than a collective waits."""
    rank = int(os.environ["RANK"])

    def wanted() -> Iterator[tuple[str, torch.Tensor]]:
        weight = torch.zeros(1)
        distributed.all_reduce(weight)
        yield "weight", weight

    def unreadable(*_: Any) -> Any:
        raise OSError("no such file")

    with (
        process_group(rank, rank, 2, f"file://{folder / 'rendezvous'}"),
        patch.object(saved, "SavedWeights", _late(unreadable, _LATE)),
    ):
        _set_pg_timeout(_LIMIT)
        unused: Any = None
        return saved.compare_saved(unused, folder, wanted(), unused, rank)[1]


def _late(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def called(*arguments: Any) -> Any:
        time.sleep(seconds)
        return function(*arguments)

    return called


def timeouts(folder: Path) -> list[timedelta]:
    """Return how long collectives wait: those of all ranks, of some ranks, and what torch gives groups of NCCL."""
    rank = int(os.environ["RANK"])
    with process_group(rank, rank, 2, f"file://{folder / 'rendezvous'}") as device:
        groups: list[Any] = [_get_default_group(), distributed.new_group([0, 1])]
        found = [group._get_backend(device).options._timeout for group in groups]
    return [*found, _get_default_timeout(Backend(Backend.NCCL))]
