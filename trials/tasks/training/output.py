"""The output folder of a training: which of its files the training owns, and the checkpoint from which it goes on.

A training marks its folder with a record. Only files that the record's training wrote are ever removed or replaced.
"""

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import count
from pathlib import Path
from typing import Annotated
from uuid import uuid4

from pydantic import Field

from trials import wire
from trials.errors import OutputTaken, WireError
from trials.tasks.training.progress import PROGRESS_FILE, drop_steps_after
from trials.tasks.training.settings import MAY_CHANGE, Settings
from trials.whole_file import sync, whole_file

_log = logging.getLogger(__name__)

RECORD_FILE = "autotune.json"
STATE_FILE = "state.json"
MODEL_FOLDER = "model"
PARTIAL = ".partial"
_CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]{0,17})")
_MOST_BYTES = 1 << 20
"""Of a record or a state; a larger file is something else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecord:
    """The mark of a training on its output folder."""

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """Part of a pattern of names that are removed, so it holds no character with a meaning there."""
    settings: Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint or a model, as it was when it was written."""

    name: Annotated[str, Field(pattern=r"^[\w-]+(\.[\w-]+)*$")]
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a training stood when it wrote a checkpoint or a model."""

    steps: int
    """Optimizer steps done in all."""
    plan: str
    data: str
    training: str | None = None
    """Id of the training; None in a checkpoint of version 0.1.0, which had neither ids nor checksums."""
    files: tuple[StoredFile, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedOutput:
    """An output folder that belongs to this training."""

    record: TrainingRecord
    steps: int
    """Of the newest whole checkpoint; 0 where the training starts."""
    has_model: bool
    """Whether the model after these steps is there and whole."""


def open_output(folder: Path, settings: Settings) -> OpenedOutput:
    """Make `folder`, or resume the training in it: verify its newest checkpoint, and drop what came after that.

    Raises OutputTaken for a folder with results of something else, or of a training with other settings. What the
    training may change, and a checkpoint that is damaged, is logged as a warning.
    """
    folder.mkdir(parents=True, exist_ok=True)
    record = read_record(folder / RECORD_FILE)
    if record is None:
        check_unclaimed(folder, settings)
    else:
        _check_settings(folder, record.settings, settings)
    record = TrainingRecord(id=record.id if record else uuid4().hex[:16], settings=settings)
    write_record(folder / RECORD_FILE, record)
    for left in folder.glob(f".*.{record.id}{PARTIAL}"):  # by a process that died while it wrote
        if not left.is_symlink():
            shutil.rmtree(left)
    steps = next(_whole_checkpoints(folder, record), 0)
    if not steps and (broken := _checkpoints(folder)):
        raise OutputTaken(
            f"no checkpoint in training.output {folder} can be used, {broken[0].name} included; restore one, or name "
            "another folder to start from the first step"
        )
    drop_steps_after(folder / PROGRESS_FILE, steps)
    return OpenedOutput(record=record, steps=steps, has_model=_has_model(folder / MODEL_FOLDER, record, steps))


def reopen_output(folder: Path, steps: int, *, has_model: bool) -> OpenedOutput:
    """The same for another rank, which is given what the first one found."""
    record = read_record(folder / RECORD_FILE)
    if record is None:
        raise OutputTaken(f"{folder / RECORD_FILE} is gone; all ranks need access to the same folder")
    return OpenedOutput(record=record, steps=steps, has_model=has_model)


def check_unclaimed(folder: Path, settings: Settings | None = None) -> None:
    """Raise OutputTaken when a folder without a record holds a file that a training would write.

    Checkpoints of version 0.1.0, which left no record, are accepted: with `settings` those of the same plan and data.
    """
    if not folder.is_dir() or read_record(folder / RECORD_FILE):
        return
    states = (_read(TrainingState, each / STATE_FILE) for each in _checkpoints(folder))
    old = next((state for state in states if state and state.training is None), None)
    if old is None:
        names = (RECORD_FILE, MODEL_FOLDER, PROGRESS_FILE, *(each.name for each in _checkpoints(folder)))
        if taken := [name for name in names if os.path.lexists(folder / name)]:
            raise OutputTaken(
                f"training.output {folder} holds {taken[0]}, which no training of autotune wrote; "
                "name an empty or a new folder"
            )
    elif settings and (old.plan, old.data) != (settings.plan, settings.data):
        raise OutputTaken(
            f"training.output {folder} holds checkpoint-{old.steps} of plan {old.plan} and data {old.data}, not of "
            f"plan {settings.plan} and data {settings.data}; name another folder, or train that plan"
        )


def _check_settings(folder: Path, then: Settings, now: Settings) -> None:
    changed = {
        field.name: (getattr(then, field.name), getattr(now, field.name))
        for field in fields(Settings)
        if getattr(then, field.name) != getattr(now, field.name)
    }
    fixed = [f"{name} {old}, not {new}" for name, (old, new) in changed.items() if name not in MAY_CHANGE]
    if fixed:
        raise OutputTaken(
            f"training.output {folder} belongs to a training with {'; '.join(fixed)}; "
            "name another folder, or go back to those settings"
        )
    for name, (old, new) in changed.items():
        _log.warning("%s: the training goes on with %s %s; it was %s before", folder, name, new, old)


def _read(kind: type[wire.T], path: Path) -> wire.T | None:
    """The value in a regular file, or None where there is none that can be decoded."""
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return wire.decode(kind, path.read_bytes())
    except (OSError, WireError):
        return None


def write_record(path: Path, record: TrainingRecord) -> None:
    with whole_file(path) as stream:
        stream.write(wire.encode(record).encode())


def read_record(path: Path) -> TrainingRecord | None:
    """The record at `path`; None where there is none that can be decoded."""
    return _read(TrainingRecord, path)


def checkpoint_folder(output: Path, steps: int) -> Path:
    return output / f"checkpoint-{steps}"


def _checkpoints(folder: Path) -> list[Path]:
    """Folders that are named like checkpoints, the one with the most steps first."""
    numbers = {
        int(match[1]): each
        for each in folder.iterdir()
        if (match := _CHECKPOINT.fullmatch(each.name)) and not each.is_symlink()
    }
    return [numbers[steps] for steps in sorted(numbers, reverse=True)]


def _whole_checkpoints(folder: Path, record: TrainingRecord) -> Iterator[int]:
    """Steps of the training's checkpoints whose files are intact, most first; others are logged."""
    for each in _checkpoints(folder):
        state = _read(TrainingState, each / STATE_FILE)
        if state is None:
            _log.warning("%s cannot be read, so %s is not used", each / STATE_FILE, each.name)
        elif state.training not in (record.id, None) or each != checkpoint_folder(folder, state.steps):
            _log.warning("%s is of another training or step, so it is not used", each)
        elif fault := _fault(each, state):
            _log.warning("%s, so %s is not used", fault, each.name)
        else:
            if state.training is None:
                _log.warning("%s is of version 0.1.0, without checksums: it is used unchecked", each)
            yield state.steps


