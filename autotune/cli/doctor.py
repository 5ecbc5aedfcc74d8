"""The command `doctor`: hardware, software, database, and problems that a search would meet."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autotune.cli.context import Options, warnings_kept
from autotune.errors import HardwareError
from autotune.events import Note
from autotune.folders import database_is_there, database_name, spool_folder, work_folder
from autotune.machine import device_problems
from autotune.machine.device_problems import Finding, memory_limit, situation
from autotune.machine.hardware import probe_hardware, software
from autotune.results.text_table import table
from autotune.work_problems import database_findings, folder_findings, spool_findings
from storage.errors import StorageError
from storage.reading import read_store
from trials import wire
from trials.model.refusals.compiling import INSTALL, missing_tool
from trials.units import duration_text, number_of, size_setting
from trials.workload import Hardware, Part

if TYPE_CHECKING:
    from autotune.advice.least_memory import LeastMemory
    from autotune.job_file import JobFile
    from autotune.workload import Survey
    from trials.job import Job

_Part = dict[str, Any] | None


def examine(options: Options, file: "JobFile | None") -> None:
    """Report everything, then raise the error that kept the database from being read, if any."""
    with warnings_kept() as warnings:
        _examine(options, file, warnings)


def _examine(options: Options, file: "JobFile | None", warnings: Sequence[str]) -> None:
    job = outline = found = None
    if file:
        job = file.job
        from autotune.workload import look_at, survey

        outline = look_at(job)
    hardware = outline.hardware if outline else probe_hardware()
    url = options.database_url(job.database if job else None)
    groups, folder = job.search.parallel if job else 1, work_folder(url)
    wanted = job.hardware.memory_limit if job else None
    findings = [
        *device_problems.findings(situation(hardware, groups, wanted)),
        *spool_findings(spool_folder(folder)),
        *folder_findings(folder),
    ]
    if job and outline:
        found = survey(job, outline, options.display)
    memory = _memory(hardware, groups, wanted)
    database, problem, costs = None, None, None
    try:
        with read_store(url) as store:
            if found:
                from autotune.prediction.fit.profiled_sizes import beyond_profile
                from autotune.search.execution.profiling import stored_costs

                costs = stored_costs(found.workload, store)
                if why := costs and beyond_profile(costs.sizes, found.workload.data, found.workload.model):
                    options.display(Note(text=f"What is known of the layers is uncertain: {why}"))
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
            findings += database_findings(store, spool_folder(folder))
    except StorageError as error:
        problem = error
    if job and job.training.compile and (missing := missing_tool(hardware.accelerator)):
        findings.append(Finding(what=f"training.compile needs {missing}", remedy=INSTALL))
    data = model = least = videos = None
    if job and outline and found:
        from autotune.advice.least_memory import LeastMemory
        from autotune.data_problems import data_findings
        from autotune.model_shape import count_of_job
        from autotune.search.traps import tried_traps
        from trials.model.inputs.encoders import video_limits

        data, videos = _data(found), video_limits(outline.encoder)
        model = count_of_job(job.model, job.training).parts
        least = LeastMemory.of(job, found, costs)
        findings += [
            *data_findings(found.report, outline.encoder),
            *outline.findings,
            *(least.findings(memory["limit_bytes"] if memory else None) if least else ()),
            *tried_traps(job, found.workload, costs, runs=not any(each.prevents for each in findings)),
        ]
    document = {
        "hardware": wire.to_document(hardware),
        "memory": memory,
        "software": wire.to_document(software()),
        "database": database,
        "data": data,
        "videos": asdict(videos) if videos else None,
        "parameters": model,
        "least_memory": asdict(least) if least else None,
        "warnings": list(warnings),
        "findings": [{"what": finding.what, "remedy": finding.remedy} for finding in findings],
    }
    options.give(
        lambda: document,
        lambda: _text(
            _hardware_text(hardware, memory),
            database,
            [
                *(_job_lines(job, found, data, model, least) if job and found and data and model else ()),
                *([f"Videos    {videos}"] if videos else ()),
            ],
            findings,
            warned=bool(warnings),
        ),
    )
    if problem:
        raise problem


def _data(found: "Survey") -> dict[str, Any]:
    from trials.data.index import median_text_tokens  # numpy

    lengths, report = found.workload.data, found.report
    return {
        "samples": lengths.samples,
        "text_only_samples": lengths.text_only_samples,
        "skipped_lines": report.bad,
        "unused": [str(each) for each in report.unused],
        "metadata": report.metadata,
        "model": found.workload.model.name,
        "lengths": {
            "mean_text_tokens": lengths.text_tokens / lengths.samples,
            "half_have_at_most": median_text_tokens(found.index),
            "most_text_tokens": lengths.longest_text_tokens,
            "mean_vision_units": lengths.vision_units / lengths.samples,
            "most_vision_units": lengths.most_vision_units,
            "target_share": lengths.target_share,
        },
    }


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
    job: "Job", found: "Survey", data: dict[str, Any], model: Mapping[Part, int], least: "LeastMemory | None"
) -> list[str]:
    lengths, shape, search = data["lengths"], found.workload.model, job.search
    origin = found.report.origin(found.index)
    parts = ", ".join(f"{part} {count:,}" for part, count in model.items())
    layers = f"{shape.vision_layers} + {shape.language_layers}" if shape.vision_layers else f"{shape.language_layers}"
    units = f"; vision units {lengths['mean_vision_units']:.1f} (at most {lengths['most_vision_units']})"
    needed = least or "the memory that a rank needs at least is known once `autotune profile JOB` has run"
    lines = [
        f"Model     {shape.name} ({shape.family}, {shape.dtype}): parameters of {parts}; {layers} layers; {needed}",
        f"Data      {number_of(data['samples'], 'sample')}{origin}, {data['text_only_samples']} of them without images",
        f"Lengths   text tokens {lengths['mean_text_tokens']:.0f} on average, half of the samples at most "
        f"{lengths['half_have_at_most']}, the longest {lengths['most_text_tokens']}"
        f"{units if lengths['most_vision_units'] else ''}; {100 * lengths['target_share']:.3g}% of the tokens are "
        "targets",
        f"Search    `autotune tune JOB` runs at most {number_of(search.trials, 'trial')} in "
        f"{duration_text(search.time_limit)}; profile and certificate come on top, and repeats for which no time is "
        "left",
    ]
    if data["metadata"]:
        lines.append(f"Unused    {data['metadata']}")
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
