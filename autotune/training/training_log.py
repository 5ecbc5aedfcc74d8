"""Progress of a training, passed to all loggers of the job."""

import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from autotune.errors import JobError
from autotune.loggers import LOGGERS, LoggedRun, Logger, RunLog
from trials import plugins, wire
from trials.job import Job
from trials.plan import Plan
from trials.tasks.training.output import OpenedOutput, TrainingRecord
from trials.tasks.training.progress import Evaluated, Line

_log = logging.getLogger(__name__)


def check_loggers(job: Job) -> None:
    """Check, before any work is done, that the loggers of the job can be used.

    Raise JobError for one that does not exist, or whose package is not installed.
    """
    known = plugins.names(LOGGERS)
    for name in job.training.loggers:
        if name not in known:
            raise JobError(f"training.loggers: {name!r} is not a logger; known are: {', '.join(known)}")
        if importlib.util.find_spec(name) is None:
            raise JobError(
                f"training.loggers: {name} needs a package that is not installed; install it with `pip install "
                f"{name}`, or remove {name}"
            )


def logged_run(
    job: Job, plan: Plan, opened: OpenedOutput, before: TrainingRecord | None, earlier: Iterable[Line]
) -> LoggedRun:
    """Describe a training for its loggers; `before` and `earlier` are its record and its lines before it was opened."""
    settings = job.model_dump(mode="json", exclude={"database"})  # its URL may hold a password
    config = {"plan": {"id": plan.id, **wire.to_document(plan)}, "job": settings}
    now = opened.record
    # Else the steps that are trained again have other losses than those that were logged before.
    repeats = before is not None and (before.settings, before.changes) == (now.settings, now.changes)
    known = (line for line in earlier if repeats or line.step <= opened.steps)
    logged = frozenset((name, line.step) for line in known for name in metrics(line))
    return LoggedRun(id=now.id, output=job.training.output, config=config, done=opened.steps, logged=logged)


def metrics(line: Line) -> Mapping[str, float]:
    """Return the metrics of a line of progress, with the names that they have in Hugging Face's Trainer."""
    if isinstance(line, Evaluated):
        return {"eval/loss": line.evaluation_loss}
    found = {
        "train/loss": line.loss,
        "train/learning_rate": line.learning_rate,
        "train/grad_norm": line.gradient_norm,
        "train/samples_per_second": line.samples / line.seconds,
        "train/tokens_per_second": line.text_tokens / line.seconds,
        "train/data_wait_seconds": line.data_wait_seconds,
    }
    return {name: value for name, value in found.items() if value is not None}


class TrainingLog:
    """Loggers that get progress. One that fails is switched off with a warning, since it must not end a training."""

    def __init__(self, names: Iterable[str], run: LoggedRun) -> None:
        """Start the loggers. Raise what `Logger.start` raises."""
        self._logs: dict[str, tuple[Logger, RunLog]] = {}
        for name in names:
            logger = plugins.load(LOGGERS, name)
            with self._guarded(name, logger):
                self._logs[name] = (logger, logger.start(run))

    def add(self, line: Line) -> None:
        values = metrics(line)
        # Over a copy, since a logger that fails is removed from the dictionary meanwhile.
        for name, (logger, log) in tuple(self._logs.items()):
            with self._guarded(name, logger):
                log.log(line.step, values)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, (logger, log) in tuple(self._logs.items()):
            with self._guarded(name, logger):
                log.close(kind is not None)

    @contextmanager
    def _guarded(self, name: str, logger: Logger) -> Iterator[None]:
        try:
            yield
        except logger.ERRORS as error:
            self._logs.pop(name, None)
            _log.warning("training.loggers: %s failed and is switched off for the rest of this launch: %s", name, error)
