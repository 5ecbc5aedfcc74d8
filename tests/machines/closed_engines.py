"""What is left of an engine in its process after it was closed."""

import gc
import os
import weakref
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from trials import wire
from trials.engine.group import process_group
from trials.tasks.request import Request
from trials.tasks.session import open_session


def left_behind(files: Sequence[Path]) -> list[bool]:
    """Return for each request whether weights of its engine stay."""
    return [_after(file) for file in files]


def _after(file: Path) -> bool:
    request = wire.decode(Request, file.read_text())
    rank = int(os.environ["RANK"])
    with process_group(rank, rank, request.plan.layout.world_size, f"file://{file}.rendezvous") as device:
        with open_session(request, rank, device) as session:
            epoch = session.epoch(0)
            with closing(session.batches(epoch, [0, 1, 2])) as batches:
                for number in range(3):
                    session.step(batches, epoch.step(number))
            weight = weakref.ref(next(session.engine.stage.parameters()))
        del session, epoch, batches
    gc.collect()
    return weight() is not None
