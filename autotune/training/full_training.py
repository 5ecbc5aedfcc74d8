"""The full training with a plan, on the ranks of a site."""

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from autotune.certification.certificate import CERTIFICATE_FILE, Certificate, write_certificate
from autotune.data_problems import warn_of_skipped
from autotune.errors import LaunchFailed, PlanFailed
from autotune.events import Listener, Phase, PhaseBegan, start_events, unheard
from autotune.machine.conditions import MachineWatch, disturbance
from autotune.plan_check import check_first_steps, check_plan, check_steps
from autotune.training.drift import Drift
from autotune.training.plan_change import plan_to_replace
from autotune.training.retuning import Retune
from autotune.training.silence import Silence
from autotune.training.training_log import TrainingLog, check_loggers, logged_run
from autotune.training.training_output import check_output, held
from autotune.workload import Prepared
from storage.errors import AlreadyFinished, DatabaseUnavailable, UnknownRecord
from storage.records import LaunchResult, LaunchStatus
from storage.spool import Spool
from storage.store import Store
from trials.data.latest import BlankSamples
from trials.outcome import Crash
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.sites import Site
from trials.tasks.answer import TrainingReport
from trials.tasks.request import WINDOW_STEPS, Request, Training
from trials.tasks.stop import Stop
from trials.tasks.training.output import (
    RECORD_FILE,
    last_checkpoint,
    note_launch,
    open_output,
    read_record,
    written_model,
)
from trials.tasks.training.progress import (
    PROGRESS_FILE,
    Evaluated,
    Line,
    Progress,
    ProgressReader,
    best_evaluation,
    read_lines,
)
from trials.tasks.training.settings import training_settings
from trials.workload import Hardware

_LOOK_SECONDS = 60.0
"""Between looks at the machine: a training may take weeks, and each look is kept."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Result of a launch."""

    report: TrainingReport
    training_samples_per_second: float | None
    """Over this launch's steps but the first, which warms up; None when there were none."""
    tokens_per_sample: float | None = None
    """Text tokens of a sample of the same steps; None when there were none."""
    promised_samples_per_second: float | None = None
    """Speed that the search promised, for samples of as many tokens.

    None where it promised none, and where steps of a curriculum are among them.
    """
    data_wait_share: float | None
    """Share of the time of the same steps in which a rank waited for data."""
    steps: int
    """Optimizer steps of this launch."""
    blank_samples: int
    """Samples of this launch that could not be read; blank ones took their place."""
    evaluations: tuple[Evaluated, ...] = ()
    """Evaluations of the whole training, in order of steps."""
    disturbance: str | None = None
    """What slowed this launch down, by the rules for trials; None when nothing did."""
    speeds_since: int | None = None
    """Total steps at its last stop to be tuned again: speeds, waits and disturbances above are of later steps alone.

    None where it was not stopped.
    """
    drift: Drift | None = None
    """The last time that it was found to be slower than promised for long; since the last search, if there was one."""
    retunes: tuple[Retune, ...] = ()
    """The searches in between, oldest first."""
    model_step: int | None = None
    """Step of the training's model in the output, which may be an earlier one; None where there is none."""


