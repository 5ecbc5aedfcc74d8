"""Writes the report of a study into a file."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.errors import PackError
from autotune.output_file import check_library, check_output_file, whole
from autotune.report.sections import sections
from autotune.report.sides import sides
from autotune.report.simulation import Simulator
from autotune.report.source import StudySource
from autotune.report.summary import cards, changes, headline, notes
from trials.regular_file import open_regular

if TYPE_CHECKING:
    from concurrent.futures import Future

_MARK = b'<meta name="generator" content="autotune report">'
# The mark is in the first lines of the template, before the scripts of nearly a MB.
_MARKED_BYTES = 1 << 12
_LIBRARIES = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python"}


def check_report(path: Path) -> None:
    """Check, before any work is done, that a report can be written to this file. Raise PackError.

    A file that is no report is not replaced.
    """
    check_output_file(path, (".html",))
    for module, package in _LIBRARIES.items():
        check_library("a report", module, package)
    if path.exists() and not _is_report(path):
        raise PackError(
            f"{path} is there already and is no report of autotune; remove it, or name another file by --out"
        )


def _is_report(path: Path) -> bool:
    try:
        with open_regular(path) as stream:
            return _MARK in stream.read(_MARKED_BYTES)
    except OSError as error:
        raise PackError(f"{path} cannot be replaced ({error.strerror or error}); name another file by --out") from error


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
