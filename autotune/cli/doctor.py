"""The command that reports on everything a search depends on."""

import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune import study_report
from autotune.cli.context import Options
from autotune.cli.progress import reading_progress
from autotune.cli.query import living, place, silent_minutes
from autotune.folders import lengths_folder, spool_folder, work_folder
from autotune.machine.agent import has_died
from autotune.machine.hardware import probe_hardware, software
from storage.errors import StorageError
from storage.spool import Spool
from storage.store import Store, open_store
from trials import wire
from trials.workload import Hardware

if TYPE_CHECKING:
    from trials.job import Job

_Part = dict[str, Any] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that needs care."""

    what: str
    remedy: str


def examine(options: Options, path: Path | None) -> None:
    """Raises, after the report on all else, what keeps the database from being looked at."""
    job = _job(path) if path else None
    hardware = probe_hardware(job.hardware.devices if job else None)
    url = options.database_url(job.database if job else None)
    database, findings, problem = None, list(_of_spool(spool_folder(work_folder(url)))), None
    try:
        with open_store(url) as store:
            database = {"name": store.masked_url, "revision": store.revision, **_contents(store)}
            findings += _of_rows(store)
    except StorageError as error:
        problem = error
    data = _data(options, job) if job else None
    document = {
        "hardware": wire.to_document(hardware),
        "software": wire.to_document(software()),
        "database": database,
        "data": data,
        "findings": [asdict(finding) for finding in findings],
    }
    options.give(document, lambda: _text(hardware, database, data, findings))
    if problem:
        raise problem


def _contents(store: Store) -> dict[str, int]:
    studies, best = store.studies(), store.best_plans()
    return {
        "studies": len(studies),
        "unfinished_studies": sum(study.finished is None for study in studies),
        "imported_studies": sum(study.imported_from is not None for study in studies),
        "best_plans": len(best),
        "agents": len(store.agents()),
    }


def _of_rows(store: Store) -> Iterator[Finding]:
    agents = store.agents()
    for agent in agents.values():
        if has_died(agent):
            yield Finding(what=f"{place(agent)} died without a word", remedy="none: its next search takes its place")
        elif silent_minutes(agent):
            yield Finding(
                what=f"{place(agent)}: nobody knows whether it lives",
                remedy="look there; where it is gone, `autotune tune` or `launch` with its job takes its place",
            )
    for trial in store.running_trials():
        owner = agents.get(trial.agent_id or "")
        if owner is None or has_died(owner):
            study = store.study(trial.study_id)
            yield Finding(
                what=f"trial {trial.number} of {study.name} runs since {trial.started:%Y-%m-%d %H:%M} UTC for nobody",
                remedy="`autotune tune` with its job gives it up and goes on",
            )
    for launch in store.running_launches():
        if living(launch, agents) is None:
            yield Finding(
                what=f"the training with {launch.plan_id} of {launch.started:%Y-%m-%d %H:%M} UTC never told its end",
                remedy="`autotune launch` with its job goes on from its last checkpoint",
            )


def _of_spool(folder: Path) -> Iterator[Finding]:
    if not folder.exists():
        return
    if waiting := len(Spool(folder).pending()):
        yield Finding(
            what=f"{waiting} results in {folder} wait for the database",
            remedy="the next search or training stores them",
        )
    if aside := len(list(folder.glob("*.bad"))):
        yield Finding(
            what=f"{aside} files in {folder} could not be stored", remedy="look at them, then delete them: *.bad"
        )
    if left := len(list(folder.glob(".*.partial"))):
        yield Finding(
            what=f"{left} results in {folder} were cut off by a kill or a full disk", remedy="delete them: .*.partial"
        )


def _job(path: Path) -> "Job":
    from autotune.job_file import load_job

    return load_job(path)


def _data(options: Options, job: "Job") -> dict[str, Any]:
    from autotune.workload import look_at, read_data

    with tempfile.TemporaryDirectory() as folder, reading_progress(options) as progress:
        work = read_data(job, look_at(job), Path(folder), progress, cache=lengths_folder()).workload
    return {"samples": work.data.samples, "text_only_samples": work.data.text_only_samples, "model": work.model.name}


def _text(hardware: Hardware, database: _Part, data: _Part, findings: list[Finding]) -> str:
    versions = software()
    link = f", {hardware.link} between them" if hardware.link else ""
    lines = [
        f"Hardware  {hardware.devices} x {hardware.device_name}{link}; {hardware.cpu_cores} cores",
        f"Software  python {versions.python}, torch {versions.torch}, deepspeed {versions.deepspeed}, "
        f"transformers {versions.transformers}",
    ]
    if database:
        lines.append(
            f"Database  {database['name']}, tables of revision {database['revision']}: {database['studies']} studies "
            f"({database['unfinished_studies']} unfinished, {database['imported_studies']} imported), "
            f"{database['best_plans']} best plans"
        )
    if data:
        lines.append(
            f"Data      {data['samples']} samples, {data['text_only_samples']} of them without images, for "
            f"{data['model']}"
        )
    if not findings:
        return "\n".join((*lines, "", "Nothing needs care.") if database else lines)
    rows = [(finding.what, finding.remedy) for finding in findings]
    return "\n".join((*lines, "", study_report.table(("needs care", "remedy"), rows)))
