"""`training.compile: auto`: a decision for a workload and a length of trainings, once made, holds for every command."""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autotune.dimensions.folds import named_layout
from autotune.errors import JobError, PredictError
from autotune.plan_file import read_plan
from storage.records import CompileDecision
from storage.store import Store
from trials.model.refusals.compiling import uncompilable
from trials.plan import Layout
from trials.workload import Workload

if TYPE_CHECKING:
    from trials.job import Job, TrainingSection

AUTO = "auto"
MARGIN = 2
"""Times that compiling has to be repaid: the ranks of the search compile too, and so do those of each resumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileSetting:
    """What `auto` means for a job."""

    compiled: bool
    text: str
    """One line for people."""
    is_open: bool = False
    """Whether nothing is decided yet; layers are not compiled until then."""


def setting_of(store: Store, job: "Job", now: Workload) -> CompileSetting:
    """Return what `auto` means for a job with this workload, by what is decided for its length, or for another one."""
    if (why := obstacle(job, now)) is not None:
        return CompileSetting(compiled=False, text=f"training.compile: auto: {why}: not compiled")
    found, steps = decisions_of(store, now), steps_of(job.training, now.data.samples)
    decision = next((each for each in found if each.steps == steps), found[0] if found else None)
    if decision is None:
        text = (
            "training.compile: auto is not decided for this job yet, so layers are not compiled; `autotune tune JOB` "
            "decides it"
        )
        return CompileSetting(compiled=False, text=text, is_open=True)
    text = decision_text(decision)
    if decision.steps != steps:
        text = f"{text} (for {decision.steps:,} steps; `autotune tune JOB` decides it for {steps:,})"
    return CompileSetting(compiled=decision.compiler is not None, text=text)


def decision_text(decision: CompileDecision) -> str:
    return f"training.compile: auto: {decision.reason}"


def decisions_of(store: Store, workload: Workload) -> tuple[CompileDecision, ...]:
    """Return the decisions for a workload, whether its layers are compiled or not, newest first."""
    return store.compile_decisions(workload.with_layers(compiled=False).fingerprint)


def settled_workload(store: Store, job: "Job", now: Workload) -> Workload:
    """Return the workload of the job, as its setting is decided."""
    return now.with_layers(compiled=setting_of(store, job, now).compiled) if job.training.compile == AUTO else now


def obstacle(job: "Job", workload: Workload) -> str | None:
    """Return which plan that the job names cannot be compiled, and why; None where there is none."""
    for name, layout in _named(job, workload):
        if (why := uncompilable(layout)) is not None:
            return f"compiling does not work with {why} ({name})"
    return None


def _named(job: "Job", workload: Workload) -> Iterator[tuple[str, Layout]]:
    """Yield the layouts that the job names. Bad ones are left to the search, which refuses them."""
    if job.search.current_plan is not None:
        with suppress(PredictError):
            yield "the plan of search.current_plan", read_plan(job.search.current_plan).layout
    for name in job.search.space.layouts or ():
        with suppress(JobError):
            if (layout := named_layout(name, workload)) is not None:
                yield f"{name} in search.space.layouts", layout


def steps_of(training: "TrainingSection", samples: int) -> int:
    """Return the steps of the whole training, of about `training.global_batch_samples` each.

    `training.epochs` is 1 where the job does not give it, which is the least.
    """
    steps = training.epochs * math.ceil(samples / training.global_batch_samples)
    return min(steps, training.max_steps or steps)


def with_compile(job: "Job", *, compiled: bool) -> "Job":
    return job.model_copy(update={"training": job.training.model_copy(update={"compile": compiled})})
