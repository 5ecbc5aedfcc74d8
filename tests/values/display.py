"""Events of a search and of a training, as a display hears them."""

from dataclasses import replace
from datetime import timedelta

from autotune.events import (
    BestSoFar,
    Event,
    Gain,
    Note,
    Phase,
    PhaseBegan,
    RanksStart,
    SearchStatus,
    TrialBegan,
    TrialEnded,
)
from storage.records import RunningTrial, TrialResult
from tests.values.storage import NOON, PADDED_PLAN, completed, packed_plan
from trials.data.reading import Reading
from trials.outcome import Completed, Failed, Outcome, OutOfMemory
from trials.plan import Plan
from trials.tasks.training.progress import Evaluated, Progress

PLAN = packed_plan()
SHORT = Failed(cause=OutOfMemory(stage=1, rank=3, needed_bytes=90 << 30, limit_bytes=76 << 30))
STEP = Progress(step=1, of=120, loss=6.25, seconds=2.0, samples=16, learning_rate=1e-3, data_wait_seconds=0.5)
EVALUATED = Evaluated(step=60, of=120, evaluation_loss=3.5, seconds=4.0, samples=8)


def running(number: int, plan: Plan = PLAN, role: str = "sampled") -> RunningTrial:
    return RunningTrial(
        id=f"{number:032x}", study_id="0" * 32, number=number, plan=plan, role=role, parameters={}, started=NOON
    )


def ended(trial: RunningTrial, outcome: Outcome | None = None, *, disturbed: str | None = None) -> TrialEnded:
    seconds = 100.0 if isinstance(outcome or completed(), Completed) else None
    result = TrialResult(
        trial_id=trial.id,
        outcome=outcome or completed(),
        epoch_seconds=seconds,
        epoch_seconds_error=seconds and 1.0,
        finished=NOON + timedelta(seconds=10),
        disturbance=disturbed,
    )
    return TrialEnded(trial=trial.finish(result), is_known=False)


def status(spent: int, seconds_left: float = 100.0, best: BestSoFar | None = None) -> SearchStatus:
    return SearchStatus(spent=spent, trials=14, seconds_left=seconds_left, best=best)


BEST = BestSoFar(
    plan=PLAN,
    epoch_seconds=126.64,
    epoch_seconds_error=1.5,
    gains=(Gain(role="default", gain=2.29, error=0.03), Gain(role="omnibal", gain=1.0, error=0.0)),
)

SEARCH: tuple[Event, ...] = (
    PhaseBegan(phase=Phase.PROBE, text="Inspecting the model, the data and the hardware"),
    PhaseBegan(phase=Phase.LENGTHS, text="Reading the data"),
    Reading(records=1000, share=None),
    Reading(records=23456, share=0.5),
    PhaseBegan(phase=Phase.PROFILE, text="Profiling the layers on 8 GPUs"),
    RanksStart(is_ready=False),
    RanksStart(is_ready=True),
    PhaseBegan(phase=Phase.SEARCH, text="Searching with at most 14 trials in 5 min 00 s", epoch_samples=1000),
    TrialBegan(trial=running(0)),
    status(1),
    ended(running(0)),
    status(1, 90.0, replace(BEST, gains=())),
    TrialBegan(trial=running(1, PADDED_PLAN, "default")),
    status(2, 90.0, replace(BEST, gains=())),
    ended(running(1, PADDED_PLAN, "default"), SHORT),
    status(2, 80.0, replace(BEST, gains=())),
    TrialBegan(trial=running(2, PADDED_PLAN)),
    status(3, 80.0, BEST),
    ended(running(2, PADDED_PLAN), disturbed="other processes used 1.2 of 2 cores"),
    status(3, 70.0, BEST),
    Note(text="Every promising plan has been tried"),
    PhaseBegan(phase=Phase.REPEATS, text="Repeating the finalists in turns"),
    TrialBegan(trial=running(3, PLAN, "confirm")),
    status(3, 60.0, BEST),
)
"""A search up to the first repeat, which runs."""
TRAINING: tuple[Event, ...] = (
    PhaseBegan(phase=Phase.TRAINING, text="Training with plan 0123456789abcdef into output"),
    RanksStart(is_ready=False),
    RanksStart(is_ready=True),
    *(replace(STEP, step=number, loss=6.25 - 0.01 * number) for number in range(1, 61)),
    EVALUATED,
)
"""Half of a training."""
