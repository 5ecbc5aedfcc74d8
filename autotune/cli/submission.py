"""The option `--submit`: the same command as a job of Slurm."""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from autotune.cli.context import Options
from autotune.errors import JobError
from autotune.folders import work_folder
from trials.errors import AutotuneError
from trials.job import Job
from trials.whole_file import whole_file

_SUBMIT = "--submit"
_WARNING_SECONDS = 300
"""Before its time is over, the job gets a SIGTERM, on which a training writes a checkpoint."""


def submit(options: Options, job: Job) -> None:
    """Write a script for sbatch with this command on `hardware.nodes` nodes, and submit it.

    Slurm takes further options from variables such as SBATCH_PARTITION and SBATCH_TIMELIMIT. Raise JobError without
    the number of nodes, and AutotuneError when sbatch refuses the script.
    """
    if job.hardware.launcher != "slurm" or job.hardware.nodes is None:
        raise JobError(f"{_SUBMIT} needs hardware.launcher: slurm and hardware.nodes; add them")
    folder = work_folder(options.database_url(job.database)) / "submitted"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    script = folder / f"autotune-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.sh"
    arguments = [each for each in sys.argv[1:] if each != _SUBMIT]
    with whole_file(script, 0o700) as stream:
        stream.write(script_text(job.hardware.nodes, folder, arguments).encode())
    try:
        answer = subprocess.run(("sbatch", "--parsable", str(script)), check=True, capture_output=True, text=True)
    except OSError as error:
        raise AutotuneError(f"sbatch cannot be run ({error.strerror}); submit on a machine with Slurm") from error
    except subprocess.CalledProcessError as error:
        raise AutotuneError(
            f"sbatch refuses {script}: {error.stderr.strip()}; correct it, or submit it yourself"
        ) from error
    number = answer.stdout.strip().partition(";")[0]
    output = folder / f"slurm-{number}.out"
    document = {"job": number, "script": str(script), "output": str(output)}
    options.give(lambda: document, lambda: f"Submitted {script} as job {number}; its output will be in {output}")


def script_text(nodes: int, folder: Path, arguments: Sequence[str]) -> str:
    """Return a script that runs autotune with these arguments on the first of a number of whole nodes."""
    command = shlex.join((sys.executable, "-P", "-m", "autotune", *arguments))
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
            f"exec {command}",
            "",
        )
    )
