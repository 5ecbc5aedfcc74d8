"""The command `report`."""

from pathlib import Path

from autotune.cli.context import Options
from autotune.cli.visible import visible
from autotune.report.source import find_study, read_source
from autotune.report.writing import check_report, write_report
from storage.reading import read_store

_DIGITS = 8


def report_study(options: Options, name: str | None, out: Path | None, artifacts: Path | None) -> None:
    # At once where it is given; the usual name is known only with the study.
    if out is not None:
        check_report(out)
    with read_store(options.database_url()) as store:
        study = find_study(store, name)
        path = out or Path(f"report-{study.id[:_DIGITS]}.html")
        check_report(path)
        if artifacts is not None:
            artifacts.mkdir(parents=True, exist_ok=True)
        from autotune.report.page import start_bundle  # an extra

        script = start_bundle()
        options.display.show(f"Writing the report of {study.name}")
        source = read_source(store, study)
        database = None if options.database is None else store.masked_url
        missing = write_report(source, path, script, visible, database)
        artifact = None
        if artifacts is not None:
            from autotune.search.sampling.proposals import attach  # it takes a second to import

            artifact = attach(store.optuna_url, store.exclusive(), study.name, path, artifacts)
    size = path.stat().st_size
    document = {
        "study": study.name,
        "id": study.id,
        "file": str(path),
        "bytes": size,
        "artifact": artifact,
        "not_shown": list(missing),
    }
    options.give(lambda: document, lambda: f"Wrote the report of {study.name} to {path} ({size / 1e6:.1f} MB)")
