"""The command `doctor`: hardware, software, database, and problems that a search would meet."""

import logging
import os
import sys
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.cli.agents import living, place, silent_minutes
from autotune.cli.context import Options
from autotune.cli.jobs import outline_of, survey
from autotune.errors import HardwareError
from autotune.folders import database_is_there, database_name, spool_folder, work_folder
from autotune.machine import device_problems
from autotune.machine.agent import has_died
from autotune.machine.device_problems import Finding, memory_limit, situation
from autotune.machine.hardware import default_workers, probe_hardware, software
from autotune.results.text_table import table
from autotune.search.compile_setting import AUTO, MARGIN, CompileSetting, setting_of, settled_workload, steps_of
from autotune.search.study_settings import MODEL
from storage.errors import StorageError
from storage.reading import read_store
from storage.spool import Spool
from storage.store import Store
from trials import wire
from trials.machine.shared_memory import shared_memory_bytes
from trials.model.refusals.compiling import INSTALL, missing_tool
from trials.units import duration_text, number_of, size_setting
from trials.workload import DataProfile, Hardware, Part, Workload

if TYPE_CHECKING:
    from autotune.job_file import JobFile
    from trials.costs.layer_costs import LayerCosts
    from trials.data.indexing import IndexReport
    from trials.job import Job

_Part = dict[str, Any] | None
_OWN = ("autotune", "storage", "trials")
_SHOWN_KINDS = 5
"""Kinds of unused things that have a row each."""
_MUCH_BYTES = 1 << 30
"""Size of the work folder from which it is worth a look."""


