"""Ranks of which one comes to a rendezvous later than collectives wait."""

import os
import time
from datetime import timedelta
from pathlib import Path

from torch.distributed.distributed_c10d import _set_pg_timeout

from trials.engine.group import env_rendezvous, process_group, wait_for_all

_LIMIT, _LATE = timedelta(seconds=1), 2.0
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
