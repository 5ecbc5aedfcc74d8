"""The process group of the ranks. A process may leave it and join another, with other ranks and another plan."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from urllib.parse import parse_qs, unquote, urlsplit

import deepspeed.ops
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import register_rendezvous_handler

from trials.channels.folder import FILE_SCHEME
from trials.channels.store import STORE_SCHEME, connect

_LOOPBACK_SCHEME = "loopback"
"""torch's own `env://` listens on every interface, whatever the address of the master."""


def env_meeting() -> str:
    """Return the `init_method` for MASTER_ADDR and MASTER_PORT; for a loopback address one that listens there alone."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":  # torchrun listens itself
        return "env://"
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    found = [each[4][0] for each in socket.getaddrinfo(address, int(port), type=socket.SOCK_STREAM)]
    alone = all(ipaddress.ip_address(each).is_loopback for each in found)
    return f"{_LOOPBACK_SCHEME}://{found[0]}/{port}" if alone else "env://"


def _meet_in_file(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    path, rank, world_size = _parts(url)
    yield FileStore(unquote(path), world_size), rank, world_size


def _meet_on_loopback(url: str, timeout: timedelta, **_: object) -> Iterator[tuple[Store, int, int]]:
    path, rank, world_size = _parts(url)
    address, port = path.rsplit("/", 1)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, int(port)), family=family).detach() if rank == 0 else None
    store = TCPStore(address, int(port), world_size, rank == 0, timeout, master_listen_fd=listener)
    yield store, rank, world_size


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

register_rendezvous_handler(FILE_SCHEME, _meet_in_file)
register_rendezvous_handler(STORE_SCHEME, _meet_in_store)
register_rendezvous_handler(_LOOPBACK_SCHEME, _meet_on_loopback)


@contextmanager
def process_group(rank: int, local_rank: int, world_size: int, meeting: str) -> Iterator[torch.device]:
    """Join the process group of one trial or training, and yield this rank's device. Leave the group at the end.

    `meeting` is an `init_method` of torch.distributed, from `env_meeting` or a channel.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cuda":
        torch.cuda.set_device(local_rank)
    comm.init_distributed(
        auto_mpi_discovery=False, verbose=False, init_method=meeting, rank=rank, world_size=world_size
    )
    try:
        yield torch.device(accelerator.device_name(local_rank))
    finally:
        comm.destroy_process_group()
        # DeepSpeed does not drop its reference to the destroyed group itself.
        comm.comm.cdb = None
