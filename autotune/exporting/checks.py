"""Checks of an export before any work is done, and before torch is imported."""

import difflib
from pathlib import Path

from autotune.errors import ExportError
from autotune.exporting.trainers import EXPORTS
from autotune.search.space.abilities import Target
from trials import plugins
from trials.job import Job


def check_wanted(trainer: str, folder: Path) -> None:
    """Raise ExportError for an unknown trainer, with the known ones, and for a folder that `check_folder` refuses."""
    check_trainer("--to", trainer)
    check_folder(folder)


def check_trainer(option: str, trainer: str) -> None:
    """Raise ExportError for an unknown trainer, with the nearest name and the known ones."""
    known = plugins.names(EXPORTS)
    if trainer in known:
        return
    meant = difflib.get_close_matches(trainer, known, n=1)
    raise ExportError(
        f"{option} {trainer}: {f'did you mean {meant[0]}? ' if meant else ''}plans are exported to {', '.join(known)}; "
        "for another trainer, `autotune pack JOB --out FILE` writes the packs alone"
    )


def target_of(trainer: str, job: Job, family: str) -> Target:
    """Return a known trainer with its limits.

    Raise ExportError where it cannot train models of this `model_type` as the job says.
    """
    exporter = plugins.load(EXPORTS, trainer)
    exporter.check(job, family)
    return Target(name=trainer, title=exporter.TITLE, abilities=exporter.abilities(job))


def check_folder(folder: Path) -> None:
    """Raise ExportError for a folder that exists, or whose parent is none."""
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"{folder} exists and is not overwritten; name another folder with --out")
    if not folder.absolute().parent.is_dir():
        raise ExportError(f"{folder.absolute().parent} is no folder; make it, or name another place with --out")
