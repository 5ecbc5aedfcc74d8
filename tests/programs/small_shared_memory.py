"""Data workers on a machine whose /dev/shm is small."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.programs.processes import WAIT_SECONDS
from tests.values.training import PACKED, prepared_of
from trials.data.loader import micro_batches
from trials.errors import SharedMemoryFull
from trials.model.families import internvl

ROOT = Path(__file__).parents[2]
PLACE, FILES = "/dev/shm", "/mnt"


def loaded(example: Path, folder: Path, *cases: tuple[str, int]) -> list[str]:
    """Return what a rank says when it loads an epoch of the example, for each (size of /dev/shm, data workers).

    It is mounted in a namespace of its own, which needs the rights of root there; raise PermissionError without.
    """
    shutil.copytree(example, folder / "example")  # without links to where the files were
    # Files of tests may be there as well.
    inner = f'mount --rbind {PLACE} {FILES} && exec "$@"'
    command = ["unshare", "--map-root-user", "--user", "--mount", "sh", "-c", inner, "sh"]
    there = str(folder).replace(PLACE, FILES)
    program = [sys.executable, "-P", "-m", "tests.programs.small_shared_memory", there, json.dumps(cases)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": there}
    done = subprocess.run(
        [*command, *program], capture_output=True, text=True, env=environment, check=False, timeout=WAIT_SECONDS
    )
    if "Operation not permitted" in done.stderr:
        raise PermissionError(done.stderr)
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


def _load(folder: Path, cases: list[tuple[str, int]]) -> list[str]:
    example = folder / "example"
    prepared, encoder = prepared_of(example, folder), internvl.encoder(str(example / "model"))
    epoch, found = prepared.epoch(PACKED, 1), []
    for size, workers in cases:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", PLACE], check=True)
        batches = micro_batches(
            prepared.index, epoch, range(epoch.steps), 0, encoder, pixels=True, workers=workers, on_error="fail"
        )
        try:
            found.append(f"{len(list(batches))} packs")
        except SharedMemoryFull as error:
            found.append(str(error))
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_load(Path(sys.argv[1]), json.loads(sys.argv[2]))))
