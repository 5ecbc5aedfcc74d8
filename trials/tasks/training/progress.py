"""Progress of a training: a file with a line for each optimizer step and each evaluation, written by rank 0."""

import logging
import os
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

from trials import wire
from trials.errors import WireError
from trials.tasks.training.spread import Spread
from trials.whole_file import whole_file

_log = logging.getLogger(__name__)

PROGRESS_FILE = "progress.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Where the time of the ranks in a step goes."""

    loads: Spread
    """Waiting for packs: to be read where no workers do it ahead, and copied."""
    passes: tuple[Spread, ...]
    """Forward and backward passes, of the ranks of each stage."""
    busy_seconds: float
    """Loading and passes of the rank where they sum to most. The rest of a step is communication and the update."""

    @classmethod
    def of(cls, stages: Sequence[int], loads: Sequence[float], passes: Sequence[float]) -> Self:
        """Return the times of ranks of these `stages`; all arguments are in order of rank."""
        of_stages = [
            {rank: passes[rank] for rank, each in enumerate(stages) if each == stage} for stage in sorted(set(stages))
        ]
        return cls(
            loads=Spread.of(dict(enumerate(loads))),
            passes=tuple(map(Spread.of, of_stages)),
            busy_seconds=max(map(sum, zip(loads, passes, strict=True))),
        )

    @classmethod
    def mean(cls, times: Sequence["RankTimes"], weights: Sequence[int]) -> Self:
        return cls(
            loads=Spread.mean([each.loads for each in times], weights),
            passes=tuple(Spread.mean(of_stage, weights) for of_stage in zip(*(t.passes for t in times), strict=True)),
            busy_seconds=statistics.fmean((each.busy_seconds for each in times), weights),
        )

    def times(self, factor: float) -> "RankTimes":
        return RankTimes(
            loads=self.loads.times(factor),
            passes=tuple(each.times(factor) for each in self.passes),
            busy_seconds=self.busy_seconds * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One optimizer step of the training: a line of the progress file."""

    step: int
    """Total optimizer steps, this one included."""
    of: int
    """Steps of the whole training."""
    loss: float
    """Mean over the targets of the step's samples that could be read, by their weights."""
    seconds: float
    samples: int
    learning_rate: float | None = None
    """Highest of the parts that are trained, after the schedule; others follow the same one."""
    data_wait_seconds: float = 0.0
    """Longest time that a rank waited for its packs: to be read where no workers do it ahead, and copied."""
    text_tokens: int = 0
    """Tokens of the step's samples, without padding."""
    blank_samples: int = 0
    """Samples of the step that could not be read; blank ones took their place."""
    blank_reason: str = ""
    """Why the first of them could not be read, with file and line; empty for none."""
    gradient_norm: float | None = None
    """Norm of the whole model's gradient before clipping; None where nothing needed it."""
    window: RankTimes | None = None
    """Means over a window of steps that ends with this one; None for the steps in between."""

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible step: a speed is computed from every line."""
        if self.step < 1 or self.samples < 0 or not self.seconds > 0:
            raise ValueError(f"step {self.step} of {self.samples} samples cannot have taken {self.seconds} s")
        if not self.data_wait_seconds >= 0:
            raise ValueError(f"step {self.step} cannot have waited for data {self.data_wait_seconds} s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The held-out samples after a step: a line of the progress file."""

    step: int
    """Total optimizer steps before the evaluation."""
    of: int
    """Steps of the whole training."""
    evaluation_loss: float
    """Mean over the target tokens of the held-out samples."""
    seconds: float
    samples: int
    """Held-out samples without those that could not be read."""
    blank_samples: int = 0
    """Held-out samples that could not be read, and do not count."""

    def __post_init__(self) -> None:
        """Raise ValueError for an impossible evaluation."""
        if self.step < 1 or self.samples < 1 or not self.seconds >= 0:
            raise ValueError(f"{self.samples} samples after step {self.step} cannot have taken {self.seconds} s")


Line: TypeAlias = Progress | Evaluated
"""A line of the progress file. No field tells the two apart: they have different ones."""


def best_evaluation(found: Iterable[Evaluated]) -> Evaluated | None:
    """Return the first evaluation with the lowest loss; None without any."""
    return min(found, key=lambda each: each.evaluation_loss, default=None)


def append_line(path: Path, record: Line) -> None:
    """Append a line. Log an error of the disk, for which a training should not end."""
    try:
        with path.open("ab+") as file:
            if file.tell() and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                file.write(b"\n")  # an earlier process died within its line
            file.write(wire.encode(record).encode() + b"\n")
    except OSError as error:
        what = "step" if isinstance(record, Progress) else "the evaluation after step"
        _log.warning("%s %d is not in %s: %s", what, record.step, path, error.strerror)


def drop_steps_after(path: Path, done: int) -> None:
    """Remove the lines of steps after `done`, which will be trained again; lines of something else stay."""
    if not path.exists():
        return
    with path.open("rb") as file:
        if not any(_is_after(line, done) for line in file):
            return
        file.seek(0)
        with whole_file(path) as stream:
            stream.writelines(line for line in file if not _is_after(line, done))


def _is_after(line: bytes, done: int) -> bool:
    record = _decoded(line)
    return record is not None and record.step > done


def read_lines(path: Path) -> Iterator[Line]:
    """Yield the steps and evaluations of the file in order, and no other lines; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from (record for record in map(_decoded, file) if record is not None)


def _decoded(line: bytes) -> Line | None:
    try:
        found: Line = wire.decode(Line, line)
    except WireError:
        return None
    return found


class ProgressReader:
    """Reader of a progress file from its current end while the ranks write it."""

    def __init__(self, path: Path, on_line: Callable[[Line], None], *, steps: int = 0) -> None:
        """Read the steps of a training that has done this number of them."""
        self._path = path
        self._on_line = on_line
        self._offset = path.stat().st_size if path.exists() else 0
        self.count = 0
        """Steps that were read."""
        self.steps = steps
        """Total optimizer steps of the training."""
        self._samples = self._text_tokens = 0
        # Sums over all steps but the first, which warms up.
        self._seconds = self._waited_seconds = 0.0

    def look(self) -> None:
        """Report every new complete line. Lines of something else are logged and skipped."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                # Rank 0 is in the middle of it: the next look reads the whole line.
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = _decoded(line)
                if isinstance(record, Progress):
                    self._count(record)
                if record is not None:
                    self._on_line(record)
                elif line.strip():
                    _log.warning("%s: a line is not a training step and is ignored: %.60r", self._path, line)

    def _count(self, step: Progress) -> None:
        self.count, self.steps = self.count + 1, step.step
        if self.count > 1:
            self._samples += step.samples
            self._text_tokens += step.text_tokens
            self._seconds += step.seconds
            self._waited_seconds += step.data_wait_seconds

    @property
    def training_samples_per_second(self) -> float | None:
        """Samples per second over all steps but the first, which warms up; None when there are none."""
        return self._samples / self._seconds if self._seconds else None

    @property
    def tokens_per_sample(self) -> float | None:
        """Text tokens of a sample, mean over all steps but the first; None when there are none."""
        return self._text_tokens / self._samples if self._samples else None

    @property
    def data_wait_share(self) -> float | None:
        """Share of the time of all steps but the first in which a rank waited for data; None when there are none."""
        return self._waited_seconds / self._seconds if self._seconds else None
