"""What people see while a command works. Prints one JSON object.

    python -m benchmarks.people [--part silence captures lookups] [--pictures FOLDER]

`silence` runs the commands of `make demo` without a terminal, and measures the longest time without output. `captures`
runs a shorter search and training at terminals of three widths, and draws a picture of each into the folder. `lookups`
measures the CPU time of commands that read a SQLite database of 100 plans, half of them measured on this machine.
"""

import argparse
import os
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console
from rich.text import Text

from autotune.machine.hardware import probe_hardware, software
from benchmarks.output.recording import Recording, record
from benchmarks.output.result import Check, at_most, finish
from storage.store import Store, open_store
from tests.values.storage import WORKLOAD, best_of, concluded, packed_plan, result_of

Row: TypeAlias = Mapping[str, Any]
EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny-internvl"
MOST_SILENT_SECONDS = 5.0
WIDTHS = (120, 80, 40)
PLANS, RUNS = 100, 5
LOOKUPS = ("plans", "plans --here", f"show {packed_plan(1).id}", "studies", "db check", "doctor")
MOST_CPU_SECONDS = 0.5
SHORT = (
    "--set search.trials=5 --set search.time_limit=1min --set search.warmup_steps=0 "
    "--set training.global_batch_samples=4 --set training.max_steps=20"
)
MOMENTS = {"search": r"[3-5] of at most 5 trials, trial \d.*best", "training": r"step 1\d of 20"}
"""Texts of the screens that are drawn."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--pictures", type=Path, help="Folder for the pictures.")
    arguments = parser.parse_args()
    rows: list[Row] = []
    checks: list[Check] = []
    for part in arguments.part:
        found, check = PARTS[part](arguments.pictures)
        rows += found
        checks.append(check)
    finish(rows, checks)


def silence(_: Path | None) -> tuple[list[Row], Check]:
    with _user() as folder:
        row = _row("make demo", _run(folder, None, "generate.py && {autotune} run job.yaml"))
    return [row], _check("longest silence of `make demo`, seconds", [row])


def captures(pictures: Path | None) -> tuple[list[Row], Check]:
    rows = []
    for columns in WIDTHS:
        with _user() as folder:
            _run(folder, None, "generate.py")
            done = _run(folder, columns, f"-m autotune run job.yaml {SHORT}")
        rows.append(_row("run", done))
        for name, moment in MOMENTS.items():
            shown = [lines for lines in done.screens() if re.search(moment, " ".join(" ".join(lines).split()))]
            if pictures and shown:
                _draw(shown[-1], columns, pictures / f"{name}-{columns}.svg")
    return rows, _check("longest silence at a terminal, seconds", rows)


def lookups(_: Path | None) -> tuple[list[Row], Check]:
    with tempfile.TemporaryDirectory() as name:
        url = f"sqlite:///{name}/autotune.db"
        with open_store(url) as store:
            _fill(store)
        environment = {**os.environ, "AUTOTUNE_DB_URL": url, "XDG_DATA_HOME": name, "XDG_CACHE_HOME": name}
        rows: list[Row] = []
        for command in LOOKUPS:
            _cpu_seconds(command, environment)  # compiles the modules, and reads them into the page cache
            spent = [_cpu_seconds(command, environment) for _ in range(RUNS)]
            rows.append({"command": command, "cpu_seconds": round(statistics.median(spent), 2), "most": max(spent)})
    return rows, at_most("CPU seconds of a look-up", [row["cpu_seconds"] for row in rows], MOST_CPU_SECONDS)


PARTS: Mapping[str, Callable[[Path | None], tuple[list[Row], Check]]] = {
    "silence": silence,
    "captures": captures,
    "lookups": lookups,
}


def _fill(store: Store) -> None:
    """Store studies with a winner and four trials each, alternately of this machine and of another one."""
    here = replace(WORKLOAD, hardware=probe_hardware(), software=software())
    for number in range(PLANS):
        workload = WORKLOAD if number % 2 else here
        workload = replace(workload, data=replace(workload.data, lengths_digest=f"{number}"))
        study = store.create_study(store.add_workload(workload), {"trials": 4}, seed=0)
        for qv in range(number, number + 4):
            store.finish_trial(result_of(store.start_trial(study.id, packed_plan(qv), "sampled").id))
        concluded(store, best_of(study.id, plan=packed_plan(number), workload=workload))


def _cpu_seconds(command: str, environment: Mapping[str, str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "autotune", *command.split()], env=environment, stdout=subprocess.DEVNULL, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@contextmanager
def _user() -> Iterator[Path]:
    """Provide a folder with the scripts of the example, where nothing is known yet."""
    with tempfile.TemporaryDirectory() as name:
        for file in ("generate.py", "scenes.py", "job.yaml"):
            shutil.copy(EXAMPLE / file, name)
        yield Path(name)


def _run(folder: Path, columns: int | None, arguments: str) -> Recording:
    """Run `python ARGUMENTS` in the folder, in a shell."""
    python = f'"{sys.executable}"'
    command = f"{python} {arguments.format(autotune=f'{python} -m autotune')}"
    environment = {
        "XDG_DATA_HOME": str(folder / "data-home"),
        "XDG_CACHE_HOME": str(folder / "cache-home"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH")))),
    }
    done = record(["sh", "-c", command], columns, folder=folder, environment=environment)
    sys.stderr.write(done.text if columns is None else "\n".join((*done.screen(), "")))
    if done.exit_code:
        raise SystemExit(f"{command} ended with exit code {done.exit_code}")
    return done


def _row(what: str, done: Recording) -> Row:
    return {
        "command": what,
        "columns": done.columns,
        "seconds": round(done.seconds, 1),
        "silences": [{"seconds": round(seconds, 2), "after": before[-200:]} for seconds, before in done.silences(5)],
        "load": os.getloadavg()[0],
    }


def _check(name: str, rows: list[Row]) -> Check:
    return at_most(name, [row["silences"][0]["seconds"] for row in rows], MOST_SILENT_SECONDS)


def _draw(lines: list[str], columns: int, file: Path) -> None:
    console = Console(record=True, width=columns, file=StringIO(), force_terminal=True)
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    drawn = console.export_svg(title=f"{columns} columns")
    # The fonts are on a server of others; any font of a terminal will do.
    file.write_text(re.sub(r"\s*@font-face {.*?}", "", drawn, flags=re.DOTALL), encoding="utf-8")


if __name__ == "__main__":
    main()