def launch(
    prepared: Prepared,
    plan: Plan,
    store: Store,
    spool: Spool,
    folder: Path,
    *,
    site: Site,
    agent_id: str | None = None,
    promised_samples_per_second: float | None,
    max_steps: int | None,
    window_steps: int = WINDOW_STEPS,
    certificate: Certificate | None = None,
    changes_plan: bool = False,
    listener: Listener = unheard,
    on_step: Callable[[str, Progress], None] = lambda _, __: None,
    stops: Callable[[], Stop | None] = lambda: None,
) -> Launched:
    """Train until the end, or until `max_steps`; an interrupted training resumes.

    `on_step` is called with the id of the launch and each of its steps; every `window_steps` they have the times of the
    ranks. `stops` is called many times a second: once it has returned when to stop, the ranks do so then, with a
    checkpoint. What it raises ends them at once.
    A `certificate` of the plan is written to the output folder. With `changes_plan` the training in that folder
    continues with this plan instead of its own.
    The ranks are those of the `site`. The spool keeps the result until the store has it. The request and the logs of
    the ranks are written below `folder`.
    Raise what `check_plan` and `check_samples` raise, JobError for an output that cannot be written, a logger that
    cannot be used, a warm-up longer than the training or a curriculum of more steps than the plan fills with its
    samples, OutputTaken for an output with the results of another
    training, what `plan_to_replace` raises, and LaunchFailed with the reason when a rank fails: PlanFailed before the
    first checkpoint, unless the plan cannot be the reason.
    """
    check_plan(prepared, plan)
    warn_of_skipped(prepared.index, plan.packing, prepared.job.data.oversize, f"plan {plan.id}")
    hardware = prepared.workload.hardware
    check_output(prepared.job)
    check_loggers(prepared.job)
    output = prepared.job.training.output
    if not changes_plan:
        check_first_steps(prepared, plan)
    request = prepared.request(plan, Training(output=output, max_steps=max_steps, window_steps=window_steps))
    with held(output):
        instead_of = plan_to_replace(prepared, plan) if changes_plan else None
        check_steps(prepared, instead_of or plan)  # those of the plan with which it was trained until now
        # Before `open_output` drops the steps after the last checkpoint, which the loggers already have.
        before, lines = read_record(output / RECORD_FILE), list(read_lines(output / PROGRESS_FILE))
        opened = open_output(output, training_settings(request, prepared.index), plan, instead_of=instead_of)
        if certificate is not None:
            write_certificate(output / CERTIFICATE_FILE, certificate)
        elif instead_of is not None:
            (output / CERTIFICATE_FILE).unlink(missing_ok=True)  # that of the plan before
        run = logged_run(prepared.job, plan, opened, before, lines)
        with TrainingLog(prepared.job.training.loggers, run) as log:
            evaluates = prepared.held_out is not None
            work = store.add_workload(prepared.workload)
            if opened.record.launch is not None:
                _end_killed(opened.record.launch, lines[-1].step if lines else 0, store, spool)
            started = store.start_launch(plan, work, promised_samples_per_second, agent_id)
            note_launch(output, started.id)
            heard = partial(on_step, started.id)
            logs, progress = folder / started.id, output / PROGRESS_FILE
            watch = _Watch(progress, log, listener, heard, stops, logs=logs, evaluates=evaluates, steps=opened.steps)
            ending = _Ending(started.id, watch.reader, store, spool)
            begun = f", from checkpoint-{opened.steps} on" if opened.steps else ""
            text = f"Training with plan {plan.id} into {output}{begun}"
            best = best_evaluation(_evaluations(output))
            listener(PhaseBegan(phase=Phase.TRAINING, text=text, last_step=max_steps, best_evaluation=best))
            try:
                report, disturbed_by = _train(request, hardware, site, logs, watch=watch, ending=ending)
            except LaunchFailed as error:
                last = last_checkpoint(output)
                if isinstance(error, PlanFailed) and last <= opened.steps:
                    raise
                goes_on = f"goes on from checkpoint-{last}" if last else "begins anew"
                raise LaunchFailed(f"{error}; the same command {goes_on}") from error
    reader = watch.reader
    return Launched(
        report=report,
        training_samples_per_second=reader.training_samples_per_second,
        tokens_per_sample=reader.tokens_per_sample,
        steps=reader.count,
        data_wait_share=reader.data_wait_share,
        blank_samples=report.blank_samples,
        evaluations=_evaluations(output),
        disturbance=disturbed_by,
        model_step=written_model(output),
    )


def _evaluations(output: Path) -> tuple[Evaluated, ...]:
    return tuple(line for line in read_lines(output / PROGRESS_FILE) if isinstance(line, Evaluated))


