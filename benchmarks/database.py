"""The database under kills, races, locks, full disks, damage and unsteady clocks, and how fast it answers.

    python -m benchmarks.database [--part storm race lock clock disk damage speed] [--scale 1.0]

Prints one JSON object. Storms and races run on SQLite and on a real PostgreSQL. `--scale` shrinks everything for a
quick look; the checks then say less.
"""

import argparse
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
from sqlalchemy import create_engine, insert, text

from benchmarks.output.result import Check, at_least, at_most, finish, show
from storage.database import rows
from storage.database.engine import Database
from storage.database.tables import BEST_PLAN, FINISHED, OUTCOME, STAGE_MEASUREMENT, STUDY, TRIAL
from storage.database.url import parse
from storage.nearness import fields_of
from storage.queries import codec
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs import postgres
from tests.programs.damage import DAMAGES, damaged, mishandled, on_a_small_disk
from tests.programs.storms import Storm, race, storm
from tests.values.storage import NOON, WORKLOAD, best_of, completed, packed_plan, result_of
from trials import wire
from trials.outcome import Outcome
from trials.workload import Workload

SIZES = {"sqlite": 32, "postgresql": 16}
"""Processes of a storm."""
TRIALS, KILLS = 50, 110
OPENERS, ROUNDS = 32, 20
LOCK_SECONDS = 60.0
GRACE_SECONDS = 10.0
DAMAGED, FULL = 40, 40
WORKLOADS, TRIALS_OF_A_STUDY = 500, 200
ASKED, RECORDED = 200, 100


def main() -> None:
    arguments = _arguments()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="autotune-bench-") as folder, postgres.server(durable=True) as server:
        for part in arguments.part:
            for row in _PARTS[part](Path(folder), server, arguments.scale):
                show(row)
                rows.append({"part": part, **row})
            checks += _checks(part, [row for row in rows if row["part"] == part])
    finish(rows, checks)


