"""Functions that a test runs on ranks of its own, forked from a process that has imported what ranks import."""

import os
import sys
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

import torch

from tests.programs.forked import FORKED

_MOST_SECONDS = 240.0


def on_ranks(function: Callable[..., Any], *arguments: object, world_size: int = 2) -> list[Any]:
    """Return what the function, which a module has at its top level, returns on each rank."""
    answers: Queue[tuple[int, Any]] = FORKED.Queue()
    ranks = [
        FORKED.Process(target=_run, args=(answers, rank, world_size, function, arguments), daemon=True)
        for rank in range(world_size)
    ]
    try:
        for process in ranks:
            process.start()
        found = dict(answers.get(timeout=_MOST_SECONDS) for _ in ranks)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return [found[rank] for rank in range(world_size)]


def _run(
    answers: "Queue[tuple[int, Any]]",
    rank: int,
    world_size: int,
    function: Callable[..., Any],
    arguments: tuple[object, ...],
) -> None:
    assert "tests.machines.imported_once" in sys.modules  # multiprocessing says nothing where it cannot be imported
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "DS_ACCELERATOR": "cpu"}
    torch.set_num_threads(1)
    answers.put((rank, function(*arguments)))
