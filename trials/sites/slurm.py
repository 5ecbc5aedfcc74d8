"""Nodes of an allocation of Slurm, on which torchrun runs. It is started by srun, one job step for each node."""

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from trials.errors import SiteError
from trials.hardware_section import HardwareSection
from trials.launchers.command_starter import CommandStarter
from trials.launchers.network import address_of_agent
from trials.launchers.node_ranks import NodeSite
from trials.launchers.nodes import Nodes
from trials.sites import Place, Shape, Site
from trials.sites.torchrun import Torchrun


def shape(settings: HardwareSection, environment: Mapping[str, str]) -> Shape:
    if settings.hosts is not None or settings.hostfile is not None:
        raise SiteError(
            "hardware.launcher: slurm takes the nodes of the allocation; remove hardware.hosts and hostfile"
        )
    nodes = environment.get("SLURM_JOB_NUM_NODES", "")
    if not nodes.isdigit():
        raise SiteError(
            "hardware.launcher: slurm works inside an allocation, and there is none; start the command in a script for "
            "sbatch with --nodes and --ntasks-per-node=1"
        )
    if settings.nodes not in (None, int(nodes)):
        raise SiteError(f"hardware.nodes: {settings.nodes}, but the allocation has {nodes} nodes; remove the key")
    return Shape(nodes=int(nodes))


@contextmanager
def open_site(place: Place) -> Iterator[Site]:
    settings, hardware = place.settings, place.hardware
    hosts = this_first(
        allocated(os.environ["SLURM_JOB_NODELIST"]), os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    )
    address = address_of_agent(settings.address, hosts)
    starter = CommandStarter(
        Torchrun(settings.rendezvous),
        (1,) * hardware.nodes,
        address,
        place.folder,
        hosts=hosts,
        reach=OverSrun(),
        show=place.show,
    )
    patience = settings.start_timeout
    with Nodes(hardware.nodes, hardware.of_node, address, place.facts(), starter, patience_seconds=patience) as nodes:
        yield NodeSite(nodes, hardware.accelerator)


def allocated(nodelist: str) -> tuple[str, ...]:
    """Return the nodes of a list in Slurm's notation, such as `node[1-3]`. Raise SiteError where Slurm cannot say."""
    try:
        text = subprocess.check_output(("scontrol", "show", "hostnames", nodelist), text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SiteError(f"the nodes {nodelist} of the allocation cannot be listed: {error}; check Slurm") from error
    return tuple(text.split())


def this_first(hosts: Sequence[str], here: str) -> tuple[str, ...]:
    """Return the hosts with this one in front. Raise SiteError where it is none of them."""
    if here not in hosts:
        raise SiteError(
            f"this machine, {here}, is not in the allocation of {', '.join(hosts)}; start the command on one of these, "
            "as sbatch does"
        )
    return (here, *(host for host in hosts if host != here))


class OverSrun:
    """A job step of its own, which shares all that the job has on the node."""

    passes_environment = True

    def command(self, host: str, command: Sequence[str]) -> tuple[str, ...]:
        step = ("--nodes=1", "--ntasks=1", f"--nodelist={host}", "--overlap", "--cpu-bind=none", "--export=ALL")
        return ("srun", *step, *command)
