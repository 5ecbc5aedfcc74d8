"""Progress of reading a dataset, on stderr: a bar at a terminal, else a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autotune.cli.context import Options

if TYPE_CHECKING:
    from rich.progress import Progress

    from trials.data.indexing import Reading

_EVERY_SECONDS = 10.0


@contextmanager
def reading_progress(options: Options) -> "Iterator[Callable[[Reading], None]]":
    """Provide the callback for `build_index`. Nothing is shown before its first call, or with `-q`."""
    if options.quiet or not sys.stderr.isatty():
        yield _lines(options)
        return
    bar = _bar()
    task = bar.add_task("Reading the data", total=None, records=0, rate=0.0)
    begun = time.monotonic()

    def show(reading: "Reading") -> None:
        bar.start()
        rate = reading.records / max(time.monotonic() - begun, 1e-3)
        done = reading.share if reading.share is not None else 0.0
        total = None if reading.share is None else 1.0
        bar.update(task, completed=done, total=total, records=reading.records, rate=rate)

    try:
        yield show
    finally:
        bar.stop()


def _bar() -> "Progress":
    # Slow to load, and needed only at a terminal.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[records]:,} records, {task.fields[rate]:,.0f}/s"),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,  # stdout is for results
    )


def _lines(options: Options) -> "Callable[[Reading], None]":
    begun = shown = time.monotonic()

    def show(reading: "Reading") -> None:
        nonlocal shown
        now = time.monotonic()
        if now - shown < _EVERY_SECONDS:
            return
        shown = now
        share = "" if reading.share is None else f", {reading.share:.0%}"
        options.tell(f"  {reading.records} records read, {reading.records / (now - begun):.0f}/s{share}")

    return show