class _Warnings(logging.Handler):
    """Handler that keeps the warnings of this project, which are problems too."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] in _OWN:
            self.texts.append(record.getMessage())


def examine(options: Options, file: "JobFile | None") -> None:
    """Report everything, then raise the error that kept the database from being read, if any."""
    warnings = _Warnings()
    logging.getLogger().addHandler(warnings)
    try:
        _examine(options, file, warnings.texts)
    finally:
        logging.getLogger().removeHandler(warnings)


def _examine(options: Options, file: "JobFile | None", warnings: Sequence[str]) -> None:
    job, outline = outline_of(file) if file else (None, None)
    hardware = outline.hardware if outline else probe_hardware()
    url = options.database_url(job.database if job else None)
    groups, folder = job.search.parallel if job else 1, work_folder(url)
    wanted = job.hardware.memory_limit if job else None
    findings = [
        *device_problems.findings(situation(hardware, groups, wanted)),
        *_spool_findings(spool_folder(folder)),
        *_work_findings(folder),
    ]
    work, report = survey(options, job, outline) if job and outline else (None, None)
    database, problem, setting, costs = None, None, None, None
    try:
        with read_store(url) as store:
            if job and work and job.training.compile == AUTO:
                setting = setting_of(store, job, work)
            if job and work:
                costs = _stored_costs(store, job, work)
            studies = store.studies(archived=True)
            database = {
                "name": database_name(url),
                "revision": store.revision if database_is_there(url) else None,
                "studies": len(studies),
                "unfinished_studies": sum(study.finished is None for study in studies),
                "imported_studies": sum(study.imported_from is not None for study in studies),
                "archived_studies": sum(study.archived is not None for study in studies),
                "best_plans": store.count_best_plans(),
                "agents": len(store.agents()),
            }
            findings += _database_findings(store)
    except StorageError as error:
        problem = error
    compiles = job is not None and (job.training.compiles or (setting is not None and setting.compiled))
    if compiles and (missing := missing_tool(hardware.accelerator)):
        findings.append(Finding(what=f"training.compile needs {missing}", remedy=INSTALL))
    data = model = compiling = None
    if job and outline and work and report:
        from trials.model.shape import parameters_of_parts

        data, model = _data(work, report), parameters_of_parts(job.model)
        findings += [
            *_data_findings(report),
            *outline.findings,
            *_trap_findings(job, work, costs, runs=not any(each.prevents for each in findings)),
        ]
        if job.training.compile == AUTO:
            compiling = _compiling(job, work, setting)
    memory = _memory(hardware, groups, wanted)
    document = {
        "hardware": wire.to_document(hardware),
        "memory": memory,
        "software": wire.to_document(software()),
        "database": database,
        "data": data,
        "parameters": model,
        "compile": compiling,
        "warnings": list(warnings),
        "findings": [{"what": finding.what, "remedy": finding.remedy} for finding in findings],
    }
    options.give(
        lambda: document,
        lambda: _text(
            _hardware_text(hardware, memory),
            database,
            _job_lines(job, work, data, model, compiling) if job and work and data and model else [],
            findings,
            warned=bool(warnings),
        ),
    )
    if problem:
        raise problem


def _database_findings(store: Store) -> Iterator[Finding]:
    agents = store.agents()
    for agent in agents.values():
        if has_died(agent):
            yield Finding(
                what=f"{place(agent)} died without ending its work", remedy="nothing to do: the next search replaces it"
            )
        elif silent_minutes(agent):
            yield Finding(
                what=f"{place(agent)}: this host cannot check whether it still runs",
                remedy="check on that host; if it has ended, `autotune tune JOB` or `launch` with its job replaces it",
            )
    for trial in store.running_trials():
        owner = agents.get(trial.agent_id or "")
        if owner is None or has_died(owner):
            study = store.study(trial.study_id)
            model = study.settings.get(MODEL)
            of_model = "" if model is None else f" with model.path {model}"
            yield Finding(
                what=f"trial {trial.number} of {study.name}, begun {trial.started:%Y-%m-%d %H:%M} UTC, has no "
                "result, and its process is gone",
                remedy=f"`autotune tune JOB` with its job{of_model} gives up the trial and continues",
            )
    for launch in store.running_launches():
        if living(launch, agents) is None:
            yield Finding(
                what=f"the training with plan {launch.plan_id}, begun {launch.started:%Y-%m-%d %H:%M} UTC, has no "
                "recorded end, and its process is gone",
                remedy="the command that began it (`autotune launch JOB` with its `--set` options, thus with its "
                "training.output) continues from its last checkpoint",
            )


def _spool_findings(folder: Path) -> Iterator[Finding]:
    if not folder.exists():
        return
    if waiting := len(Spool(folder).pending()):
        yield Finding(
            what=f"results in {folder} that are not in the database yet: {waiting}",
            remedy="nothing to do: the next search or training stores them",
        )
    if aside := len(list(folder.glob("*.bad"))):
        yield Finding(
            what=f"results in {folder} that the database refused: {aside}",
            remedy="inspect the *.bad files, then delete them",
        )
    if left := len(list(folder.glob(".*.partial"))):
        yield Finding(
            what=f"results in {folder} that were cut off by a kill or a full disk: {left}",
            remedy="delete the .*.partial files",
        )


def _work_findings(folder: Path) -> Iterator[Finding]:
    # No command removes them: others on the same database read them, and so do those that a dry run has printed.
    if (size := _size(folder)) > _MUCH_BYTES:
        yield Finding(
            what=f"indexes of data and files of ranks in {folder}: {size / 2**30:.1f} GiB",
            remedy="while no command of autotune runs, delete all but `spool` and `certificates` there; indexes are "
            "made again, and logs of ranks are lost",
        )


def _size(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # a process has removed it
            size += path.lstat().st_size
    return size


def _data_findings(report: "IndexReport") -> Iterator[Finding]:
    if report.bad:
        yield Finding(
            what=f"{report.bad} of {number_of(report.records, 'dataset line')} cannot be used, the first is "
            f"{report.bad_lines[0]}",
            remedy="correct the lines, or `images` and `format` of the source; otherwise they are skipped",
        )
    for each in report.surprises[:_SHOWN_KINDS]:
        yield Finding(what=f"not used by a training: {each}", remedy="nothing to do, if that is meant")
    if (more := len(report.surprises) - _SHOWN_KINDS) > 0:
        yield Finding(what=f"not used by a training: {more} more of these", remedy="autotune doctor --json lists all")


def _stored_costs(store: Store, job: "Job", work: Workload) -> "LayerCosts | None":
    from autotune.search.execution.profiling import stored_costs

    return stored_costs(settled_workload(store, job, work), store)


def _trap_findings(job: "Job", work: Workload, costs: "LayerCosts | None", *, runs: bool) -> Iterator[Finding]:
    """Yield the traps of a job, by its profile, or by layers that are tried for some seconds where a device `runs`."""
    import torch

    from autotune.search.traps import trap_findings

    with redirect_stdout(sys.stderr):  # DeepSpeed logs to stdout, which is for results
        from trials.tasks.profiling.layer_profile import quick_slow_calls

    workers = job.data.workers
    if workers is None:
        workers = default_workers(work.hardware, job.search.parallel, shared_bytes=shared_memory_bytes())
    calls = costs.slow_calls if costs else ()
    try:
        if costs is None and runs:
            calls = quick_slow_calls(job.model, job.training, torch.device(work.hardware.accelerator))
    except torch.OutOfMemoryError:
        yield Finding(
            what="the device has no room for one layer of each kind, so no convolution or attention was tried",
            remedy="end what holds its memory, or profile the layers with `autotune profile JOB`",
        )
    yield from trap_findings(work, calls, costs, workers, os.environ)


def _data(work: Workload, report: "IndexReport") -> dict[str, Any]:
    return {
        "samples": work.data.samples,
        "text_only_samples": work.data.text_only_samples,
        "skipped_lines": report.bad,
        "unused": [str(each) for each in report.unused],
        "metadata": report.metadata,
        "model": work.model.name,
        "lengths": _lengths(work.data),
    }


def _lengths(data: DataProfile) -> dict[str, float]:
    """Return the lengths of samples. The histogram of the profile has text tokens in steps of 64, rounded up."""
    by_tokens = sorted((tokens, samples) for _, tokens, samples in data.histogram)
    counts = list(accumulate(samples for _, samples in by_tokens))
    half = by_tokens[bisect_left(counts, counts[-1] / 2)][0]
    return {
        "mean_text_tokens": data.text_tokens / data.samples,
        "half_have_at_most": half,
        "most_text_tokens": data.longest_text_tokens,
        "mean_vision_units": data.vision_units / data.samples,
        "most_vision_units": data.most_vision_units,
        "target_share": data.target_share,
    }


def _compiling(job: "Job", work: Workload, setting: CompileSetting | None) -> str:
    """Return what `training.compile: auto` has decided, or how it will be."""
    if setting is not None and not setting.is_open:
        return setting.text
    if (missing := missing_tool(work.hardware.accelerator)) is not None:
        return f"training.compile: auto: compiling needs {missing}, so layers stay as they are"
    return (
        f"training.compile: auto: `autotune tune JOB` will profile the layers both ways and compile them if that is "
        f"repaid {MARGIN} times within the {steps_of(job.training, work.data.samples):,} steps of the training"
    )


def _memory(hardware: Hardware, groups: int, wanted: int | None) -> _Part:
    """Return the limit of a rank and what its device has; None where others leave nothing, which a finding says."""
    try:
        limit = memory_limit(hardware, groups, wanted)
    except HardwareError:
        return None
    is_shared = hardware.accelerator == "cpu"
    return {
        "limit_bytes": limit,
        "is_default": wanted is None,
        "device_bytes": hardware.device_memory_bytes,
        "ranks": hardware.of_node * groups if is_shared else 1,
    }


def _hardware_text(hardware: Hardware, memory: _Part) -> str:
    link = f", {hardware.link} between them" if hardware.link else ""
    text = f"Hardware  {hardware}{link}; {number_of(hardware.cpu_cores, 'core')}"
    if memory is None:
        return text
    origin = f"{memory['limit_bytes'] / 2**30:.1f} GiB (default)"
    if not memory["is_default"]:
        origin = f"{size_setting(memory['limit_bytes'])} (of the job)"
    owner = f"the machine, which {memory['ranks']} ranks share" if memory["ranks"] > 1 else "its device"
    return f"{text}\nMemory    a rank may use {origin} of the {memory['device_bytes'] / 2**30:.1f} GiB of {owner}"


def _job_lines(
    job: "Job", work: Workload, data: dict[str, Any], model: Mapping[Part, int], compiling: str | None
) -> list[str]:
    lengths, shape, search = data["lengths"], work.model, job.search
    parts = ", ".join(f"{part} {count:,}" for part, count in model.items())
    layers = f"{shape.vision_layers} + {shape.language_layers}" if shape.vision_layers else f"{shape.language_layers}"
    units = f"; vision units {lengths['mean_vision_units']:.1f} (at most {lengths['most_vision_units']})"
    lines = [
        f"Model     {shape.name} ({shape.family}, {shape.dtype}): parameters of {parts}; {layers} layers",
        f"Data      {number_of(data['samples'], 'sample')}, {data['text_only_samples']} of them without images",
        f"Lengths   text tokens {lengths['mean_text_tokens']:.0f} on average, half of the samples at most "
        f"{lengths['half_have_at_most']}, the longest {lengths['most_text_tokens']}"
        f"{units if lengths['most_vision_units'] else ''}; {lengths['target_share']:.0%} of the tokens are targets",
        f"Search    `autotune tune JOB` runs at most {number_of(search.trials, 'trial')} in "
        f"{duration_text(search.time_limit)}; profile, last repeats and certificate come on top",
    ]
    if data["metadata"]:
        lines.append(f"Unused    {data['metadata']}")
    if compiling:
        lines.append(f"Layers    {compiling}")
    return lines


def _text(hardware: str, database: _Part, of_job: Sequence[str], findings: list[Finding], *, warned: bool) -> str:
    versions = software()
    lines = [
        hardware,
        f"Software  python {versions.python}, torch {versions.torch}, deepspeed {versions.deepspeed}, "
        f"transformers {versions.transformers}",
    ]
    if database:
        studies, plans = database["studies"], database["best_plans"]
        tables = f", tables of revision {database['revision']}" if database["revision"] else ""
        lines.append(
            f"Database  {database['name']}{tables}: "
            f"{number_of(studies, 'study', 'studies')} ({database['unfinished_studies']} unfinished, "
            f"{database['imported_studies']} imported, {database['archived_studies']} archived), "
            f"{number_of(plans, 'best plan')}"
        )
    lines += of_job
    if not findings:
        found = "No problems found besides the warnings." if warned else "No problems found."
        return "\n".join((*lines, "", found) if database else lines)
    rows = [(finding.what, finding.remedy) for finding in findings]
    return "\n".join((*lines, "", table(("problem", "remedy"), rows)))
