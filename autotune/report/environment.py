"""What a study ran on and with, as tables."""

from collections.abc import Iterator, Mapping

from autotune.report.charts.chart import Table
from autotune.report.charts.quantities import bytes_text
from autotune.report.source import StudySource
from trials import wire


def environment(source: StudySource) -> Iterator[Table]:
    """Yield tables of the hardware, the software, the model, the data and the search."""
    work = source.workload
    yield _table("Hardware", _document(work.hardware))
    yield _table("Software", _document(work.software))
    yield _table("Model", _document(work.model))
    data = {name: value for name, value in _document(work.data).items() if name != "histogram"}
    limits = {
        "oversize": work.oversize,
        "global_batch_samples": work.global_batch_samples,
        "memory_limit_bytes": work.memory_limit_bytes,
        "workload": work.fingerprint,
    }
    yield _table("Data and training", {**data, **limits})
    study = source.study
    times = {
        "study": study.name,
        "id": study.id,
        "started": f"{study.started:%Y-%m-%d %H:%M:%S} UTC",
        "finished": "not finished" if study.finished is None else f"{study.finished:%Y-%m-%d %H:%M:%S} UTC",
        "seed": study.seed,
        "imported from": study.imported_from,
        "archived": study.archived and f"{study.archived:%Y-%m-%d %H:%M} UTC",
        "tags": ", ".join(source.annotation.tags),
        "note": source.annotation.note,
    }
    yield _table("Study", times)


def _table(caption: str, values: Mapping[str, object]) -> Table:
    known = {name: value for name, value in values.items() if value not in (None, "")}
    rows = tuple((name.removesuffix("_bytes").replace("_", " "), _text(name, value)) for name, value in known.items())
    return Table(caption=caption, header=("", ""), rows=rows)


def _text(name: str, value: object) -> str:
    if name.endswith("_bytes") and isinstance(value, int):
        return bytes_text(value)
    if isinstance(value, float):
        return f"{value:,.6g}"
    # A seed is copied into a job file, where separators of thousands would be wrong.
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and name != "seed" else str(value)


def _document(value: object) -> Mapping[str, object]:
    document: Mapping[str, object] = wire.to_document(value)
    return document
