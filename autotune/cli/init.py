"""The command `init`, which writes a job file."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.draft.arguments import read_arguments
from autotune.draft.draft import Draft
from autotune.draft.settings import absent_files, draft_of
from autotune.draft.template import job_text
from autotune.errors import JobError
from autotune.job_file import job_of_text
from autotune.machine.hardware import probe_hardware
from trials.whole_file import whole_file


def write_job(
    options: Options, model: str | None, data: tuple[Path, ...], *, trainer: Path | None, devices: int | None, out: Path
) -> None:
    """Write the job file if it can be loaded, and print what the user should know."""
    if out.exists():
        raise JobError(f"{out} exists and is not overwritten; name another file with --out")
    arguments = read_arguments(trainer) if trainer else None
    devices = devices or (arguments and arguments.devices) or probe_hardware().devices
    draft = draft_of(arguments, devices) if arguments else Draft(values={"hardware.devices": devices})
    if model is not None:
        draft.values["model.path"] = _model(model, out)
    if data:
        for missing in (path for path in data if not path.exists()):
            raise JobError(f"{missing}: no such file or folder; give annotation files")
        if images := {source["images"] for source in draft.values.get("data.sources", ()) if "images" in source}:
            draft.notes.append(f"For DATA, the image folder {', '.join(images)} of {trainer} is left out")
        draft.values["data.sources"] = [{"path": _relative(path, out)} for path in data]
    for key, what in (("model.path", "MODEL"), ("data.sources", "DATA")):
        if key not in draft.values:
            where = f"{trainer} does not name it" if trainer else "or give a configuration with --from"
            raise JobError(f"{what} is missing; give `autotune init MODEL DATA`; {where}")
    draft.notes += absent_files(draft.values, out.absolute().parent)
    text = job_text(draft).encode()
    try:
        job_of_text(text, out.absolute().parent)
    except JobError as error:
        raise JobError(f"{out} is not written: {error}") from error
    with whole_file(out) as stream:
        stream.write(text)
    notes = "".join(f"\n- {note}" for note in draft.notes)
    options.give(
        lambda: {"job": str(out), "notes": draft.notes},
        lambda: f"Wrote {out}; `autotune doctor {out}` checks the model and the data{notes}",
    )


def _model(model: str, out: Path) -> str:
    """Return `model.path` of the job. Raise JobError for what is neither a folder nor a hub id."""
    if Path(model).is_dir():
        return _relative(Path(model), out)
    # A mistyped path such as models/intern must not be taken for a hub id.
    if model.count("/") != 1 or model.startswith((".", "/")) or Path(model).parent.is_dir():
        raise JobError(f"{model}: no such folder; give a local folder or a hub id such as org/name")
    return model


def _relative(path: Path, out: Path) -> str:
    """Return the path as the job file names it: relative to its folder where it is inside."""
    folder, absolute = out.absolute().parent, path.absolute()
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)
