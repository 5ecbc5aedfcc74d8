"""The output folder of a training: which of its files the training owns, and the checkpoint from which it resumes.

A training marks its folder with a record. Only files that the same training wrote are ever removed or replaced.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from pydantic import Field

from trials import wire
from trials.errors import OutputTaken, WireError
from trials.plan import Plan
from trials.tasks.training.progress import PROGRESS_FILE, drop_steps_after, read_lines
from trials.tasks.training.settings import Settings, check_changes, check_fixed
from trials.units import number_of
from trials.whole_file import sync, whole_file

_log = logging.getLogger(__name__)

RECORD_FILE = "autotune.json"
STATE_FILE = "state.json"
MODEL_FOLDER = "model"
PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_MOST_BYTES = 1 << 20
"""Largest record or state; a larger file is something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The end of a plan's part in a training; another plan follows."""

    plan: Plan
    steps: int
    """Total optimizer steps of the training when the plan was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The mark of a training on its output folder."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Part of a glob pattern of names that are removed, so it holds no special character."""
    settings: Settings
    plan: Plan
    """The plan of `settings`."""
    changes: tuple[PlanChange, ...] = ()
    """The plans before it, oldest first, in ascending order of steps."""
    failed: tuple[str, ...] = ()
    """Ids of plans to which it was to change, and whose launches failed."""
    launch: str | None = None
    """Id of its last launch; None for none by an agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint or a model, with its size and checksum when it was written."""

    name: Annotated[str, Field(pattern=r"^[^/.][^/]*(/[^/.][^/]*)*$")]
    """Path in the folder of the checkpoint or the model."""
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The progress of a training when it wrote a checkpoint or a model."""

    steps: int
    """Total optimizer steps."""
    plan: str
    data: str
    training: str
    """Id of the training."""
    files: tuple[StoredFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedOutput:
    """An output folder that belongs to this training."""

    record: TrainingRecord
    steps: int
    """Steps of the newest intact checkpoint; 0 for a new training."""
    has_model: bool
    """Whether the model after these steps is there and intact."""


def open_output(folder: Path, settings: Settings, plan: Plan, *, instead_of: Plan | None = None) -> OpenedOutput:
    """Create `folder`, or resume the training in it: verify its newest checkpoint, and drop later progress.

    `plan` is the plan of `settings`. `instead_of` is the plan that the training in the folder has had until now, where
    `plan` is to continue it.

    Raise OutputTaken for a folder with results of something else, or of a training with other settings. A setting that
    may change, and a damaged checkpoint, are logged as warnings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_settings(folder, settings, instead_of=instead_of)
    new = TrainingRecord(id=uuid4().hex[:16], settings=settings, plan=plan)
    record = read_record(folder / RECORD_FILE) or new
    record = replace(record, settings=settings.evaluated_as(record.settings), plan=plan)
    steps, changes = _resumed_steps(folder, record), record.changes
    _set_later_aside(folder, record, steps)
    if instead_of:
        changes += (PlanChange(plan=instead_of, steps=steps),)
    record = replace(record, changes=_until(steps, changes, plan))
    _write_record(folder, record)
    for left in folder.glob(f".*.{record.id}{PARTIAL}"):  # by a process of this training that died while it wrote
        if not left.is_symlink():
            shutil.rmtree(left)
    drop_steps_after(folder / PROGRESS_FILE, steps)
    model = _own_model(folder, record)
    has_model = model is not None and model.steps == steps and not _fault(folder / MODEL_FOLDER, model)
    return OpenedOutput(record=record, steps=steps, has_model=has_model)


def check_settings(folder: Path, settings: Settings, *, instead_of: Plan | None = None) -> None:
    """Check that a training with these settings may begin or resume in `folder`, as `open_output`; change nothing.

    Raise OutputTaken, and warn of settings that may change.
    """
    record = read_record(folder / RECORD_FILE)
    if record is None:
        check_unclaimed(folder)
        return
    _check_rows(folder, record, settings)
    check_changes(folder, replace(record.settings, plan=settings.plan) if instead_of else record.settings, settings)


def check_fixed_settings(folder: Path, settings: Settings) -> None:
    """Raise OutputTaken where the training in `folder` has other settings that may not change, under any plan."""
    record = read_record(folder / RECORD_FILE)
    if record is not None:
        then = replace(record.settings, plan=settings.plan, arrangement_version=settings.arrangement_version)
        check_fixed(folder, then, settings)


