"""The command `pack`, which needs only data."""

from collections.abc import Sequence
from pathlib import Path

from autotune.cli.context import Options
from autotune.errors import PackError
from autotune.events import Phase, PhaseBegan
from autotune.job_file import JobFile
from autotune.packing.balance import balanced
from autotune.packing.material import JOBS, PackOptions, read_material
from autotune.packing.packing_report import pack_document, pack_text
from autotune.packing.packs_file import check_pack_file, write_packs
from autotune.report.charts.balance import balance
from autotune.report.picture import check_picture, write_picture
from trials.units import number_of


def pack_data(options: Options, file: JobFile, wanted: PackOptions, *, out: Path | None, picture: Path | None) -> None:
    if out:
        check_pack_file(out)
    if picture:
        check_picture(picture)
    options.display(PhaseBegan(phase=Phase.LENGTHS, text=f"Reading {file.path}"))
    material = read_material(file, wanted, options.display)
    text = f"{number_of(len(material.index), 'sample')} of {number_of(material.found.records, 'record')}; packing"
    options.display(PhaseBegan(phase=Phase.PACKING, text=text))
    found = balanced(material, wanted)
    if out:
        write_packs(out, found.after.epoch)
    if picture:
        write_picture(picture, balance(found))
    written = {"packs": out and str(out), "plot": picture and str(picture)}
    lines = "\n".join(f"Wrote the {name} to {file}" for name, file in written.items() if file)
    options.give(
        lambda: {**pack_document(found), "files": written}, lambda: "\n\n".join(filter(None, (pack_text(found), lines)))
    )


def compare_data(options: Options, file: JobFile, several: Sequence[str]) -> None:
    # These import torch, which packing a file of lengths does not need.
    from autotune.forecast.model_settings import checked_settings
    from autotune.forecast.what_if import what_if
    from autotune.forecast.what_if_report import what_if_document, what_if_text

    if file.path.suffix not in JOBS:
        raise PackError(f"{file.path}: --what-if sets a model otherwise, which lengths have none of; give a job file")
    settings = [checked_settings(each) for each in several]
    job = file.job
    url = options.database_url(job.database)
    found = what_if(job, file.path, settings, database_url=url, listener=options.display)
    options.give(lambda: what_if_document(found), lambda: what_if_text(found))
