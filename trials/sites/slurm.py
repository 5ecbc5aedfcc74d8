"""Nodes of an allocation of Slurm, on which torchrun runs, and submitted commands that wait for one.

torchrun is started by srun, one job step for each node.
"""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trials.errors import AutotuneError, SiteError
from trials.hardware_section import HardwareSection
from trials.launchers.command_starter import CommandStarter
from trials.launchers.network import address_of_agent
from trials.sites import Place, Shape, Site
from trials.sites.torchrun import Torchrun
from trials.whole_file import whole_file

_WARNING_SECONDS = 300
"""Before its time is over, a submitted job gets a SIGTERM, on which a training writes a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A job that waits for its nodes."""

    number: str
    script: Path
    output: Path
    """File with what the job prints."""


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
    settings = place.settings
    hosts = this_first(
        allocated(os.environ["SLURM_JOB_NODELIST"]), os.environ.get("SLURMD_NODENAME", os.uname().nodename)
    )
    address = address_of_agent(settings.address, hosts)
    starter = CommandStarter(
        Torchrun(settings.rendezvous),
        (1,) * place.hardware.nodes,
        address,
        place.folder,
        hosts=hosts,
        reach=OverSrun(),
        show=place.show,
    )
    with place.nodes(address, starter) as site:
        yield site


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


def submit(command: Sequence[str], nodes: int, folder: Path) -> Submitted:
    """Write a script for sbatch to `folder` that runs a command on the first of `nodes` whole nodes, and submit it.

    Slurm takes further options from variables such as SBATCH_PARTITION and SBATCH_TIMELIMIT. Raise AutotuneError when
    sbatch refuses the script.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = folder / f"autotune-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.sh"
    with whole_file(script, 0o700) as stream:
        stream.write(_script(command, nodes, folder).encode())
    try:
        answer = subprocess.run(("sbatch", "--parsable", str(script)), check=True, capture_output=True, text=True)
    except OSError as error:
        raise AutotuneError(f"sbatch cannot be run ({error.strerror}); submit on a machine with Slurm") from error
    except subprocess.CalledProcessError as error:
        raise AutotuneError(
            f"sbatch refuses {script}: {error.stderr.strip()}; correct it, or submit it yourself"
        ) from error
    number = answer.stdout.strip().partition(";")[0]
    return Submitted(number=number, script=script, output=folder / f"slurm-{number}.out")


def _script(command: Sequence[str], nodes: int, folder: Path) -> str:
    # sbatch reads its options as a shell would.
    output = shlex.quote(str(folder / "slurm-%j.out"))
    return "\n".join(
        (
            "#!/bin/sh",
            "#SBATCH --job-name=autotune",
            f"#SBATCH --nodes={nodes}",
            "#SBATCH --ntasks-per-node=1",
            "#SBATCH --exclusive",
            f"#SBATCH --signal=B:TERM@{_WARNING_SECONDS}",
            f"#SBATCH --output={output}",
            f"cd {shlex.quote(str(Path.cwd()))}",
            f"exec {shlex.join(command)}",
            "",
        )
    )