def _end_killed(launch_id: str, steps: int, store: Store, spool: Spool) -> None:
    """Record the end of the last launch of the same folder, after these steps, where it was killed.

    That it is gone is known from the lock of the folder.
    """
    spool.replay(store)  # its end may wait there
    result = LaunchResult(
        launch_id=launch_id,
        status="interrupted",
        steps=steps,
        training_samples_per_second=None,
        finished=datetime.now(UTC),
    )
    with suppress(AlreadyFinished, UnknownRecord):  # it recorded its end, or belongs to another database
        store.finish_launch(result)


class _Watch:
    """Watch on the steps of a training, with warnings when ranks make no progress."""

    def __init__(
        self,
        path: Path,
        log: TrainingLog,
        listener: Listener,
        on_step: Callable[[Progress], None],
        stops: Callable[[], Stop | None],
        *,
        logs: Path,
        evaluates: bool,
        steps: int,
    ) -> None:
        self.stops = stops
        self._silence = Silence(evaluates=evaluates)
        self._logs, self._blanks = logs, BlankSamples()
        self._log = log
        self.listener = listener
        self._on_step = on_step
        self.reader = ProgressReader(path, self._hear, steps=steps)

    def look(self, pids: tuple[int, ...]) -> None:
        """Read new steps and check the processes of the ranks; called many times a second."""
        self.reader.look()
        self._silence.look(pids)

    def _hear(self, line: Line) -> None:
        self._log.add(line)
        if isinstance(line, Progress):
            self._silence.step(line.seconds)
            if self._blanks.add(line.blank_samples, line.blank_reason):
                _log.warning("until step %d, %s; the logs in %s name them", line.step, str(self._blanks), self._logs)
            self._on_step(line)
        else:
            self._silence.evaluation(line.seconds)
        self.listener(line)


def _train(
    request: Request, hardware: Hardware, site: Site, logs: Path, *, watch: _Watch, ending: "_Ending"
) -> tuple[TrainingReport, str | None]:
    """Return (report of rank 0, what slowed it down)."""
    layout, reader = request.plan.layout, watch.reader
    try:
        launcher = site.launcher(logs, layout.world_size)
        machine = MachineWatch(hardware, interval_seconds=_LOOK_SECONDS)
        with WarmPool(launcher, on_start=start_events(watch.listener)) as pool, machine:
            answer = pool.ask(request, math.inf, lambda: watch.look(pool.pids), stops=watch.stops)
        # The last steps may have come after the pool looked for the last time.
        reader.look()
    except KeyboardInterrupt:
        ending.record("interrupted", reader.steps)
        raise
    except BaseException:  # recorded whatever ends the training, then raised again
        ending.record("failed", reader.steps)
        raise
    if not isinstance(answer, Answers) or not isinstance(answer.reports[0], TrainingReport):
        ending.record("failed", reader.steps)
        message = f"the training failed: {answer}; logs are in {logs}"
        if isinstance(answer, Answers) or (isinstance(answer, Crash) and answer.of_machine):
            raise LaunchFailed(message)
        raise PlanFailed(message, str(answer))
    report = answer.reports[0]
    ending.record(_status(report), report.steps)
    if (lost := BlankSamples()).add(report.blank_samples):
        _log.warning("%s; the logs in %s name them", str(lost), logs)
    return report, disturbance(machine.conditions, hardware)


def _status(report: TrainingReport) -> LaunchStatus:
    if report.finished:
        return "finished"
    return "paused" if report.stopped is None else "interrupted"


@dataclass(frozen=True, slots=True)
class _Ending:
    """Recorder of how a launch ended."""

    launch_id: str
    reader: ProgressReader
    store: Store
    spool: Spool

    def record(self, status: LaunchStatus, steps: int) -> None:
        result = LaunchResult(
            launch_id=self.launch_id,
            status=status,
            steps=steps,
            training_samples_per_second=self.reader.training_samples_per_second,
            finished=datetime.now(UTC),
        )
        try:
            self.spool.keep(result, self.store)
            self.spool.replay(self.store)
        except DatabaseUnavailable as error:  # the training itself is whole
            _log.warning("the end of the training is not stored yet: %s", error)
