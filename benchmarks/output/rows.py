"""Rows of a benchmark that take minutes each: kept in a file, from which an ended run goes on."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeAlias

Task: TypeAlias = Callable[[Any], dict[str, Any]]
"""Function from a number or a name to one row."""


def done_rows(tasks: Sequence[tuple[Task, int | str]], path: Path, processes: int) -> list[dict[str, Any]]:
    """Return one row of each task, in order; those that an earlier run has left in the file are taken from it."""
    found: dict[tuple[str, int | str], dict[str, Any]] = {}
    if path.exists():
        with path.open() as lines:
            found = {(row["task"], row["number"]): row for row in map(json.loads, lines)}
    with ProcessPoolExecutor(processes) as pool, path.open("a") as file:
        left = [(task, number) for task, number in tasks if (task.__name__, number) not in found]
        running = {pool.submit(task, number): (task.__name__, number) for task, number in left}
        for done in as_completed(running):
            task, number = running[done]
            found[task, number] = {"task": task, "number": number, **done.result()}
            print(json.dumps(found[task, number]), file=file, flush=True)
    return [found[task.__name__, number] for task, number in tasks]
