"""The command `init`, which writes a job file."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.cli.context import Options
from autotune.draft.arguments import Arguments, read_arguments
from autotune.draft.draft import Draft
from autotune.draft.present import Present, Unclear
from autotune.draft.settings import absent_files, draft_of
from autotune.draft.template import job_text
from autotune.errors import JobError
from autotune.events import Listener
from autotune.job_file import job_of_text
from autotune.machine.hardware import probe_hardware
from autotune.plan_text import plan_text
from trials.errors import AutotuneError, DataError, ModelError
from trials.job import Job, ModelSection, Source
from trials.model.hub import folder_of
from trials.plan import Packed, Plan
from trials.units import number_of
from trials.whole_file import whole_file
from trials.workload import Hardware

_DTYPE = ModelSection.model_fields["dtype"].default


def write_job(
    options: Options, model: str | None, data: tuple[Path, ...], *, trainer: Path | None, devices: int | None, out: Path
) -> None:
    """Write the job file if it can be loaded, and print what the user should know."""
    if out.exists():
        raise JobError(f"{out} exists and is not overwritten; name another file with --out")
    arguments = read_arguments(trainer) if trainer else None
    hardware = probe_hardware()
    devices = devices or (arguments and arguments.devices) or hardware.devices
    draft = _drafted(arguments, devices, hardware)
    if model is not None:
        draft.values["model.path"] = _model(model, out)
    if data:
        draft.notes += _unread(data)
        draft.notes += _left_out(trainer, draft.values.get("data.sources", ()))
        draft.values["data.sources"] = [{"path": _relative(path, out)} for path in data]
    for key, what in (("model.path", "MODEL"), ("data.sources", "DATA")):
        if key not in draft.values:
            where = f"{trainer} does not name it" if trainer else "or give a configuration with --from"
            raise JobError(f"{what} is missing; give `autotune init MODEL DATA`; {where}")
    folder = out.absolute().parent
    draft.notes += absent_files(draft.values, folder)
    files = _name_current_plan(draft, devices, out)
    job = _loaded(draft, out)
    if not folder.is_dir():
        raise JobError(f"{out} is not written: there is no folder {folder}; create it, or name another with --out")
    if draft.packs is not None:
        _count_samples(draft, job, draft.packs, options.display)
        _loaded(draft, out)
    text = job_text(draft).encode()
    for path, content in (files | {out: text}).items():
        with whole_file(path) as stream:
            stream.write(content)
    notes = "".join(f"\n- {note}" for note in draft.notes)
    options.give(
        lambda: {"job": str(out), "notes": draft.notes},
        lambda: f"Wrote {out}; `autotune doctor {out}` checks the model and the data{notes}",
    )


def _unread(data: Sequence[Path]) -> Iterator[str]:
    """Yield why files cannot be read, which a setting of their source may mend.

    Raise JobError for a file that is not there, and for a folder that is no source.
    """
    from trials.data import formats  # numpy

    for path in data:
        if not path.exists():
            raise JobError(f"{path}: no such file or folder; give annotation files")
        try:
            formats.resolve(Source(path=path), Path())
        except DataError as error:
            if path.is_dir():
                raise JobError(str(error)) from error
            yield str(error)


def _left_out(trainer: Path | None, sources: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield which settings of the sources of a configuration, beyond their paths, DATA does not have."""
    settings = {key: value for source in sources for key, value in source.items() if key not in ("path", "names")}
    if settings:
        written = ", ".join(f"{key}: {value}" for key, value in settings.items())
        yield f"For DATA, settings of the sources in {trainer} are left out: {written}"


def _loaded(draft: Draft, out: Path) -> Job:
    """Return the job of the draft. Raise JobError for one that cannot be loaded."""
    try:
        return job_of_text(job_text(draft).encode(), out.absolute().parent)
    except JobError as error:
        raise JobError(f"{out} is not written: {error}") from error


