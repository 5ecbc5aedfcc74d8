"""The full training with a plan, on the ranks of this machine."""

import logging
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from autotune.errors import JobError, LaunchFailed, PlanNotValid
from autotune.workload import Prepared
from storage.errors import DatabaseUnavailable
from storage.records import LaunchResult
from storage.spool import Spool
from storage.store import Store
from trials import wire
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.run.progress import PROGRESS_FILE, Progress
from trials.run.ranks import local_ranks
from trials.run.report import TrainingReport
from trials.run.request import Training

_log = logging.getLogger(__name__)


def check_output(folder: Path) -> None:
    """Raises JobError unless `folder` can be written, or made where it is absent. Leaves nothing behind."""
    try:
        existing = next(place for place in (folder, *folder.parents) if place.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise JobError(
            f"training.output {folder} cannot be written ({error.strerror}); name another folder in the job file"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """What a training did in this launch."""

    report: TrainingReport
    samples_per_second: float | None
    """Over this launch's steps but the first, which warms up; None when there were none."""
    steps: int
    """Optimizer steps of this launch."""
    blank_samples: int
    """Samples that could not be read in this launch, and taught nothing."""


def launch(
    prepared: Prepared,
    plan: Plan,
    store: Store,
    spool: Spool,
    folder: Path,
    *,
    agent_id: str | None = None,
    predicted_samples_per_second: float | None,
    max_steps: int | None,
    on_step: Callable[[Progress], None],
) -> Launched:
    """Trains until the end, or until `max_steps`; a training that was interrupted goes on.

    How it ended is kept by the spool until the store has it. `folder` takes a folder of this launch, with the ranks'
    request and logs. Raises PlanNotValid for a plan that needs more devices, JobError for an output that cannot be
    written, and LaunchFailed with the reason when a rank fails.
    """
    hardware = prepared.workload.hardware
    if plan.layout.world_size > hardware.devices:
        raise PlanNotValid(
            f"plan {plan.id} needs {plan.layout.world_size} devices, the job has {hardware.devices}; raise "
            "hardware.devices, or run `autotune tune` for a plan that fits"
        )
    check_output(prepared.job.training.output)
    task = Training(output=prepared.job.training.output, max_steps=max_steps)
    task.output.mkdir(parents=True, exist_ok=True)
    follower = _Follower(task.output / PROGRESS_FILE, on_step)
    record = store.start_launch(plan, store.add_workload(prepared.workload), predicted_samples_per_second, agent_id)
    logs = folder / record.id

    def finish(status: Literal["finished", "failed", "interrupted"], steps: int) -> None:
        result = LaunchResult(
            launch_id=record.id,
            status=status,
            steps=steps,
            samples_per_second=follower.samples_per_second,
            finished=datetime.now(UTC),
        )
        try:
            spool.put(result)
            spool.replay(store)
        except DatabaseUnavailable as error:  # the training itself is whole
            _log.warning("how the training ended is not in the database yet: %s", error)

    try:
        with WarmPool(local_ranks(plan.layout.world_size, hardware.accelerator), logs) as pool:
            answer = pool.ask(prepared.request(plan, task), math.inf, follower.look)
        follower.look()
    except KeyboardInterrupt:
        finish("interrupted", follower.steps)
        raise
    except BaseException:
        finish("failed", follower.steps)
        raise
    if not isinstance(answer, Answers) or not isinstance(answer.reports[0], TrainingReport):
        finish("failed", follower.steps)
        raise LaunchFailed(f"the training failed: {answer}; logs are in {logs}")
    report = answer.reports[0]
    finish("finished" if report.finished else "interrupted", report.steps)
    first_stage = [each for each in answer.reports[: plan.layout.data] if isinstance(each, TrainingReport)]
    blanks = sum(each.blank_samples for each in first_stage)
    if blanks:
        _log.warning("%d samples could not be read and were trained as blanks; logs in %s name them", blanks, logs)
    return Launched(
        report=report,
        samples_per_second=follower.samples_per_second,
        steps=len(follower.seen),
        blank_samples=blanks,
    )


class _Follower:
    """Reads the progress file as the ranks write it."""

    def __init__(self, path: Path, on_step: Callable[[Progress], None]) -> None:
        self._path = path
        self._on_step = on_step
        self._offset = path.stat().st_size if path.exists() else 0
        self.seen: list[Progress] = []

    def look(self) -> None:
        """Tells of every whole line that is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                self.seen.append(wire.decode(Progress, line))
                self._on_step(self.seen[-1])

    @property
    def steps(self) -> int:
        return self.seen[-1].step if self.seen else 0

    @property
    def samples_per_second(self) -> float | None:
        counted = self.seen[1:]
        return sum(step.samples for step in counted) / sum(step.seconds for step in counted) if counted else None