def _resumed_steps(folder: Path, record: TrainingRecord) -> int:
    """Return the steps of the newest intact checkpoint, 0 without any.

    Raise OutputTaken when all are broken, or gone although the training has ended.
    """
    if steps := next(_whole_checkpoints(folder, record), 0):
        return steps
    if broken := _checkpoints(folder):
        raise OutputTaken(
            f"no checkpoint in training.output {folder} can be used, {broken[0].name} included; restore one, or name "
            "another folder to start from the first step"
        )
    if (model := _own_model(folder, record)) is not None:
        raise OutputTaken(
            f"training.output {folder} holds the model of step {model.steps}, but no checkpoint; restore "
            "one, or name another folder to start from the first step"
        )
    if done := max((line.step for line in read_lines(folder / PROGRESS_FILE)), default=0):
        _log.warning("%s holds no checkpoint, so its %s are trained again", folder, number_of(done, "step"))
    return 0


def _set_later_aside(folder: Path, record: TrainingRecord, steps: int) -> None:
    """Rename the training's checkpoints after the one of `steps`, so that none of them ever counts as its newest."""
    for later in takewhile(lambda each: each != checkpoint_folder(folder, steps), _checkpoints(folder)):
        state = _read(TrainingState, later / STATE_FILE)
        if state is None or state.training == record.id:
            _log.warning("%s is of a step that is trained again; it was renamed to %s", later, _set_aside(later))


def note_failed_plan(folder: Path, plan_id: str) -> None:
    """Note in the training's record that the launch of a plan, to which it was to change, failed."""
    record = read_record(folder / RECORD_FILE)
    if record is not None and plan_id not in record.failed:
        _write_record(folder, replace(record, failed=(*record.failed, plan_id)))


def note_launch(folder: Path, launch_id: str) -> None:
    """Note in the training's record which launch has the folder now."""
    record = read_record(folder / RECORD_FILE)
    if record is not None:
        _write_record(folder, replace(record, launch=launch_id))


def _write_record(folder: Path, record: TrainingRecord) -> None:
    with whole_file(folder / RECORD_FILE) as stream:
        stream.write(wire.encode(record).encode())


def last_checkpoint(folder: Path) -> int:
    """Return the step of the last checkpoint that the training in the folder has written; 0 without one."""
    record = read_record(folder / RECORD_FILE)
    states = (_read(TrainingState, each / STATE_FILE) for each in _checkpoints(folder))
    return max((state.steps for state in states if state and record and state.training == record.id), default=0)


def written_model(folder: Path) -> int | None:
    """Return the step of the model that the training in the folder has written; None without one."""
    record = read_record(folder / RECORD_FILE)
    model = None if record is None else _own_model(folder, record)
    return None if model is None else model.steps


def _own_model(folder: Path, record: TrainingRecord) -> TrainingState | None:
    model = _read(TrainingState, folder / MODEL_FOLDER / RECORD_FILE)
    return model if model is not None and model.training == record.id else None


def has_checkpoint_after(folder: Path, steps: int) -> bool:
    """Return whether the training in the folder has written a checkpoint of a later step."""
    return last_checkpoint(folder) > steps


def _until(steps: int, changes: Sequence[PlanChange], plan: Plan) -> tuple[PlanChange, ...]:
    """Return the changes in a training that continues with `plan` after `steps`.

    An older checkpoint may put that before some. A change back to the plan before, without a step in between, is none.
    """
    kept: list[PlanChange] = []
    for change in changes:
        end = min(change.steps, steps)
        if end > (kept[-1].steps if kept else 0):
            kept.append(replace(change, steps=end))
    if kept and kept[-1].plan == plan and kept[-1].steps == steps:
        kept.pop()
    return tuple(kept)


def check_unclaimed(folder: Path) -> None:
    """Raise OutputTaken when a folder without a record holds a file that a training would write."""
    if not folder.is_dir() or read_record(folder / RECORD_FILE):
        return
    names = (RECORD_FILE, MODEL_FOLDER, PROGRESS_FILE, *(each.name for each in _checkpoints(folder)))
    if taken := [name for name in names if os.path.lexists(folder / name)]:
        raise OutputTaken(
            f"training.output {folder} holds {taken[0]}, which no training of this version of autotune wrote; "
            "name an empty or a new folder"
        )


def _check_rows(folder: Path, record: TrainingRecord, now: Settings) -> None:
    """Raise OutputTaken where the plans of the training had other rows in the version of autotune that began it."""
    if record.settings.arrangement_version != now.arrangement_version:
        raise OutputTaken(
            f"training.output {folder} belongs to a training that another version of autotune began, which puts other "
            "samples into its steps; continue it with that version, or name another folder"
        )


