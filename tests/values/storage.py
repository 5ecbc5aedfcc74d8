"""Values for the tests of storage: small, complete and different where a test needs them to be."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

from storage.baseline import Baseline
from storage.explanation import BEST, UNEXPLAINED, Basis, ChangeEffect, Explanation, PlanTime, TimePart
from storage.launch_speed import Growth, LaunchWindow, StepParts
from storage.records import (
    AgentRecord,
    BestPlan,
    DisturbedRun,
    LaunchResult,
    ParetoPlan,
    TrialResult,
)
from storage.store import Store
from trials.costs.coefficients import KINDS
from trials.costs.exchange import Exchange
from trials.costs.layer import LayerCost
from trials.costs.layer_costs import LayerCosts, LinkCost, LoadCost, UpdateCost
from trials.outcome import (
    Completed,
    Crash,
    Failed,
    Measurement,
    Outcome,
    OutOfMemory,
    Rejected,
    StageMeasurement,
    Timeout,
)
from trials.plan import Layout, Packed, Padded, Plan
from trials.stage import Stage
from trials.tasks.training.spread import Spread
from trials.workload import DataProfile, Hardware, ModelShape, Software, Workload

NOON = datetime(2026, 11, 20, 12, 0, 0, 123456, tzinfo=UTC)

WORKLOAD = Workload(
    model=ModelShape(
        name="tiny-internvl",
        family="internvl",
        dtype="bfloat16",
        vision_layers=2,
        language_layers=4,
        parameters=78_000_000_000,
        unit_flops=1.25e12,
        token_flops=0.1 + 0.2,
        square_flops=3.0,
        config_digest="c0ffee",
    ),
    data=DataProfile(
        samples=1000,
        text_only_samples=60,
        vision_units=2500,
        text_tokens=5_000_000_000,
        longest_text_tokens=4096,
        most_vision_units=13,
        histogram=((0, 128, 60), (1, 256, 640), (5, 1344, 300)),
        lengths_digest="1e57",
    ),
    hardware=Hardware(
        accelerator="cuda",
        device_name="NVIDIA A100-SXM4-80GB",
        devices=8,
        device_memory_bytes=80 << 30,
        compute_capability="8.0",
        driver="570.86.15",
        cpu_name="AMD EPYC 7763",
        cpu_cores=128,
        ram_bytes=2 << 40,
    ),
    software=Software(python="3.11.7", torch="2.13.0", deepspeed="0.19.8", transformers="5.23.0"),
    oversize="own-pack",
    global_batch_samples=32,
    memory_limit_bytes=76 << 30,
)


def changed(field: str, value: object, workload: Workload = WORKLOAD) -> Workload:
    """The workload with one dotted field set: `changed("hardware.driver", None)`."""
    section, _, name = field.rpartition(".")
    part: dict[str, Any] = {name: value}
    return replace(workload, **({section: replace(getattr(workload, section), **part)} if section else part))


def new_study(store: Store, workload: Workload = WORKLOAD) -> str:
    return store.create_study(store.add_workload(workload), {"trials": 24}, seed=7).id


def packed_plan(qv: int = 9) -> Plan:
    return Plan(
        packing=Packed(qv=qv, qt=4096, qv_min=qv, qt_min=3968),
        layout=Layout(pipeline=2, data=4, zero=1),
        stages=(Stage(vision=2, language=1, recompute_vision=1), Stage(vision=0, language=3)),
    )


PADDED_PLAN = Plan(
    packing=Padded(samples=2), layout=Layout(pipeline=1, data=8, zero=3), stages=(Stage(vision=2, language=4),)
)


def completed(step_seconds: float = 0.5) -> Completed:
    def stage(number: int) -> StageMeasurement:
        return StageMeasurement(
            stage=number,
            data_rank=0,
            load_seconds=0.01,
            forward_seconds=0.1,
            backward_seconds=0.2 + number,
            optimizer_seconds=0.01,
            idle_seconds=0.19,
            peak_bytes=(60 + number) << 30,
            static_bytes=40 << 30,
        )

    return Completed(
        measurement=Measurement(
            steps=(1, 2),
            step_seconds=(step_seconds, step_seconds + 0.1),
            samples=64,
            text_tokens=9000,
            vision_units=150,
            losses=(2.5, 1 / 3),
            stages=(stage(0), stage(1)),
        )
    )


COSTS = LayerCosts(
    layers=tuple(
        (
            kind,
            LayerCost(
                forward_seconds=(0.0, 0.0, 0.0, 0.125),
                backward_seconds=(0.0, 0.0, 0.0, 0.25),
                recompute_seconds=(0.0, 0.0, 0.0, 0.1),
                kept_bytes=(1.0, 0.0, 0.0, 64.0),
                output_bytes=(1.0, 0.0, 0.0, 0.0),
                parameters=1000,
            ),
        )
        for kind in KINDS
    ),
    loading=LoadCost(),
    link=LinkCost(latency_seconds=1e-5, seconds_per_byte=1e-9),
    updates=(UpdateCost(zero=0, data_parallel=1, seconds_per_parameter=1e-9),),
    residual=0.01,
    exchanges=(Exchange.of_bytes("average", 2, 0.0, 1e-9),),
)

OUTCOMES: dict[str, Outcome] = {
    "completed": completed(),
    "rejected": Rejected(reason="needs 90 GiB of 76 GiB"),
    "out of memory": Failed(cause=OutOfMemory(stage=1, rank=5, needed_bytes=90 << 30, limit_bytes=76 << 30)),
    "crash": Failed(cause=Crash(rank=3, detail="ValueError: '; DROP TABLE autotune_trial; --")),
    "timeout": Failed(cause=Timeout(seconds=300.0)),
}


def peaking_at(peak_bytes: int) -> Completed:
    """A measurement whose fullest rank needed this much memory."""
    measured = completed()
    first, *rest = measured.measurement.stages
    stages = (replace(first, peak_bytes=peak_bytes), *(replace(each, peak_bytes=1 << 20) for each in rest))
    return replace(measured, measurement=replace(measured.measurement, stages=stages))


def result_of(trial_id: str, outcome: Outcome | None = None) -> TrialResult:
    outcome = outcome or completed()
    measured = isinstance(outcome, Completed)
    return TrialResult(
        trial_id=trial_id,
        outcome=outcome,
        epoch_seconds=1234.5 if measured else None,
        epoch_seconds_error=6.7 if measured else None,
        finished=NOON.astimezone(timezone(timedelta(hours=5, minutes=30))),
        disturbance="other processes used 1.3 of 2 cores" if isinstance(outcome, Failed) else None,
        energy_joules=4567.8 if measured else None,
    )


def plan_time(plan: Plan, role: str, **seconds: float) -> PlanTime:
    """Where the time of a plan goes: these seconds of some parts, each with an error of a tenth, and the rest ideal."""
    names = [*BASES, UNEXPLAINED]
    whole = 100.0 if role == BEST else 200.0
    given = {**dict.fromkeys(names, 0.0), "ideal": whole - sum(seconds.values()), **seconds}
    return PlanTime(
        plan=plan,
        role=role,
        epoch_seconds=whole,
        epoch_seconds_error=1.5,
        steps=32,
        parts=tuple(
            TimePart(name=name, seconds=given[name], error=abs(given[name]) / 10, basis=BASES.get(name, "rest"))
            for name in names
        ),
        stage_peak_bytes=(30 << 30, (61 if role == BEST else 40) << 30),
        runs=2 if role == BEST else 1,
    )


BASES: dict[str, Basis] = {
    "ideal": "divided",
    "padding": "divided",
    "recompute": "divided",
    "stage_imbalance": "measured",
    "bubble": "simulated",
    "communication": "predicted",
}
EXPLANATION = Explanation(
    plans=(
        plan_time(packed_plan(), BEST, recompute=10.0, bubble=5.0, unexplained=-1.0),
        plan_time(PADDED_PLAN, "default", padding=60.0, recompute=20.0, stage_imbalance=10.0, unexplained=4.0),
    ),
    usual="default",
    changes=(
        ChangeEffect(
            change="packing",
            plan=packed_plan(3),
            epoch_seconds=140.0,
            epoch_seconds_error=3.0,
            gain=200 / 140,
            gain_error=0.03,
            peak_bytes=61 << 30,
            fits=True,
            measured=False,
        ),
        ChangeEffect(
            change="recompute",
            plan=packed_plan(5),
            epoch_seconds=180.0,
            epoch_seconds_error=3.0,
            gain=200 / 180,
            gain_error=0.03,
            peak_bytes=90 << 30,
            fits=False,
            measured=True,
        ),
    ),
    further=(
        ChangeEffect(
            change="no-recompute",
            plan=packed_plan(7),
            epoch_seconds=90.0,
            epoch_seconds_error=2.0,
            gain=100 / 90,
            gain_error=0.02,
            peak_bytes=80 << 30,
            fits=False,
            measured=False,
        ),
    ),
)
"""Why `packed_plan()` won instead of PADDED_PLAN: it takes half the time."""


def best_of(study_id: str, **fields: Any) -> BestPlan:
    given: dict[str, Any] = {
        "plan": packed_plan(),
        "workload": WORKLOAD,
        "study_id": study_id,
        "epoch_seconds": 100.0,
        "epoch_seconds_error": 1.5,
        "estimated_samples_per_second": 10.0,
        "estimated_samples_per_second_error": 0.1,
        "baselines": (
            Baseline(
                role="baseline-a",
                estimated_samples_per_second=5.5,
                estimated_samples_per_second_error=0.2,
                gain=10 / 5.5,
                gain_error=0.1,
            ),
            Baseline(
                role="baseline-b",
                estimated_samples_per_second=8.0,
                estimated_samples_per_second_error=0.3,
                gain=1.25,
                gain_error=0.05,
            ),
        ),
        "created": NOON,
        "search_seconds": 321.5,
        "confidence": 0.875,
        "ties": (PADDED_PLAN.id,),
        "pareto": (
            ParetoPlan(
                plan=packed_plan(), estimated_samples_per_second=10.0, peak_bytes=61 << 30, joules_per_sample=0.1 + 0.2
            ),
            ParetoPlan(plan=PADDED_PLAN, estimated_samples_per_second=9.5, peak_bytes=40 << 30, joules_per_sample=None),
        ),
    }
    return BestPlan(**(given | fields))


def concluded(store: Store, best: BestPlan, calibration_state: str = "{}") -> BestPlan:
    """Conclude the study of a winner, like the agent that leads it."""
    agent = store.add_agent("a host", "1 1").id
    store.lead_study(best.study_id, agent)
    assert store.conclude_study(best, calibration_state, agent)
    store.end_agent(agent)
    return best


def launch_result(launch_id: str, **fields: Any) -> LaunchResult:
    """The end of a training of 40 steps."""
    given: dict[str, Any] = {"status": "finished", "steps": 40, "training_samples_per_second": 11.9, "finished": NOON}
    return LaunchResult(launch_id=launch_id, **(given | fields))


def window_of(launch_id: str, first_step: int = 2, **fields: Any) -> LaunchWindow:
    """Ten steps of a launch that was promised 8 samples/s; slow ones have a part that grew."""
    given: dict[str, Any] = {
        "launch_id": launch_id,
        "first_step": first_step,
        "last_step": first_step + 9,
        "step_seconds": 2.0,
        "training_samples_per_second": 8.0,
        "tokens_per_second": 0.1 + 0.2,
        "promised_samples_per_second": 8.0,
        "parts": StepParts(
            loads=Spread(median=0.1, greatest=0.2, rank=3),
            passes=(Spread(median=1.0, greatest=1.5, rank=2), Spread(median=1 / 3, greatest=0.5, rank=7)),
            other_seconds=0.25,
            growth=None,
        ),
    }
    return LaunchWindow(**(given | fields))


def slow_window(launch_id: str, first_step: int = 2, training_samples_per_second: float = 6.0) -> LaunchWindow:
    usual = window_of(
        launch_id, first_step, training_samples_per_second=training_samples_per_second, tokens_per_second=0.2
    )
    growth = Growth(part="communication", usual_seconds=0.25, seconds=0.75)
    return replace(usual, parts=replace(usual.parts, other_seconds=0.75, growth=growth))


SHARED, OWN = packed_plan(), packed_plan(40)
"""Plans that `searched` tries: one of several studies, and one of a single study."""
DISTURBED = DisturbedRun(outcome=completed(), epoch_seconds=1.0, disturbance="others")


def searched(store: Store, *, plans: tuple[int, ...] = (9, 40), winner: int = 9) -> str:
    """A finished study with every outcome, a disturbed run and a trial that was given up."""
    study = new_study(store)
    for name, outcome in OUTCOMES.items():
        store.finish_trial(result_of(store.start_trial(study, packed_plan(plans[0]), name).id, outcome))
    for qv in plans:
        trial = store.start_trial(study, packed_plan(qv), "sampled")
        store.finish_trial(replace(result_of(trial.id), disturbed=(DISTURBED,)))
    store.abandon_trial(store.start_trial(study, packed_plan(plans[-1]), "sampled").id)
    concluded(store, best_of(study, plan=packed_plan(winner)))
    return study


def beats_of_both(store: Store, other: str) -> Callable[[str], Mapping[str, AgentRecord]]:
    """Return `store.beat` for an agent with which another one lives: each heartbeat is one of both."""
    beat = store.beat

    def both(agent_id: str) -> Mapping[str, AgentRecord]:
        beat(other)
        return beat(agent_id)

    return both