def _count_samples(draft: Draft, job: Job, packing: Packed, listener: Listener) -> None:
    """Convert the batch of the draft from packs to samples, by packing the data as the trainer does."""
    from autotune.draft.present_plan import samples_of_pack

    packs, key = job.training.global_batch_samples, "training.global_batch_samples"
    of_step = f"The {number_of(packs, 'pack')} of a step have {packing.qt} tokens each there"
    try:
        mean, samples = samples_of_pack(job, packing, listener)
    except AutotuneError as error:
        draft.notes.append(
            f"{of_step}, and how many samples one holds is not known here ({error}): {key} counts packs until you "
            f"multiply it by that mean, which `autotune pack JOB` shows for --qt {packing.qt}"
        )
        return
    draft.values[key] = max(1, round(packs * mean))
    draft.notes.append(
        f"{of_step}. Packs of the {number_of(samples, 'sample')} hold {mean:.1f} on average, so {key} is "
        f"{draft.values[key]}"
    )


def _drafted(arguments: Arguments | None, devices: int, hardware: Hardware) -> Draft:
    """Return a draft with the settings of another trainer, if any."""
    draft = draft_of(arguments, devices) if arguments else Draft(values={"hardware.devices": devices})
    if hardware.accelerator != "cpu":
        return draft
    if arguments and draft.values.get("model.dtype", _DTYPE) == "bfloat16":
        draft.notes.append(
            "No GPU was found here, and bfloat16 is slow without one: to tune here, set model.dtype to float32"
        )
    if not arguments:
        draft.values["model.dtype"] = "float32"
        draft.notes.append(
            "No GPU was found here, so model.dtype is float32; set it to bfloat16 for a training on GPUs"
        )
    return draft


def _name_current_plan(draft: Draft, devices: int, out: Path) -> dict[Path, bytes]:
    """Name the plan of the present settings in the draft, or why there is none; return its file with its content."""
    if draft.present is None:
        return {}
    found = _plan_of(draft.present, draft.values, devices, out.absolute().parent)
    if isinstance(found, Unclear):
        draft.notes.append(
            f"The search does not compare with your present settings: {'; '.join(found.reasons)}. If a plan is like "
            "them, name its file as search.current_plan"
        )
        return {}
    plan, remarks = found
    file = out.with_name(f"{out.stem}-current-plan.json")
    if file.exists():
        raise JobError(f"{file} exists and is not overwritten; remove it, or name another job file with --out")
    draft.values["search.current_plan"] = file.name
    written = "; ".join(
        (f"The search compares with your present settings, in {file.name}: {plan_text(plan)}", *remarks)
    )
    draft.notes.append(written)
    return {file: f"{json.dumps(json.loads(plan.document), indent=2)}\n".encode()}


def _plan_of(
    present: Present | Unclear, values: Mapping[str, Any], devices: int, folder: Path
) -> tuple[Plan, tuple[str, ...]] | Unclear:
    """Return the plan of the settings with remarks on it, or why there is none; `folder` is that of the job."""
    if isinstance(present, Unclear):
        return present
    model = folder / folder_of(values["model.path"])
    if not model.is_dir():
        return Unclear(reasons=("without the folder of the model its layers are not known",))
    from autotune.draft.present_plan import plan_of  # imports torch

    try:
        return plan_of(present, str(model), values.get("model.dtype", _DTYPE), devices)
    except ModelError as error:
        return Unclear(reasons=(str(error),))


def _model(model: str, out: Path) -> str:
    """Return `model.path` of the job. Raise JobError for what is neither a folder nor a hub id."""
    if Path(model).is_dir():
        return _relative(Path(model), out)
    # A mistyped path such as models/intern must not be taken for a hub id.
    if model.count("/") != 1 or model.startswith((".", "/")) or Path(model).parent.is_dir():
        order = ", and the model before the data" if Path(model).is_file() else ""
        raise JobError(f"{model}: no such folder; give a local folder or a hub id such as org/name{order}")
    return model


def _relative(path: Path, out: Path) -> str:
    """Return the path as the job file names it: relative to its folder where it is inside."""
    folder, absolute = out.absolute().parent, path.absolute()
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)
