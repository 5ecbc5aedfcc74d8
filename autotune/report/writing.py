"""Writes the report of a study into a file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.output_file import check_library, check_output_file, whole
from autotune.report.sections import sections
from autotune.report.sides import sides
from autotune.report.simulation import Simulator
from autotune.report.source import StudySource
from autotune.report.summary import cards, changes, headline, notes

if TYPE_CHECKING:
    from concurrent.futures import Future

# In the first lines of the template, before the scripts of nearly a MB.
_MARK = b'<meta name="generator" content="autotune report">'
_LIBRARIES = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python"}


def check_report(path: Path) -> None:
    """Check, before any work is done, that a report can be written to this file. Raise PackError."""
    check_output_file(path, (".html",), _MARK)
    for module, package in _LIBRARIES.items():
        check_library("a report", module, package)


def write_report(
    source: StudySource, path: Path, script: "Future[str]", shown: Callable[[str], str], database: str | None
) -> tuple[str, ...]:
    """Write the report, and return what it could not show, in words. Raise PackError where the file cannot be written.

    `script` comes from `page.start_bundle`, `shown` makes control characters visible, and `database` is the URL that
    commands have to name.
    """
    from autotune.report.page import render  # noqa: PLC0415 - an extra

    found = sides(source, Simulator(source))
    parts = sections(source, found, database)
    work = source.workload
    values = {
        "study": {
            "name": source.study.name,
            "what": f"{work.model.name} ({work.model.family}, {work.model.dtype}) on {work.hardware}, "
            f"{work.data.samples:,} samples an epoch, global batch {work.global_batch_samples}",
        },
        "headline": headline(source, found),
        "notes": notes(source),
        "cards": list(cards(source, found)),
        "changes": changes(found) if found else None,
        "sections": parts,
    }
    page = render(values, script.result(), shown)
    with whole(path) as partial:
        partial.write_text(page, encoding="utf-8", errors="replace")
    return tuple(dict.fromkeys(note for part in parts for note in part.notes))
