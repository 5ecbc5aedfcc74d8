"""Loggers of the progress of a training. One module each, found by name.

A module has the name of the package that it needs, which is also the name of the extra that installs it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trials import plugins


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A training for a logger; a resumed training is the same run."""

    id: str
    """16 hexadecimal digits, the same for all launches of a training."""
    output: Path
    """Folder of the training, which the logger may write to."""
    config: dict[str, Any]
    """The plan and the job, as JSON values."""
    done: int
    """Steps of the checkpoint from which this launch continues; later ones are run again."""
    logged: frozenset[tuple[str, int]]
    """(metric, step) of what earlier launches have passed to `RunLog.log`.

    Without the steps that this launch trains again with other settings or another plan.
    """


class RunLog(Protocol):
    """The log of one launch."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the values of these metrics after `step`."""

    def close(self, failed: bool, /) -> None:
        """Write what is still buffered, and end the log of a launch that has succeeded or `failed`."""


class Logger(Protocol):
    """What a logger's module offers."""

    ERRORS: tuple[type[Exception], ...]
    """What its functions raise when the log cannot be written, such as for a full disk or a network."""

    def start(self, run: LoggedRun) -> RunLog:
        """Begin a log, or continue that of earlier launches of the training without repeating a metric.

        Raise JobError when the user has to do something first, such as to log in.
        """


LOGGERS: plugins.Plugins[Logger] = plugins.Plugins(__name__)
