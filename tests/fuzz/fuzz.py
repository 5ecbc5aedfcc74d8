"""Many cases in several processes, and what is told of them."""

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

LIMITS = Limits(seconds=60.0, cpu_seconds=20.0, mebibytes=512)
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
"""Of every hundred cases. Annotations, which are read at once, come on top."""
_MEMORY = Path("/dev/shm")  # where no disk is waited for
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that the program should have refused, and did otherwise with."""

    kind: str
    case: str
    """Of those with this fault, the first, with as few mutations as show it."""
    mutations: tuple[str, ...]
    why: str
    cases: int
    """How many have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Of one kind of file."""

    kind: str
    cases: int
    taken: int
    refused: int
    faults: tuple[Fault, ...]
    seconds: float
    """Of the processor, for all cases."""
    most_seconds: float
    """For one."""
    most_mebibytes: float
    """By which a process grew in one case."""


def fuzz(
    cases: int, seed: int, *, processes: int = 1, limits: Limits = LIMITS, shares: Mapping[Kind, int] = SHARES
) -> list[Tally]:
    """So many cases of all kinds together, by their shares; the same for the same seed."""
    counts = {kind: cases * share // 100 for kind, share in shares.items()}
    parts = [
        {kind: list(range(first, count, processes)) for kind, count in counts.items()} for first in range(processes)
    ]
    with ThreadPoolExecutor(processes) as pool:
        told = [line for lines in pool.map(lambda part: _served(part, seed, limits), parts) for line in lines]
    return [_tally(kind, [line for line in told if line["kind"] == kind]) for kind in counts]


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
    """A home and a cache of its own, no network, no accelerator, and one thread: the process is forked."""
    inherited = {name: value for name, value in os.environ.items() if name != "AUTOTUNE_DB_URL"}
    homes = {name: str(folder / "home") for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")}
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


def _tally(kind: str, told: list[dict[str, Any]]) -> Tally:
    found: dict[str, list[dict[str, Any]]] = {}
    for line in told:
        if line["verdict"] == "fault":
            found.setdefault(line["signature"], []).append(line)
    return Tally(
        kind=kind,
        cases=len(told),
        taken=sum(line["verdict"] == "taken" for line in told),
        refused=sum(line["verdict"] == "refused" for line in told),
        faults=tuple(_fault(kind, lines) for lines in found.values()),
        seconds=sum(line["seconds"] for line in told),
        most_seconds=max((line["seconds"] for line in told), default=0.0),
        most_mebibytes=max((line["mebibytes"] for line in told), default=0.0),
    )


def _fault(kind: str, lines: list[dict[str, Any]]) -> Fault:
    first = min(lines, key=lambda line: len(line.get("mutations", "?" * 99)))
    return Fault(kind=kind, case=first["case"], mutations=tuple(first["mutations"]), why=first["why"], cases=len(lines))
