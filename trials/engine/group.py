"""Joins and leaves the group of ranks. A process may join again, with other ranks and another plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

import deepspeed.ops
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import FileStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

_FILE_SCHEME = "quoted-file"
"""torch's own `file://` takes a path as it is, and ends it at a `#` or `?`."""


def file_meeting(path: Path) -> str:
    """The `init_method` of ranks that meet in a file, whatever its name holds."""
    return f"{_FILE_SCHEME}://{quote(str(path.absolute()))}"


def _meet(url: str, **_: object) -> Iterator[tuple[Store, int, int]]:
    parts = urlsplit(url)
    (rank,), (world_size,) = (parse_qs(parts.query)[key] for key in ("rank", "world_size"))
    yield FileStore(unquote(parts.path), int(world_size)), int(rank), int(world_size)


register_rendezvous_handler(_FILE_SCHEME, _meet)


@contextmanager
def process_group(rank: int, local_rank: int, world_size: int, meeting: str) -> Iterator[torch.device]:
    """The ranks of one trial or training, and this rank's device. Everything is released at the end.

    `meeting` is where the ranks find each other, as torch.distributed's `init_method`: `env://`, or a `file_meeting`.
    """
    _skip_compiled_communication()
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
        comm.comm.cdb = None


def _skip_compiled_communication() -> None:
    """On a CPU DeepSpeed compiles a shared-memory operation at start-up, for a minute; gloo does without it."""
    compatible = getattr(deepspeed.ops, "__compatible_ops__", None)
    if isinstance(compatible, dict):
        compatible["deepspeed_shm_comm"] = False
