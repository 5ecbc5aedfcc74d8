"""The command `pack`, which needs only data."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.events import Phase, PhaseBegan
from autotune.job_file import JobFile
from autotune.output_file import check_no_input
from autotune.packing.balance import balanced
from autotune.packing.material import PackOptions, read_material
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
    for target in filter(None, (out, picture)):
        check_no_input(target, (file.path, *(each.path for each in material.index.files)))
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
