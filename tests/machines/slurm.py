"""A cluster of Slurm's own programs: this machine, and the other node of a cable."""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.machines.nodes import OTHER, Cable
from tests.programs.processes import free_port, wait_for

HERE = "node-a"
"""Slurm's name of this machine."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={here}({cable.here})
SlurmUser=root
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/daemon-%n.pid
SlurmctldLogFile={folder}/controller.log
SlurmdLogFile={folder}/daemon-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
NodeName={name} NodeHostname={here} NodeAddr={cable.here} CPUs=2 State=UNKNOWN
NodeName={other} NodeHostname={other} NodeAddr={cable.there} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@contextmanager
def cluster(cable: Cable) -> Iterator[Path]:
    """Start the cluster, and return its configuration; skip the test where Slurm is not installed."""
    if missing := [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]:
        pytest.skip(f"no Slurm: {', '.join(missing)} are not installed (apt-get install slurmctld slurmd munge)")
    here = socket.gethostname().partition(".")[0]
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as stack:
        folder = Path(name)  # short: paths of sockets have at most 107 characters
        for each in ("munge", "state", f"spool-{HERE}", f"spool-{OTHER}"):
            (folder / each).mkdir(mode=0o755)
        folder.chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        configuration = folder / "slurm.conf"
        ports = {"controller": free_port(), "daemon": free_port()}
        configuration.write_text(
            CONFIGURATION.format(here=here, name=HERE, other=OTHER, cable=cable, folder=folder, **ports)
        )

        def start(*command: str) -> None:
            with (folder / "output.log").open("ab") as log:
                environment = {
                    **os.environ,
                    "SLURM_CONF": str(configuration),
                    "PATH": f"{os.environ['PATH']}:/usr/sbin",
                }
                process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)

        files = (f"--{each}={folder}/munge/{each.removesuffix('-file')}" for each in ("key-file", "socket", "pid-file"))
        start("munged", "--foreground", "--force", *files, f"--log-file={folder}/log", f"--seed-file={folder}/seed")
        wait_for((folder / "munge" / "socket").exists)
        start("slurmctld", "-D")
        start("slurmd", "-D", "-N", HERE)
        start(*cable.on_other(["slurmd", "-D", "-N", OTHER]))
        environment = {**os.environ, "SLURM_CONF": str(configuration)}

        def is_ready() -> bool:
            states = subprocess.check_output(("sinfo", "-hN", "-o", "%T"), env=environment, text=True)
            return states.split() == ["idle", "idle"]

        wait_for(is_ready)
        yield configuration
