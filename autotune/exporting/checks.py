"""Checks of an export before any work is done, and before torch is imported."""

from pathlib import Path

from autotune.errors import ExportError
from autotune.exporting.trainers import EXPORTS
from trials import plugins


def check_wanted(trainer: str, folder: Path) -> None:
    """Raise ExportError for an unknown trainer, with the known ones, and for a folder that `check_folder` refuses."""
    if trainer not in plugins.names(EXPORTS):
        raise ExportError(
            f"--to {trainer}: plans are exported to {', '.join(plugins.names(EXPORTS))}; for another trainer, "
            "`autotune pack JOB --out FILE` writes the packs alone"
        )
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raise ExportError for a folder that exists, or whose parent is none."""
    if folder.exists() or folder.is_symlink():
        raise ExportError(f"{folder} exists and is not overwritten; name another folder with --out")
    if not folder.absolute().parent.is_dir():
        raise ExportError(f"{folder.absolute().parent} is no folder; make it, or name another place with --out")
