"""The search in the middle of a training that has become slower, and the decision for it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autotune.certification.certificate import Certificate
from autotune.certification.certify import certify, known_certificate, require
from autotune.errors import DeviceBusy, JobError
from autotune.events import Listener, start_events
from autotune.search.execution.profiling import layer_costs
from autotune.search.roles import Role
from autotune.search.tuner import Tuner
from autotune.training.drift import Drift
from autotune.workbench import Workbench
from storage.errors import Superseded
from storage.records import BestPlan
from trials import wire
from trials.errors import AutotuneError
from trials.job import Job
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.training.progress import Progress
from trials.units import duration_text, number_of, speed_text
from trials.whole_file import whole_file

_log = logging.getLogger(__name__)

# A choice: each search stops the training for some minutes.
MOST_RETUNES = 3
"""Searches in one launch: for a machine that changes all the time no plan is the best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retune:
    """A search in the middle of a training, because of a drift."""

    drift: Drift
    steps: int
    """Total optimizer steps of the training when it stopped for the search."""
    search_seconds: float
    """Profile, search and certificate."""
    before: str
    """Id of the plan until then."""
    winner: str | None
    """Id of the plan that was found, the one before where no plan is faster; None where the search failed."""
    gain: float | None
    """Speed of the winner, divided by that of the plan before, as the search found it; None if unknown."""
    failure: str | None = None
    """Why the launch of the winner failed, after which the training went on with the plan before; else None."""
    training_samples_per_second: float | None = None
    """Speed of the training's steps from the search to its next stop, without the first one; None without any."""
    tokens_per_sample: float | None = None
    """Text tokens of a sample of the same steps; None without any."""

    @property
    def text(self) -> str:
        """One line with what was done, and what it gained."""
        took = f"Tuned again after step {self.steps}, in {duration_text(self.search_seconds)}"
        if self.winner is None:
            return f"{took}: the search failed, and plan {self.before} was kept"
        what = f"plan {self.before} is still the fastest"
        if self.failure is not None:
            what = f"the launch of plan {self.winner} failed ({self.failure}), and plan {self.before} was kept"
        elif self.winner != self.before:
            expected = "" if self.gain is None else f", expected {self.gain - 1:+.0%}"
            what = f"plan {self.winner} instead of {self.before}{expected}"
        if self.training_samples_per_second is None or not self.tokens_per_sample:
            return f"{took}: {what}"
        # By tokens, since the samples of an epoch's rest after a curriculum are longer than those of the next epoch.
        before = self.drift.training_samples_per_second * self.drift.tokens_per_sample / self.tokens_per_sample
        now = self.training_samples_per_second
        speeds = f"{speed_text(now)} samples/s after it, {speed_text(before)} before for samples of as many tokens"
        return f"{took}: {what}; {speeds} ({now / before - 1:+.0%})"


def check_checkpoints(job: Job) -> None:
    """Raise JobError for a training whose first checkpoint is at its end, where tuning again is of no use."""
    training = job.training
    if training.checkpoint_every is None and training.epochs == 1:
        raise JobError(
            "--retune-on-drift tunes again at a checkpoint, and without training.checkpoint_every and with "
            "training.epochs: 1 the only one is at the end; set training.checkpoint_every, for example to 100"
        )


def refusal(job: Job, drift: Drift, step: Progress, last_step: int | None, retunes: Sequence[Retune]) -> str | None:
    """Return why a training is not tuned again after a drift that ended with `step`; None where it is.

    `last_step` is where the launch stops, if that is before the end; `retunes` are its searches so far.
    """
    if retunes and retunes[-1].winner is None:
        return "it is not tuned again, since the last search failed"
    if retunes and retunes[-1].failure is not None:
        return f"it is not tuned again, since the launch of plan {retunes[-1].winner} failed"
    if len(retunes) == MOST_RETUNES:
        return f"it is not tuned again, since it was {MOST_RETUNES} times in this launch"
    last, every = min(step.of, last_step or step.of), job.training.checkpoint_every
    # A checkpoint at the end of an epoch may come any time.
    stop = step.step if every is None else (step.step // every + 1) * every
    left = max(0, last - stop)
    # What each sample lost against the promise: about what a search can win back.
    seconds_of_sample = 1 / drift.training_samples_per_second - 1 / drift.promised_samples_per_second
    lost = left * job.training.global_batch_samples * seconds_of_sample
    # `search.time_limit` bounds the trials alone: the profile and the certificate come on top.
    limit, took = job.search.time_limit, max((each.search_seconds for each in retunes), default=0.0)
    if lost > max(limit, took):
        return None
    search = f"a search took {duration_text(took)}"
    if limit >= took:
        search = f"a search may take {duration_text(limit)} (search.time_limit)"
    steps = number_of(left, "step after the next checkpoint loses", "steps after the next checkpoint lose")
    return f"it is not tuned again: the {steps} {duration_text(lost)}, and {search}"


def tune_again(
    bench: Workbench, plan: Plan, certificate: Certificate | None, listener: Listener
) -> tuple[BestPlan, Certificate | None] | None:
    """Profile and search on the machine as it is now, without what was measured before; None where that fails.

    The current `plan` is a baseline. Where it has a `certificate`, a new plan must have one that holds.
    Raise DeviceBusy and Superseded: the devices belong to another agent then.
    """
    try:
        file = bench.folder / "current-plan" / f"{plan.id}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(file) as stream:
            stream.write(wire.encode(plan).encode())
        job = bench.prepared.job
        search = job.search.model_copy(update={"current_plan": file, "queue": ()})
        prepared = replace(bench.prepared, job=job.model_copy(update={"search": search}))
        tuner = Tuner(replace(bench, prepared=prepared), listener)
        logs, devices = bench.folder / "ranks" / "profile", prepared.workload.hardware.devices
        with WarmPool(bench.site.launcher(logs, devices), on_start=start_events(listener)) as pool:
            layer_costs(prepared, bench.store, pool, logs, listener, fresh=True)
        best = tuner.tune(fresh=True)
        if certificate is not None and best.plan != plan:
            certificate = certified(bench, best.plan, listener)
    except (DeviceBusy, Superseded):
        raise
    except (AutotuneError, OSError) as error:
        _log.warning("the training was not tuned again, and goes on with plan %s: %s", plan.id, error)
        return None
    return best, certificate


def certified(bench: Workbench, plan: Plan, listener: Listener, *, takes_known: bool = False) -> Certificate:
    """Make a certificate of the plan, with its saved weights, unless one is stored and that is enough.

    Raise NotCertified if it does not hold.
    """
    known = known_certificate(bench.prepared, plan, bench.folder) if takes_known else None
    certificate = known or certify(bench.prepared, plan, bench.folder, bench.site, listener, whole=True)
    require(certificate)
    return certificate


def gain_of(best: BestPlan) -> float | None:
    """Return the speed of the winner, divided by that of the current plan."""
    return next((each.gain for each in best.baselines if each.role == Role.CURRENT_PLAN), None)