def _has_model(folder: Path, record: TrainingRecord, steps: int) -> bool:
    state = _read(TrainingState, folder / RECORD_FILE)
    return state is not None and (state.training, state.steps) == (record.id, steps) and not _fault(folder, state)


def _fault(folder: Path, state: TrainingState) -> str | None:
    """The first file that is not as it was written, and why."""
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        faults = pool.map(lambda file: _file_fault(folder / file.name, file), state.files)
        return next((fault for fault in faults if fault), None)


def _file_fault(path: Path, then: StoredFile) -> str | None:
    try:
        now = describe_file(path)
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if now.size != then.size:
        return f"{path} has {now.size} bytes instead of {then.size}"
    return None if now.sha256 == then.sha256 else f"{path} has changed since it was written: its checksum differs"


def describe_file(path: Path) -> StoredFile:
    with path.open("rb") as file:
        return StoredFile(
            name=path.name, size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def partial_folder(final: Path, record: TrainingRecord) -> Path:
    """Where `final` is written until it is whole. The id in its name says whose it is, should the process die."""
    return final.with_name(f".{final.name}.{record.id}{PARTIAL}")


def publish(partial: Path, final: Path, state_file: str, state: TrainingState) -> None:
    """Complete a folder with its state, and give it its name; what stood there gets another one."""
    with whole_file(partial / state_file) as stream:
        stream.write(wire.encode(state).encode())
    _set_aside(final)
    partial.replace(final)
    sync(final.parent)


def remove_old_checkpoints(output: Path, record: TrainingRecord) -> None:
    """Remove the training's own checkpoints but the last two: the files that each lists, and nothing else in it."""
    states = ((each, _read(TrainingState, each / STATE_FILE)) for each in _checkpoints(output))
    own = [(each, state) for each, state in states if state and state.training == record.id]
    for old, state in own[2:]:
        for name in (*(file.name for file in state.files), STATE_FILE):
            (old / name).unlink(missing_ok=True)
        with suppress(OSError):  # it holds files of somebody else
            old.rmdir()


def _set_aside(path: Path) -> None:
    """Rename what stands at `path` to the first free `NAME.old-N`."""
    if os.path.lexists(path):
        names = (path.with_name(f"{path.name}.old-{number}") for number in count(1))
        aside = next(name for name in names if not os.path.lexists(name))
        path.rename(aside)
        _log.warning("%s was in the place of a file of this training; it was renamed to %s", path, aside)
