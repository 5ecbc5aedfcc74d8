"""Progress of a training: a file with one line per optimizer step, written by rank 0."""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trials import wire
from trials.errors import WireError
from trials.whole_file import whole_file

_log = logging.getLogger(__name__)

PROGRESS_FILE = "progress.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One optimizer step of the training: a line of the progress file."""

    step: int
    """Total optimizer steps, this one included."""
    of: int
    """Steps of the whole training."""
    loss: float
    seconds: float
    samples: int
    learning_rate: float | None = None
    """`training.learning_rate` after the schedule; those of parts follow the same one. None in older files."""
    data_wait_seconds: float = 0.0
    """Longest time that a rank waited for its packs: to be read where no workers do it ahead, and copied."""

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible step: a speed is computed from every line."""
        if self.step < 1 or self.samples < 0 or not self.seconds > 0:
            raise ValueError(f"step {self.step} of {self.samples} samples cannot have taken {self.seconds} s")
        if not self.data_wait_seconds >= 0:
            raise ValueError(f"step {self.step} cannot have waited for data {self.data_wait_seconds} s")


def append_step(path: Path, record: Progress) -> None:
    """Append a line. Log an error of the disk, for which a training should not end."""
    try:
        with path.open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # an earlier process died within its line
            file.write(wire.encode(record).encode() + b"\n")
    except OSError as error:
        _log.warning("step %d is not in %s: %s", record.step, path, error.strerror)


def drop_steps_after(path: Path, done: int) -> None:
    """Remove the lines of steps after `done`, which will be trained again; lines that are no steps stay."""
    if not path.exists():
        return
    with path.open("rb") as file:
        lines = [(line, _decoded(line)) for line in file]
    kept = [line for line, step in lines if step is None or step.step <= done]
    if len(kept) < len(lines):
        with whole_file(path) as stream:
            stream.writelines(kept)


def _decoded(line: bytes) -> Progress | None:
    try:
        return wire.decode(Progress, line)
    except WireError:
        return None


class ProgressReader:
    """Follows a progress file from its current end while the ranks write it."""

    def __init__(self, path: Path, on_step: Callable[[Progress], None]) -> None:
        self._path = path
        self._on_step = on_step
        self._offset = path.stat().st_size if path.exists() else 0
        self.seen: list[Progress] = []

    def look(self) -> None:
        """Report every new complete line. Lines that are no steps are logged and skipped."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                step = _decoded(line)
                if step is not None:
                    self.seen.append(step)
                    self._on_step(step)
                elif line.strip():
                    _log.warning("%s: a line is not a training step and is ignored: %.60r", self._path, line)

    @property
    def steps(self) -> int:
        """Number of the last step, 0 before the first."""
        return self.seen[-1].step if self.seen else 0

    @property
    def training_samples_per_second(self) -> float | None:
        """Samples per second over all steps but the first, which warms up; None when there are none."""
        counted = self.seen[1:]
        return sum(step.samples for step in counted) / sum(step.seconds for step in counted) if counted else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time of all steps but the first in which a rank waited for data; None when there are none."""
        counted = self.seen[1:]
        waited = sum(step.data_wait_seconds for step in counted)
        return waited / sum(step.seconds for step in counted) if counted else None
