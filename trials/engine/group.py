"""The process group of the ranks. A process may leave it and join another, with other ranks and another plan."""

import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlsplit

import deepspeed.ops
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch import distributed
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import _get_default_store
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from trials.channels.folder import FILE_SCHEME
from trials.channels.store import STORE_SCHEME, connect
from trials.errors import SiteError

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""How long collectives wait for a rank that comes late, before they fail."""
_MASTER_SCHEME = "master"
_REQUEST, _TAKEN = "autotune/request", "autotune/rank"
_ARRIVED = "autotune/arrived"
_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 0.02, 1.0
"""Between two questions to the store: thousands of ranks must not keep busy the one that writes and serves it."""


def env_rendezvous(request: str) -> str:
    """Return the `init_method` for MASTER_ADDR and MASTER_PORT of ranks that serve this request, and no other one."""
    return f"{_MASTER_SCHEME}://{hashlib.sha256(request.encode()).hexdigest()}"


def _meet_in_file(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    path, rank, world_size = _parts(url)
    yield FileStore(unquote(path), world_size), rank, world_size


def _meet_at_master(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    """Yield the store of the master, where all ranks must be those of one request.

    A user may have chosen its port for two of them at once. Without the check, ranks of both would train together.
    """
    request, rank, world_size = _parts(url)
    store = _master(rank, world_size, timeout)
    if rank == 0:
        store.set(_REQUEST, request)
    if store.get(_REQUEST).decode() != request or store.add(f"{_TAKEN}/{rank}", 1) > 1:
        raise SiteError(
            f"MASTER_PORT {os.environ['MASTER_PORT']} of {os.environ['MASTER_ADDR']} is that of other ranks, which run "
            "now; choose another port"
        )
    yield store, rank, world_size


def _master(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Return the store at MASTER_ADDR and MASTER_PORT, which rank 0 serves, or torchrun.

    For a loopback address rank 0 listens there alone; torch's own `env://` listens on every interface.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    found = [str(each[4][0]) for each in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if is_served or not all(ipaddress.ip_address(each).is_loopback for each in found):
        served: Store = next(rendezvous("env://", rank, world_size, timeout=timeout))[0]
        return served
    family = socket.AF_INET6 if ":" in found[0] else socket.AF_INET
    listener = socket.create_server((found[0], port), family=family).detach() if rank == 0 else None
    return TCPStore(found[0], port, world_size, rank == 0, timeout, master_listen_fd=listener)


def _meet_in_store(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    path, rank, world_size = _parts(url)
    agent, prefix = path.split("/", 1)
    yield PrefixStore(prefix, connect(agent)), rank, world_size


def _parts(url: str) -> tuple[str, int, int]:
    """Return (what follows the scheme, rank, number of ranks)."""
    parts = urlsplit(url)
    (rank,), (world_size,) = (parse_qs(parts.query)[key] for key in ("rank", "world_size"))
    return parts.netloc + parts.path, int(rank), int(world_size)


# On a CPU DeepSpeed would look for a compiler in each rank, and compile a shared-memory operation for a minute. gloo
# does without it, and nothing else reads this private name.
deepspeed.ops.__compatible_ops__ = {}

# Groups of some ranks take these defaults, DeepSpeed's own ones too; torch would give those of NCCL 10 minutes.
distributed_c10d.default_pg_timeout = COLLECTIVE_TIMEOUT
distributed_c10d.default_pg_nccl_timeout = COLLECTIVE_TIMEOUT  # type: ignore[attr-defined]

register_rendezvous_handler(FILE_SCHEME, _meet_in_file)
register_rendezvous_handler(STORE_SCHEME, _meet_in_store)
register_rendezvous_handler(_MASTER_SCHEME, _meet_at_master)


@contextmanager
def process_group(rank: int, local_rank: int, world_size: int, rendezvous: str) -> Iterator[torch.device]:
    """Join the process group of one trial or training, and yield this rank's device. Leave the group at the end.

    A process that raises stays in the group and must end: under NCCL, to leave is to wait for ranks that wait for this
    one. `rendezvous` is an `init_method` of torch.distributed, from `env_rendezvous` or a channel.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        torch.cuda.set_device(local_rank)
    comm.init_distributed(
        auto_mpi_discovery=False,
        verbose=False,
        timeout=COLLECTIVE_TIMEOUT,
        init_method=rendezvous,
        rank=rank,
        world_size=world_size,
    )
    yield torch.device(accelerator.device_name(local_rank))
    comm.destroy_process_group()
    # DeepSpeed does not drop its reference to the destroyed group itself.
    comm.comm.cdb = None


def wait_for_all() -> None:
    """Wait until every rank has come here, however long one of them uses a slow disk; every rank must call it.

    A collective would end the training after `COLLECTIVE_TIMEOUT`. A rank that dies is noticed by those who started the
    ranks.
    """
    store, ranks = _get_default_store(), distributed.get_world_size()
    # All ranks come once before one of them comes again.
    rendezvous, place = divmod(store.add(_ARRIVED, 1) - 1, ranks)
    complete, left = f"{_ARRIVED}/{rendezvous}", f"{_ARRIVED}/{rendezvous}/left"
    if place == ranks - 1:
        store.set(complete, "")
    _poll(lambda: store.check([complete]))
    store.add(left, 1)
    if distributed.get_rank() == 0:  # it may serve the store, and end after this
        _poll(lambda: store.add(left, 0) == ranks)


def _poll(is_done: Callable[[], bool]) -> None:
    pause = _LEAST_PAUSE_SECONDS
    while not is_done():
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE_SECONDS)