def _read(kind: type[wire.T], path: Path) -> wire.T | None:
    """Return the value in a regular file, or None where there is none that can be decoded."""
    try:
        # Opening a pipe would block, and a large file is none of this program.
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return wire.decode(kind, path.read_bytes())
    except (OSError, WireError):
        return None


def read_record(path: Path) -> TrainingRecord | None:
    """Return the record at `path`; None where there is none that can be decoded."""
    return _read(TrainingRecord, path)


def checkpoint_folder(output: Path, steps: int) -> Path:
    return output / f"checkpoint-{steps}"


def _checkpoints(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint, also links to folders, that of the most steps first."""
    numbers = {int(match[1]): each for each in folder.iterdir() if (match := _CHECKPOINT.fullmatch(each.name))}
    return [numbers[steps] for steps in sorted(numbers, reverse=True)]


def _whole_checkpoints(folder: Path, record: TrainingRecord) -> Iterator[int]:
    """Yield the steps of the training's intact checkpoints, most first; log the checkpoints that cannot be used."""
    for each in _checkpoints(folder):
        state = _read(TrainingState, each / STATE_FILE)
        if state is None:
            _log.warning("%s cannot be read, so %s is not used", each / STATE_FILE, each.name)
        elif state.training != record.id or each != checkpoint_folder(folder, state.steps):
            _log.warning("%s belongs to another training or step, so it is not used", each)
        elif fault := _fault(each, state):
            _log.warning("%s, so %s is not used", fault, each.name)
        else:
            yield state.steps


def _fault(folder: Path, state: TrainingState) -> str | None:
    """Describe the first file that is not as it was written; None when all are."""
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
        faults = pool.map(lambda file: _file_fault(folder, file), state.files)
        return next((fault for fault in faults if fault), None)


def _file_fault(folder: Path, then: StoredFile) -> str | None:
    path = folder / then.name
    try:
        now = describe_file(folder, then.name)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if now.size != then.size:
        return f"{path} has {now.size} bytes instead of {then.size}"
    return None if now.sha256 == then.sha256 else f"{path} has changed since it was written: its checksum differs"


def describe_file(folder: Path, name: str) -> StoredFile:
    path = folder / name
    with path.open("rb") as file:
        return StoredFile(name=name, size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest())


def partial_folder(final: Path, record: TrainingRecord) -> Path:
    """Return the folder in which `final` is written until it is complete; the id in its name shows its owner."""
    return final.with_name(f".{final.name}.{record.id}{PARTIAL}")


def publish(partial: Path, final: Path, state_file: str, state: TrainingState) -> None:
    """Write the state into a folder and rename it to `final`.

    What is there is renamed first. A model that the same training wrote after fewer steps is removed then.
    """
    with whole_file(partial / state_file) as stream:
        stream.write(wire.encode(state).encode())
    aside = _set_aside(final) if os.path.lexists(final) else None  # also a symbolic link that leads nowhere
    # A rename is atomic: a process that dies leaves the whole folder or none under this name.
    partial.replace(final)
    # The rename itself survives a power cut once the parent folder is on the disk.
    sync(final.parent)
    if aside is None:
        return
    before = None if aside.is_symlink() else _read(TrainingState, aside / state_file)
    if before is not None and before.training == state.training and before.steps < state.steps:
        _remove_own(aside, before, state_file)
    if os.path.lexists(aside):
        _log.warning("%s was in the place of a file of this training; it was renamed to %s", final, aside)


def _set_aside(path: Path) -> Path:
    """Rename what is there to the first name NAME.old-1, NAME.old-2, ... that is free, and return that."""
    names = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
    aside = next(name for name in names if not os.path.lexists(name))
    return path.rename(aside)


def remove_old_checkpoints(output: Path, record: TrainingRecord, steps: int, keep: int) -> None:
    """Remove the training's checkpoints before the last `keep` up to `steps`: only the files that their states list."""
    states = ((each, _read(TrainingState, each / STATE_FILE)) for each in _checkpoints(output) if not each.is_symlink())
    own = [(each, state) for each, state in states if state and state.training == record.id and state.steps <= steps]
    for old, state in own[keep:]:
        _remove_own(old, state, STATE_FILE)


def _remove_own(folder: Path, state: TrainingState, state_file: str) -> None:
    """Remove the files of a checkpoint or model, and its folders unless they hold files of another program."""
    names = (*(file.name for file in state.files), state_file)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    # The deepest first.
    for each in sorted({parent for name in names for parent in (folder / name).parents}, reverse=True):
        if each.is_relative_to(folder):
            with suppress(OSError):
                each.rmdir()