@contextmanager
def _place(kind: str, folder: Path, server: str) -> Iterator[tuple[str, Path]]:
    """Provide (URL of a new database, an empty folder next to it)."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        if kind == "sqlite":
            yield f"sqlite:///{name}/store.db", Path(name)
            return
        with postgres.database(server) as url:
            yield url, Path(name)


def _storms(folder: Path, server: str, scale: float) -> Iterator[dict[str, Any]]:
    for kind, processes in SIZES.items():
        with _place(kind, folder, server) as (url, place):
            size = max(2, round(processes * scale))
            trials, kills = max(5, round(TRIALS * scale)), max(5, round(KILLS * scale))
            yield _told(kind, storm(url, place, processes=size, trials=trials, kills=kills), size * trials)


def _told(kind: str, done: Storm, wanted: int) -> dict[str, Any]:
    counts = {name: len(value) for name, value in asdict(done).items() if isinstance(value, list)}
    first = next((value[0] for value in asdict(done).values() if isinstance(value, list) and value), None)
    return {
        "database": kind,
        "trials_wanted": wanted,
        "trials": done.trials,
        "kills": done.kills,
        "kills_in_commits": done.kills_in_commits,
        **counts,
        "seconds_to_settle": done.seconds_to_settle,
        "first_fault": first,
    }


def _races(folder: Path, server: str, scale: float) -> Iterator[dict[str, Any]]:
    for kind in SIZES:
        failed: list[str] = []
        for _ in range(max(1, round(ROUNDS * scale))):
            with _place(kind, folder, server) as (url, place):
                failed += race(url, place, processes=max(2, round(OPENERS * scale)))
        yield {"database": kind, "failed": len(failed), "first_fault": failed[0] if failed else None}


def _locks(folder: Path, server: str, scale: float) -> Iterator[dict[str, Any]]:
    """Run storms while another program holds the whole database for a minute."""
    for kind in SIZES:
        with _place(kind, folder, server) as (url, place):
            open_store(url).close()
            with _foreign_lock(url, LOCK_SECONDS * scale):
                yield _told(kind, storm(url, place, processes=4, trials=50, kills=0), 200)


@contextmanager
def _foreign_lock(url: str, seconds: float) -> Iterator[None]:
    engine, done = create_engine(parse(url)), Event()

    def hold() -> None:
        time.sleep(3.0)  # until trials run
        with engine.connect() as connection:
            connection.execution_options(isolation_level="AUTOCOMMIT")
            if engine.dialect.name == "sqlite":
                connection.exec_driver_sql("BEGIN EXCLUSIVE")
            else:
                connection.exec_driver_sql("BEGIN")
                connection.execute(text("LOCK TABLE autotune_trial, autotune_agent, autotune_outcome"))
            done.wait(seconds)
            connection.exec_driver_sql("COMMIT")

    thread = Thread(target=hold)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        engine.dispose()


def _clocks(folder: Path, server: str, scale: float) -> Iterator[dict[str, Any]]:
    """Run storms in which a process that asks for the time may get one that is an hour earlier or later."""
    for kind in SIZES:
        with _place(kind, folder, server) as (url, place):
            size, trials = max(2, round(8 * scale)), max(5, round(25 * scale))
            done = storm(url, place, processes=size, trials=trials, kills=round(20 * scale), unsteady_clocks=True)
            yield _told(kind, done, size * trials)


def _disks(folder: Path, _: str, scale: float) -> Iterator[dict[str, Any]]:
    rounds = max(4, round(FULL * scale))
    disk = folder / "disk"
    disk.mkdir()
    faults = on_a_small_disk(disk, rounds=rounds)
    yield {"rounds": rounds, "faults": len(faults), "first_fault": faults[0] if faults else None}


def _damages(folder: Path, _: str, scale: float) -> Iterator[dict[str, Any]]:
    for kind in DAMAGES:
        faults: list[str] = []
        seeds = max(1, round(DAMAGED * scale))
        for seed in range(seeds):
            place = folder / f"{kind} {seed}"
            place.mkdir()
            faults += mishandled(damaged(place, kind, random.Random(seed)))
            shutil.rmtree(place)
        yield {"damage": kind, "files": seeds, "faults": len(faults), "first_fault": faults[0] if faults else None}


# --- speed ---


def _speeds(folder: Path, server: str, scale: float) -> Iterator[dict[str, Any]]:
    for kind in SIZES:
        with _place(kind, folder, server) as (url, place), open_store(url) as store:
            workloads = _fill(url, store, max(10, round(WORKLOADS * scale)))
            yield {"database": kind, "trials": len(workloads) * TRIALS_OF_A_STUDY, **_timed(store, place, workloads)}


def _fill(url: str, store: Store, count: int) -> list[Workload]:
    """Store `count` workloads on 25 kinds of hardware, each with a study of 200 trials and its winner; return them."""
    document, plans = wire.encode(completed(), Outcome), [packed_plan(qv) for qv in range(TRIALS_OF_A_STUDY)]
    workloads = [_workload(number) for number in range(count)]
    studies = [store.create_study(store.add_workload(work), {"trials": 200}, seed=0).id for work in workloads]
    for plan in plans:  # every plan has its row
        store.start_trial(studies[0], plan, "sampled")
    database = Database(parse(url), 60.0)
    queried = codec.queried(completed())
    with database.transaction(write=True) as connection:
        connection.execute(text("DELETE FROM autotune_trial"))
        for study, work in zip(studies, workloads, strict=True):
            ids = [f"{study[:24]}{number:08x}" for number in range(len(plans))]
            connection.execute(
                insert(TRIAL),
                [
                    {
                        "id": key,
                        "study_id": study,
                        "number": number,
                        "plan_id": plans[number].id,
                        "role": "sampled",
                        "parameters": {"qv": number},
                        "status": FINISHED,
                        "started": NOON,
                        "finished": NOON,
                    }
                    for number, key in enumerate(ids)
                ],
            )
            outcome = {"kind": "completed", "epoch_seconds": 100.0, "epoch_seconds_error": 1.0, "document": document}
            connection.execute(insert(OUTCOME), [{"trial_id": key, **outcome, **queried} for key in ids])
            ranks = [codec.columns(stage) for stage in completed().measurement.stages]
            connection.execute(
                insert(STAGE_MEASUREMENT),
                [{"trial_id": key, "rank": rank, **values} for key in ids for rank, values in enumerate(ranks)],
            )
            connection.execute(insert(BEST_PLAN).values(codec.best_plan_row(best_of(study, workload=work))))
            rows.change(connection, STUDY, study, finished=NOON)
    with database.transaction() as connection:
        connection.execute(text("ANALYZE"))
    database.close()
    return workloads


def _workload(number: int) -> Workload:
    """Return a workload on one of 25 kinds of hardware, with a model and data of its own."""
    gpu, model = number % 25, number // 25
    histogram = tuple((units, 64 * (units + 1), 1 + (units * model) % 17) for units in range(60))
    return replace(
        WORKLOAD,
        hardware=replace(WORKLOAD.hardware, device_name=f"GPU {gpu // 5}", devices=2 ** (gpu % 5)),
        model=replace(WORKLOAD.model, language_layers=12 + model),
        data=replace(WORKLOAD.data, lengths_digest=f"{number}", histogram=histogram),
    )


def _timed(store: Store, place: Path, workloads: list[Workload]) -> dict[str, Any]:
    dice, spool, process = random.Random(0), Spool(place / "spool"), psutil.Process()
    asked = [dice.choice(workloads) for _ in range(ASKED)]
    elsewhere = [replace(work, hardware=replace(work.hardware, device_name="GPU 9", devices=3)) for work in asked]
    study = store.create_study(workloads[0].fingerprint, {}, seed=1).id
    running = [store.start_trial(study, packed_plan(qv % TRIALS_OF_A_STUDY), "sampled").id for qv in range(RECORDED)]

    def record(trial: str) -> None:
        spool.put(result_of(trial))
        spool.replay(store)

    figures: dict[str, Any] = {}
    for _ in range(2):  # the first time warms caches
        before = process.memory_info().rss
        figures = {
            "best_plan": _milliseconds(lambda work: store.last_winner(work.fingerprint), asked),
            "best_plans_of_hardware": _milliseconds(
                lambda work: store.best_plans(hardware_fingerprint=work.hardware.fingerprint, limit=1), asked
            ),
            "nearest": _milliseconds(lambda work: store.nearest_plans(fields_of(work)), elsewhere),
            "grown_mebibytes": (process.memory_info().rss - before) / (1 << 20),
        }
    return {**figures, "record": _milliseconds(record, running)}


def _milliseconds(call: Callable[[Any], object], arguments: list[Any]) -> dict[str, float]:
    spent: list[float] = []
    for argument in arguments:
        began = time.perf_counter()
        call(argument)
        spent.append((time.perf_counter() - began) * 1000)
    return {"median": statistics.median(spent), "p90": statistics.quantiles(spent, n=10)[-1], "most": max(spent)}


_PARTS: dict[str, Callable[[Path, str, float], Iterator[dict[str, Any]]]] = {
    "storm": _storms,
    "race": _races,
    "lock": _locks,
    "clock": _clocks,
    "disk": _disks,
    "damage": _damages,
    "speed": _speeds,
}
_FAULTS = ("lost", "doubled", "running", "failed", "wrong", "faults")


def _checks(part: str, rows: list[dict[str, Any]]) -> list[Check]:
    seen = [fault for fault in _FAULTS if any(fault in row for row in rows)]
    checks = [at_most(f"{part}: {fault}", [row[fault] for row in rows], 0) for fault in seen]
    if part == "storm":
        checks.append(at_most("storm: kills still owed", [2 * KILLS - 20 - sum(row["kills"] for row in rows)], 0))
        in_commits = sum(row["kills_in_commits"] for row in rows)
        checks.append(at_least("storm: kills inside a commit", [in_commits], 1))
        settled = [row["seconds_to_settle"] for row in rows]
        checks.append(at_most("storm: seconds until nothing runs any more", settled, GRACE_SECONDS))
    if part == "speed":
        for name, bar in (("best_plan", 10.0), ("best_plans_of_hardware", 10.0), ("nearest", 50.0), ("record", 20.0)):
            checks.append(at_most(f"speed: {name}, median milliseconds", [row[name]["median"] for row in rows], bar))
        checks.append(at_most("speed: MiB more after 600 queries", [row["grown_mebibytes"] for row in rows], 4.0))
    return checks


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(_PARTS), default=list(_PARTS))
    parser.add_argument("--scale", type=float, default=1.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
