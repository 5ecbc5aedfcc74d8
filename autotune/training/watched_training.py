"""A full training whose speed is watched, and that is tuned again when it has become slower."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace

from autotune.certification.certificate import Certificate
from autotune.errors import PlanFailed
from autotune.events import Listener, Note
from autotune.results.known_plan import KnownPlan, counted_runs, of_winner
from autotune.training.drift import PATIENCE, Drift, Patience, Promise, SpeedWatch
from autotune.training.full_training import Launched, launch
from autotune.training.plan_change import plan_to_continue, untried_change
from autotune.training.retuning import Retune, certified, gain_of, refusal, tune_again
from autotune.training.speed_window import StepTimes
from autotune.training.training_output import held
from autotune.training.window_writer import WindowWriter
from autotune.workbench import Workbench
from storage.errors import UnknownRecord
from storage.records import BestPlan
from trials.job import Job
from trials.outcome import Completed
from trials.plan import Plan
from trials.tasks.stop import Stop
from trials.tasks.training.output import note_failed_plan
from trials.tasks.training.progress import Progress

_log = logging.getLogger(__name__)

Stopping = Callable[[], AbstractContextManager[Callable[[], bool]]]
"""Opens a context around each launch, and provides whether its training is to stop after the current step."""
Tuning = Callable[[Workbench, Plan, Certificate | None, Listener], tuple[BestPlan, Certificate | None] | None]
"""Searches as `tune_again` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """How far a training goes, and what may change its plan."""

    max_steps: int | None = None
    """Total steps after which to stop."""
    changes_plan: bool = False
    """Whether the plan replaces that of the training in the output folder."""
    retunes: bool = False
    """Whether to tune again after a drift."""
    patience: Patience = PATIENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A plan with what goes with it, to go on with from a checkpoint where the one after it cannot be launched."""

    chosen: KnownPlan
    certificate: Certificate | None
    promise: Promise | None
    steps: int
    """Total optimizer steps of the checkpoint."""


@dataclass(slots=True, kw_only=True)
class WatchedTraining:
    """The launches of a training, one after another: all but the first after a search, because of a drift."""

    bench: Workbench
    chosen: KnownPlan
    """The plan; after a search the plan of its winner."""
    certificate: Certificate | None
    """Certificate of the plan. Where the first plan has one, later plans must have one as well."""
    options: TrainingOptions
    listener: Listener
    stopping: Stopping
    tuning: Tuning = tune_again

    def run(self) -> Launched:
        """Train until the end, `max_steps`, or a request to stop.

        A training that `retunes` and has been slower than promised for long stops at its next checkpoint, is tuned on
        the machine as it is then, and goes on with the winner. `refusal` says when not. Where the search fails, or the
        winner does before its first checkpoint, it goes on with its plan; also where an earlier process chose the
        winner. Raise what `full_training.launch` and `tune_again` raise.
        """
        with WindowWriter(self.bench.spool, self.bench.store) as writer:
            return self._train(writer)

    def _train(self, writer: WindowWriter) -> Launched:
        retunes: list[Retune] = []
        before: _Choice | None = None  # where the present plan has not trained yet
        drift: Drift | None = None
        speeds_since: int | None = None
        changes_plan = self.options.changes_plan
        if self.options.retunes:
            chosen = self.chosen
            self.chosen, changes_plan = plan_to_continue(self.bench, chosen, self.listener)
            if self.certificate is not None and self.chosen != chosen:
                self.certificate = certified(self.bench, self.chosen.plan, self.listener)
        promise = self._promise(None)
        steps = blank_samples = 0
        while True:
            drifts = _Drifts(job=self.bench.prepared.job, options=self.options, retunes=retunes)
            watch = SpeedWatch(
                self.chosen.plan.layout,
                promise,
                self.options.patience,
                on_drift=drifts.hear,
                on_window=writer.add,
                last_step=self.options.max_steps,
                curriculum_steps=self._curriculum_steps,
            )
            try:
                with self.stopping() as stops:
                    launched = self._launch(watch, drifts, stops, changes_plan=changes_plan)
            except PlanFailed as error:
                if stops() or (before := before or self._before_change()) is None:
                    raise
                if retunes:
                    retunes[-1] = replace(retunes[-1], failure=error.reason)
                self._go_back(before, error)
                promise, before, changes_plan = before.promise, None, True
                continue
            steps, blank_samples = steps + launched.steps, blank_samples + launched.blank_samples
            drift = drifts.last or drift
            if retunes and retunes[-1].training_samples_per_second is None:
                retunes[-1] = replace(
                    retunes[-1],
                    training_samples_per_second=launched.training_samples_per_second,
                    tokens_per_sample=launched.tokens_per_sample,
                )
            # Asked behind the context: a signal until its end is noted, and a later one is raised.
            if launched.report.stopped is not Stop.AT_CHECKPOINT or stops():
                return replace(
                    launched,
                    promised_samples_per_second=self._promised_speed(promise, launched),
                    steps=steps,
                    blank_samples=blank_samples,
                    speeds_since=speeds_since,
                    drift=drift,
                    retunes=tuple(retunes),
                )
            assert drift is not None, "only a drift stops it at a checkpoint"
            speeds_since = launched.report.steps
            until_then = _Choice(chosen=self.chosen, certificate=self.certificate, promise=promise, steps=speeds_since)
            if watch.is_slow:
                promise, drift = self._tune(promise, drift, speeds_since, retunes), None
            else:
                self.listener(Note(text="The training is no longer slower: it goes on without a search"))
            changes_plan = self.chosen.plan != until_then.chosen.plan
            before = until_then if changes_plan else None

    @property
    def _curriculum_steps(self) -> int:
        return self.bench.prepared.job.training.curriculum.steps or 0

    def _promised_speed(self, promise: Promise | None, launched: Launched) -> float | None:
        """Return the promised speed for samples of as many tokens as the launch had; None with a curriculum in it."""
        first = launched.report.steps - launched.steps + 2  # the step before it warms up
        if not (promise and launched.tokens_per_sample) or first <= self._curriculum_steps:
            return None
        return promise.tokens_per_second / launched.tokens_per_sample

    def _before_change(self) -> _Choice | None:
        """Return the plan before the one that an earlier process chose, where that has no checkpoint; else None.

        It promises nothing, so that it is not tuned again at once: the search would find the same winner.
        """
        change = untried_change(self.bench.prepared.job.training.output)
        if change is None or not self.options.retunes:
            return None
        certificate = None if self.certificate is None else certified(self.bench, change.plan, self.listener)
        chosen = KnownPlan(plan=change.plan, speed=None)
        return _Choice(chosen=chosen, certificate=certificate, promise=None, steps=change.steps)

    def _promise(self, study_id: str | None) -> Promise | None:
        """Return the promise of the chosen plan, as a study found it; None for a plan of unknown speed."""
        speed, now = self.chosen.speed, self.bench.prepared.workload
        if speed is None:
            return None
        step_times, workload = None, now
        with suppress(UnknownRecord):  # deleted since it was chosen
            tried = self.bench.store.find_plan(self.chosen.plan.id, lambda *_: now, study_id=study_id)
            workload = tried.workload
            for outcome in (trial.result.outcome for trial in counted_runs(tried)):
                if isinstance(outcome, Completed):  # the last one is the longest: a winner is measured over more steps
                    step_times = StepTimes.of_measurement(outcome.measurement)
        return Promise(
            tokens_per_second=speed.mean * workload.data.text_tokens / workload.data.samples, step_times=step_times
        )

    def _launch(
        self, watch: SpeedWatch, drifts: "_Drifts", stops: Callable[[], bool], *, changes_plan: bool
    ) -> Launched:
        bench, chosen = self.bench, self.chosen
        try:
            return launch(
                bench.prepared,
                chosen.plan,
                bench.store,
                bench.spool,
                bench.folder / "launch",
                site=bench.site,
                agent_id=bench.agent.id,
                promised_samples_per_second=chosen.speed.mean if chosen.speed else None,
                max_steps=self.options.max_steps,
                window_steps=self.options.patience.window_steps,
                certificate=self.certificate,
                changes_plan=changes_plan,
                listener=self.listener,
                on_step=lambda launch_id, step: watch.step(step, launch_id),
                stops=lambda: Stop.NOW if stops() else Stop.AT_CHECKPOINT if drifts.stops else None,
            )
        finally:
            watch.end()

    def _tune(self, promise: Promise | None, drift: Drift, steps: int, retunes: list[Retune]) -> Promise | None:
        """Tune again, choose the winner, and note what was done; return what the chosen plan promises now."""
        before, start = self.chosen.plan, time.monotonic()
        self.listener(Note(text=f"Stopped at checkpoint-{steps} to tune again, on the machine as it is now"))
        found = self.tuning(self.bench, before, self.certificate, self.listener)
        if found is not None:
            best, self.certificate = found
            self.chosen = of_winner(best)
            promise = self._promise(best.study_id)
        retune = Retune(
            drift=drift,
            steps=steps,
            search_seconds=time.monotonic() - start,
            before=before.id,
            winner=None if found is None else self.chosen.plan.id,
            gain=None if found is None else gain_of(found[0]),
        )
        self.listener(Note(text=retune.text))
        retunes.append(retune)
        return promise

    def _go_back(self, before: _Choice, error: PlanFailed) -> None:
        """Choose the plan before again, since the present one cannot be launched."""
        output, failed = self.bench.prepared.job.training.output, self.chosen.plan.id
        with held(output):
            note_failed_plan(output, failed)
        self.chosen, self.certificate = before.chosen, before.certificate
        _log.warning(
            "plan %s cannot be launched, and checkpoint-%d is continued with plan %s: %s",
            failed,
            before.steps,
            before.chosen.plan.id,
            error,
        )


@dataclass(slots=True, kw_only=True)
class _Drifts:
    """The drifts of one launch, and whether the last one is a reason to stop it for a search."""

    job: Job
    options: TrainingOptions
    retunes: Sequence[Retune]
    """The searches before this launch."""
    last: Drift | None = None
    stops: bool = False

    def hear(self, drift: Drift, step: Progress) -> None:
        self.last = drift
        if not self.options.retunes:
            _log.warning(
                "%s; launch with --retune-on-drift, or stop it, `autotune tune JOB --fresh`, and go on with the new "
                "winner by --resume-with",
                drift,
            )
            return
        reason = None if self.stops else refusal(self.job, drift, step, self.options.max_steps, self.retunes)
        self.stops = reason is None
        _log.warning("%s; %s", drift, reason or "it is tuned again at its next checkpoint")
