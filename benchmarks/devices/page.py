"""The page docs/benchmarks/gpu.md, from the rows of a run on real devices."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autotune.machine.hardware import software
from benchmarks.devices.target import Target
from benchmarks.output.result import Check
from trials.whole_file import whole_file

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks" / "gpu.md"


def write(target: Target, rows: Sequence[Mapping[str, Any]], checks: Sequence[Check], path: Path = PAGE) -> None:
    """Replace the page. Raise ValueError for a pretended device, whose numbers say nothing."""
    if target.pretended:
        raise ValueError("the numbers of a pretended device are not written into the documentation")
    with whole_file(path) as file:
        file.write(("\n".join(_lines(target, rows, checks)) + "\n").encode())


def _lines(target: Target, rows: Sequence[Mapping[str, Any]], checks: Sequence[Check]) -> Iterator[str]:
    used = software()
    yield f"# GPU: {target.name}"
    yield ""
    yield (
        f"Written by `make bench-gpu` on {target.devices} x {target.name}, with torch {used.torch}, DeepSpeed "
        f"{used.deepspeed} and transformers {used.transformers}. `benchmarks/gpu.py` says what is measured."
    )
    yield ""
    yield "| bar | value | at | holds |"
    yield "|---|---|---|---|"
    for check in checks:
        value = "none" if check.value is None else f"{check.value:.4g}"
        yield f"| {check.name} | {value} | {check.bar:.4g} | {'yes' if check.holds else 'no'} |"
    for part in dict.fromkeys(row["part"] for row in rows):
        yield from ("", f"## {str(part).capitalize()}", "", "```json")
        yield from (json.dumps({key: row[key] for key in row if key != "part"}) for row in rows if row["part"] == part)
        yield "```"
