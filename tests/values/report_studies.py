"""Stored studies for reports: a search on a simulated machine, and a large study of synthetic trials."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from autotune.search.execution.ledger import Ledger
from storage.records import StudyRecord, TrialResult
from storage.store import Store
from tests.machines.search_bench import MEMORY, PREDICTOR, Bench
from tests.machines.simulated import Behaviour, SimulatedLauncher
from tests.values.data import index_of
from tests.values.search import COSTS, prepared_of, random_rows
from tests.values.storage import OUTCOMES, WORKLOAD, best_of, concluded
from trials import wire
from trials.data.index import profile
from trials.outcome import Completed, Crash, Failed, Measurement, Outcome, StageMeasurement
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage
from trials.workload import Workload

STAGES = 16
_VISION, _LANGUAGE = 24, 40


def searched(folder: Path, store: Store) -> tuple[StudyRecord, Ledger]:
    """Search on a simulated machine, some of whose trials crash, and store the winner and the layers' profile."""
    bench = Bench(folder, store)
    study, crashes = bench.study(), Behaviour(crash_share=0.15)
    pool = SimulatedLauncher(PREDICTOR, crashes, seed=3, world_size=2)  # with which no baseline wins
    ledger = bench.search(study, pool, trials=24)
    workload = prepared_of(folder, MEMORY).workload
    save_profile(store, workload)
    entries, winner = bench.standings.entries, bench.standings.winner()
    best = entries[winner.number]
    speed = workload.data.samples / best.epoch_seconds
    concluded(
        store,
        best_of(
            study.id,
            workload=workload,
            plan=best.plan,
            epoch_seconds=best.epoch_seconds,
            epoch_seconds_error=best.epoch_seconds_error,
            estimated_samples_per_second=speed,
            estimated_samples_per_second_error=speed * best.epoch_seconds_error / best.epoch_seconds,
            baselines=bench.standings.compare(winner.number, workload.data.samples),
            pareto=(),
            ties=(),
        ),
    )
    return store.study(study.id), ledger


def save_profile(store: Store, workload: Workload) -> None:
    store.save_layer_profile(
        workload.hardware.fingerprint, workload.model.fingerprint, workload.software, wire.encode(COSTS)
    )


def large_workload() -> Workload:
    """A workload of a model with 64 layers on 64 devices, in which each pack of the data keeps some MiB."""
    return replace(
        WORKLOAD,
        model=replace(WORKLOAD.model, vision_layers=_VISION, language_layers=_LANGUAGE, parameters=3_200_000),
        data=profile(index_of(random_rows(20_000))),
        hardware=replace(WORKLOAD.hardware, devices=4 * STAGES),
        global_batch_samples=512,
        memory_limit_bytes=200 << 20,
    )


def large(store: Store, trials: int = 500) -> StudyRecord:
    """Store a study of many trials of pipelines with 16 stages, every tenth of which failed."""
    workload, random = large_workload(), np.random.default_rng(0)
    study = store.create_study(store.add_workload(workload), {"trials": trials}, seed=0)
    save_profile(store, workload)
    plans = [_plan(number) for number in range(trials)]
    for number, plan in enumerate(plans):
        running = store.start_trial(study.id, plan, "default" if number == 0 else "sampled", _point(number, random))
        seconds = 400 + 100 * float(random.random()) + 900 / (number + 3)
        store.finish_trial(_result(running.id, _outcome(number, plan, random), seconds, running.started))
    best = plans[-2]
    concluded(store, best_of(study.id, workload=workload, plan=best, pareto=(), ties=(plans[-3].id,)))
    return store.study(study.id)


def _plan(number: int) -> Plan:
    packed = Packed(qv=6 + number % 7, qt=320 + 16 * (number % 31), qv_min=6 + number % 7, qt_min=300, packer="isf")
    return Plan(
        packing=Padded(samples=4) if number == 0 else packed,
        layout=Layout(pipeline=STAGES, data=4, zero=1),
        stages=(
            *(Stage(vision=4, language=0, recompute_vision=(number + stage) % 5) for stage in range(6)),
            *(Stage(vision=0, language=4, recompute_language=(number * stage) % 5) for stage in range(10)),
        ),
    )


def _point(number: int, random: np.random.Generator) -> dict[str, object]:
    shifts = {f"boundary_{stage}": int(random.integers(-2, 3)) for stage in range(STAGES - 1)}
    recomputes = {
        f"recompute_{kind}_{stage}": int(random.integers(-2, 3))
        for stage in range(STAGES)
        for kind in ("vision", "language")
    }
    return {"layout": "p16-d4-z1", "packer": "isf", "qv": 6 + number % 7, "qt": 320, **shifts, **recomputes}


def _outcome(number: int, plan: Plan, random: np.random.Generator) -> Outcome:
    if number % 10 == 9:
        return OUTCOMES["out of memory"] if number % 20 == 9 else Failed(cause=Crash(rank=3, detail="x"))
    stages = tuple(
        StageMeasurement(
            stage=where.stage,
            data_rank=where.data_rank,
            load_seconds=0.01,
            forward_seconds=0.3 + 0.1 * float(random.random()),
            backward_seconds=0.7 + 0.2 * float(random.random()),
            optimizer_seconds=0.05,
            idle_seconds=0.4,
            peak_bytes=int(random.integers(80, 190)) << 20,
            static_bytes=40 << 20,
            tensor_rank=where.tensor_rank,
        )
        for where in map(plan.layout.grid.coordinates, range(plan.layout.world_size))
    )
    return Completed(
        measurement=Measurement(
            steps=(1, 2, 3),
            step_seconds=(1.5, 1.6, 1.4),
            samples=1536,
            text_tokens=200_000,
            vision_units=4000,
            losses=(1.0, 1.0, 1.0),
            stages=stages,
        )
    )


def _result(trial_id: str, outcome: Outcome, seconds: float, started: datetime) -> TrialResult:
    measured = isinstance(outcome, Completed)
    return TrialResult(
        trial_id=trial_id,
        outcome=outcome,
        epoch_seconds=seconds if measured else None,
        epoch_seconds_error=0.02 * seconds if measured else None,
        finished=started + timedelta(seconds=7),
    )
