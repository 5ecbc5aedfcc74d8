"""The commands that only read the database: plans, studies and show."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import study_report
from autotune.cli.context import Options
from autotune.cli.progress import reading_progress
from autotune.errors import HardwareError
from autotune.folders import lengths_folder
from autotune.known_plan import known_text
from autotune.machine.agent import has_died, lives
from autotune.machine.hardware import probe_hardware, software
from autotune.study_report import Known
from storage.errors import DatabaseDamaged
from storage.nearness import Fields, fields_of, fields_of_machine
from storage.records import AgentRecord, BestPlan, LaunchRecord, TriedPlan
from storage.store import Store, open_store
from storage.validity import Validity, Verdict, validity
from trials import wire
from trials.workload import Hardware, Workload

if TYPE_CHECKING:
    from autotune.workload import Outline
    from trials.job import Job

_log = logging.getLogger(__name__)
_NEAREST = 5
_SORTS: Mapping[str, Callable[[Known], Any]] = {
    "speed": lambda known: -known.best.samples_per_second,
    "gain": lambda known: -known.gain,
    "found": lambda known: -known.best.created.timestamp(),
    "distance": lambda known: known.distance or 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFilter:
    """Choice and order of the plans to list."""

    here: bool
    like: Path | None
    hardware: str | None
    model: str | None
    verdict: str | None
    in_use: bool
    sort: str | None
    top: int | None


def list_plans(options: Options, wanted: PlanFilter) -> None:
    """List plans; without a machine or a job to compare with, the latest search comes first."""
    job, outline = outline_of(wanted.like) if wanted.like else (None, None)
    now = workload_of(options, job, outline) if job and outline else None
    with open_store(options.database_url(job.database if job else None)) as store:
        if outline:
            store.adopt_model(outline.shape, outline.path_digest)
        if now or wanted.here:
            found = _nearest_plans(store, wanted, now)
        else:
            used, hardware = _uses(store), cache(_hardware_here)  # a probe for each number of devices, not each plan
            found = [
                Known(best=best, validity=holds_here(best, hardware), used_by=used.get(best.plan.id, ()))
                for best in store.best_plans(hardware_name=wanted.hardware, model_name=wanted.model)
            ]
    found = [known for known in found if known.used_by or not wanted.in_use]
    if wanted.verdict:
        found = [known for known in found if known.validity.verdict == wanted.verdict]
    elif now or wanted.here:
        holding = [known for known in found if known.validity.verdict is not Verdict.INVALID]
        found = holding or found[: wanted.top or _NEAREST]
    if wanted.sort:
        found.sort(key=_SORTS[wanted.sort])
    found = found[: wanted.top]
    nothing = "No plan is known" + (" for this hardware" if wanted.here else "") + "; run `autotune tune JOB`."
    options.give(
        lambda: {"plans": [_document(known) for known in found]},
        lambda: study_report.plans_text(found) if found else nothing,
    )


def _nearest_plans(store: Store, wanted: PlanFilter, now: Workload | None) -> list[Known]:
    """Return the plans nearest to the job, or to this machine, nearest first."""
    here = probe_hardware()
    fields: Fields = fields_of(now) if now else fields_of_machine(here, software())
    # More than are shown, because the caller still filters by verdict and use.
    found = store.nearest_plans(
        fields, hardware_name=wanted.hardware, model_name=wanted.model, limit=max(wanted.top or 0, 1000)
    )
    used = _uses(store)
    return [
        Known(
            best=near.best,
            validity=_validity(near.best, now) if now else holds_here(near.best, lambda _: here),
            used_by=used.get(near.best.plan.id, ()),
            differences=near.differences,
            distance=near.distance,
        )
        for near in found
    ]


def list_studies(options: Options, *, model: str | None, top: int | None) -> None:
    with open_store(options.database_url()) as store:
        winners = {best.study_id: best for best in store.best_plans(model_name=model)}
        found = [
            (study, best.workload if best else store.workload(study.workload_fingerprint), best)
            for study in store.studies(model_name=model, limit=top)
            for best in (winners.get(study.id),)
        ]
    options.give(
        lambda: {"studies": [study_report.study_document(*each) for each in found]},
        lambda: study_report.studies_text(found),
    )


def show_study(options: Options, name: str) -> None:
    with open_store(options.database_url()) as store:
        study = store.find_study(name)
        work, trials = store.workload(study.workload_fingerprint), store.trials(study.id)
        try:
            winner = store.winner(study.id)
        except DatabaseDamaged as error:  # the study and its trials can still be shown
            _log.warning("the winner of %s is left out: %s", study.name, error)
            winner = None
    found = study, work, winner
    options.give(
        lambda: {**study_report.study_document(*found), "trials": [wire.to_document(trial) for trial in trials]},
        lambda: study_report.study_text(*found, trials),
    )


def show_plan(options: Options, plan: str) -> None:
    with open_store(options.database_url()) as store:
        tried = store.find_plan(plan)
        launches = store.launches(tried.plan.id)
        used = _uses(store).get(tried.plan.id, ())
    holds, known = holds_here(tried, _hardware_here), known_text(tried)
    options.give(
        lambda: {
            **study_report.tried_document(tried),
            "known": known,
            **_state(holds, used),
            "launches": [wire.to_document(launch) for launch in launches],
        },
        lambda: study_report.show_text(tried, known, holds, launches, used),
    )


def holds_here(best: BestPlan | TriedPlan, hardware: Callable[[int], Hardware]) -> Validity:
    """Compare the hardware and software of the workload with this machine; model and data are taken as they were."""
    then = best.workload
    return _validity(best, replace(then, hardware=hardware(then.hardware.devices), software=software()))


def _hardware_here(devices: int) -> Hardware:
    """Probe this machine with `devices` devices, or with all where there are fewer."""
    try:
        return probe_hardware(devices)
    except HardwareError:
        return probe_hardware()


def _validity(best: BestPlan | TriedPlan, now: Workload) -> Validity:
    return validity(best.workload, now, imported_from=best.imported_from)


def outline_of(path: Path) -> "tuple[Job, Outline]":
    """Load the job and probe its model and hardware."""
    from autotune.job_file import load_job
    from autotune.workload import look_at

    job = load_job(path)
    return job, look_at(job)


def workload_of(options: Options, job: "Job", outline: "Outline") -> Workload:
    """Read the data of the job, without taking its devices or opening a database."""
    import tempfile

    from autotune.workload import read_data

    with tempfile.TemporaryDirectory() as folder, reading_progress(options) as progress:
        return read_data(job, outline, Path(folder), progress, cache=lengths_folder()).workload


def _uses(store: Store) -> dict[str, tuple[str, ...]]:
    """Return the processes that train now, by plan id."""
    agents = store.agents()
    found: dict[str, tuple[str, ...]] = {}
    for launch in store.running_launches():
        if (agent := living(launch, agents)) is not None:
            found[launch.plan_id] = (*found.get(launch.plan_id, ()), place(agent))
    return found


def living(launch: LaunchRecord, agents: Mapping[str, AgentRecord]) -> AgentRecord | None:
    """Return the agent that runs the launch, or None if it is known to have ended."""
    agent = agents.get(launch.agent_id or "")
    return None if agent is None or has_died(agent) else agent


def place(agent: AgentRecord) -> str:
    """Describe the process of an agent, and since when it sent no heartbeat."""
    where = f"process {agent.process.partition(' ')[0]} on {agent.machine.partition(' ')[0]}"
    silence = silent_minutes(agent)
    return f"{where}, silent for {silence} min" if silence else where


def silent_minutes(agent: AgentRecord) -> int:
    """Return the minutes since the last heartbeat; 0 for a process that is seen to run on this host."""
    return 0 if lives(agent) else int((agent.silent_seconds or 0) // 60)


def _document(known: Known) -> dict[str, Any]:
    return {
        **study_report.best_document(known.best),
        **_state(known.validity, known.used_by),
        "distance": known.distance,
        "differences": None if known.differences is None else [wire.to_document(one) for one in known.differences],
    }


def _state(holds: Validity, used_by: Sequence[str]) -> dict[str, Any]:
    return {"validity": wire.to_document(holds), "used_by": list(used_by)}
