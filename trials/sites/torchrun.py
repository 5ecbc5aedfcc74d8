"""Nodes on which torchrun runs: started over ssh where the job names its hosts, else by the user, command by command.

torchrun starts one process on each node, `autotune node`, which forks the ranks and renews them after a failure. A new
torchrun for each of them would import torch again.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trials.errors import SiteError
from trials.hardware_section import HardwareSection
from trials.launchers.command_starter import CommandStarter, OverSsh, Spot
from trials.launchers.network import address_of_agent, check_first
from trials.sites import Place, Shape, Site


def shape(settings: HardwareSection, _: Mapping[str, str]) -> Shape:
    if settings.hostfile is not None:
        raise SiteError("hardware.hostfile is for the launcher deepspeed; name hardware.hosts, or that launcher")
    if settings.hosts is None and settings.nodes is None:
        raise SiteError("hardware.launcher: torchrun needs hardware.nodes or hardware.hosts; add one of them")
    return Shape(nodes=len(settings.hosts) if settings.hosts else settings.nodes or 1)


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    settings = place.settings
    address = address_of_agent(settings.address, settings.hosts)
    if settings.hosts:
        check_first(settings.hosts, "hardware.hosts")
    starter = CommandStarter(
        Torchrun(settings.rendezvous),
        (1,) * place.hardware.nodes,
        address,
        place.folder,
        hosts=settings.hosts,
        reach=OverSsh(),
        show=place.show,
    )
    with place.nodes(address, starter) as site:
        yield site


@dataclass(frozen=True, slots=True)
class Torchrun:
    """torchrun, whose agents meet as `rendezvous` says."""

    rendezvous: Literal["static", "c10d"]

    @property
    def uses_store(self) -> bool:
        return self.rendezvous == "c10d"

    def command(self, spot: Spot, program: Sequence[str], *, is_module: bool) -> tuple[str, ...]:
        meet: Mapping[str, tuple[str, ...]] = {
            "static": (f"--node-rank={spot.node}",),
            "c10d": (
                *("--rdzv-id=autotune", f"--rdzv-conf=is_host={int(spot.node == 0 and not spot.is_served)}"),
                # Without an address, ranks look for rank 0 by its machine's name, which other nodes may not resolve.
                *((f"--local-addr={spot.address}",) if spot.address else ()),
            ),
        }
        return (
            str(Path(sys.executable).with_name("torchrun")),
            f"--nnodes={len(spot.ranks)}",
            f"--nproc-per-node={spot.ranks[spot.node]}",
            # Both are named: torchrun takes others from variables such as PET_RDZV_ENDPOINT.
            f"--rdzv-backend={self.rendezvous}",
            f"--rdzv-endpoint={spot.rendezvous}",
            *meet[self.rendezvous],
            "-m" if is_module else "--no-python",
            *program,
        )
