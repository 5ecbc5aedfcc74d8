"""Problems that earlier work left in the database, in its spool and in its work folder."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from autotune.machine.agent import has_died, living, place, silent_minutes
from autotune.machine.device_problems import Finding
from autotune.search.study_settings import MODEL
from storage.spool import Spool
from storage.store import Store

_MUCH_BYTES = 1 << 30
"""Size of the work folder from which it is worth a look."""


def database_findings(store: Store, folder: Path) -> Iterator[Finding]:
    """Yield agents, trials and trainings that ended without saying so. `folder` is that of the spool."""
    agents = store.agents()
    for agent in agents.values():
        if has_died(agent):
            yield Finding(
                what=f"{place(agent)} died without ending its work", remedy="nothing to do: the next search replaces it"
            )
        elif silent_minutes(agent):
            yield Finding(
                what=f"{place(agent)}: this host cannot check whether it still runs",
                remedy="check on that host; if it has ended, `autotune tune JOB` or `launch` with its job replaces it",
            )
    waiting = {path.stem for path in Spool(folder).pending()} if folder.exists() else set()
    for trial in store.running_trials():
        if trial.id in waiting:
            continue
        owner = agents.get(trial.agent_id or "")
        # One that ended by itself was interrupted: its study can be continued at any time.
        if has_died(owner) if owner else trial.agent_id is None:
            study = store.study(trial.study_id)
            model = study.settings.get(MODEL)
            of_model = "" if model is None else f" with model.path {model}"
            yield Finding(
                what=f"trial {trial.number} of {study.name}, begun {trial.started:%Y-%m-%d %H:%M} UTC, has no "
                "result, and its process is gone",
                remedy=f"nothing to do: the next `autotune tune JOB` gives it up, and with its job{of_model} continues",
            )
    for launch in store.running_launches():
        if living(launch, agents) is None:
            yield Finding(
                what=f"the training with plan {launch.plan_id}, begun {launch.started:%Y-%m-%d %H:%M} UTC, has no "
                "recorded end, and its process is gone",
                remedy="the command that began it (`autotune launch JOB` with its `--set` options, thus with its "
                "training.output) continues from its last checkpoint",
            )


def spool_findings(folder: Path) -> Iterator[Finding]:
    """Yield results that are not in the database: those that wait, are refused or are cut off."""
    if not folder.exists():
        return
    if waiting := len(Spool(folder).pending()):
        yield Finding(
            what=f"results in {folder} that are not in the database yet: {waiting}",
            remedy="nothing to do: the next search or training stores them",
        )
    if aside := len(list(folder.glob("*.bad"))):
        yield Finding(
            what=f"results in {folder} that the database refused: {aside}",
            remedy="inspect the *.bad files, then delete them",
        )
    if left := len(list(folder.glob(".*.partial"))):
        yield Finding(
            what=f"results in {folder} that were cut off by a kill or a full disk: {left}",
            remedy="delete the .*.partial files",
        )


def folder_findings(folder: Path) -> Iterator[Finding]:
    """Yield a work folder that takes much of the disk."""
    # No command removes them: others on the same database read them, and so do those that a dry run has printed.
    if (size := _size(folder)) > _MUCH_BYTES:
        yield Finding(
            what=f"indexes of data and files of ranks in {folder}: {size / 2**30:.1f} GiB",
            remedy="while no command of autotune runs, delete all but `spool` and `certificates` there; indexes are "
            "made again, and logs of ranks are lost",
        )


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a process has removed it
            size += path.lstat().st_size
    return size
