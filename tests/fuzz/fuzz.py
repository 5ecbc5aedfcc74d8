"""Runs many cases in several processes, and summarizes the results."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.fuzz.request import ANSWERS, Kind, Limits

LIMITS = Limits(seconds=300.0, cpu_seconds=20.0, mebibytes=512)
SHARES: dict[Kind, int] = {
    "jobs": 15,
    "plans": 13,
    "lengths": 13,
    "annotations": 40,
    "results": 13,
    "bundles": 13,
    "profiles": 10,
    "models": 10,
    "progress": 13,
}
"""Cases per hundred. Annotations, which are read quickly, are added to them."""
_MEMORY = Path("/dev/shm")  # where no disk is waited for
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Input that the program should have refused, but handled in another way."""

    kind: str
    case: str
    """The first case with this fault, with as few mutations as possible."""
    mutations: tuple[str, ...]
    why: str
    cases: int
    """Number of cases with this fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Of one kind of file."""

    kind: str
    cases: int
    taken: int
    refused: int
    faults: tuple[Fault, ...]
    seconds: float
    """CPU seconds of all cases."""
    most_seconds: float
    """For one."""
    most_mebibytes: float
    """Memory by which a process grew in one case."""


def fuzz(
    cases: int, seed: int, *, processes: int = 1, limits: Limits = LIMITS, shares: Mapping[Kind, int] = SHARES
) -> list[Tally]:
    """Run `cases` cases of all kinds, in fixed shares; equal seeds give equal cases."""
    counts = {kind: cases * share // 100 for kind, share in shares.items()}
    parts = [
        {kind: list(range(first, count, processes)) for kind, count in counts.items()} for first in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:
        results = [line for lines in pool.map(lambda part: _served(part, seed, limits), parts) for line in lines]
    return [_tally(kind, [line for line in results if line["kind"] == kind]) for kind in counts]


def _served(numbers: Mapping[Kind, list[int]], seed: int, limits: Limits) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="autotune-fuzz-", dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        request = {"seed": seed, "cases": numbers, "folder": f"{folder}/work", "limits": asdict(limits)}
        subprocess.run(
            [sys.executable, "-m", "tests.fuzz.worker"],
            input=json.dumps(request),
            stdout=subprocess.DEVNULL,  # deepspeed tells there what it found
            text=True,
            cwd=_ROOT,
            env=_environment(Path(folder)),
            check=True,
        )
        return [json.loads(line) for line in Path(folder, "work", ANSWERS).read_text().splitlines()]


def _environment(folder: Path) -> dict[str, str]:
    """Return variables for an own home and cache, no network, no accelerator, and one thread: the process forks."""
    inherited = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_DB_URL"}
    homes = {name: str(folder / "home") for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME")}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {
        **inherited,
        **homes,
        **threads,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(_ROOT),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _tally(kind: str, results: list[dict[str, Any]]) -> Tally:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in results:
        if line["verdict"] == "fault":
            found.setdefault(line["signature"], []).append(line)
    return Tally(
        kind=kind,
        cases=len(results),
        taken=sum(line["verdict"] == "taken" for line in results),
        refused=sum(line["verdict"] == "refused" for line in results),
        faults=tuple(_fault(kind, lines) for lines in found.values()),
        seconds=sum(line["seconds"] for line in results),
        most_seconds=max((line["seconds"] for line in results), default=0.0),
        most_mebibytes=max((line["mebibytes"] for line in results), default=0.0),
    )


def _fault(kind: str, lines: list[dict[str, Any]]) -> Fault:
    first = min(lines, key=lambda line: len(line.get("mutations", "?" * 99)))
    return Fault(kind=kind, case=first["case"], mutations=tuple(first["mutations"]), why=first["why"], cases=len(lines))
