"""A simulated machine with adjustable noise, drift and faults, on which a search takes milliseconds."""

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Protocol, Self

import numpy as np

from autotune.machine.conditions import Conditions
from autotune.prediction.predictor import Predictor
from autotune.search.execution.ledger import KnownTrials
from autotune.search.execution.run_result import RunResult
from autotune.search.roles import Role
from storage.records import FinishedTrial, RunningTrial, TrialResult
from tests.machines.truths import PredictedTruth, Truth
from trials.outcome import Cause, Crash, OutOfMemory, StageMeasurement, Timeout
from trials.plan import Plan
from trials.run.pool import Answers
from trials.tasks.answer import Answer, FailureReport, Report, TrialReport
from trials.tasks.footprint import Footprint
from trials.tasks.request import Request, Trial
from trials.tasks.stop import Stop
from trials.workload import Hardware

_BEGINNING = datetime(2026, 1, 1, tzinfo=UTC)
_STUDY = "0" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """Noise, drift and faults of a simulated machine."""

    noise: float = 0.01
    """Standard deviation of a step, as a share."""
    drift: float = 0.0
    """Standard deviation of the machine's slowness over time, as a share."""
    drift_seconds: float = 120.0
    """Seconds after which the slowness is mostly uncorrelated."""
    plan_width: float = 0.0
    """Standard deviation of a plan's error of prediction, as a share."""
    crash_share: float = 0.0
    """Share of trials that fail independently of their plan."""
    start_seconds: float = 1.0
    """Seconds of a trial before its first step."""
    disturbed_share: float = 0.0
    """Share of runs that another program slows down, which `Observed` sees."""
    disturbance: float = 0.25
    """Mean share by which such a run takes longer; the shares are exponentially distributed."""


class SimulatedLauncher:
    """Answers trials like ranks on such a machine; usable as a launcher, and in place of a `WarmPool`."""

    def __init__(
        self,
        truth: Truth | Predictor,
        behaviour: Behaviour = Behaviour(),
        seed: int = 0,
        *,
        cause_of: Callable[[Plan], Cause | None] = lambda _: None,
        factor_of: Callable[[Plan], float] = lambda _: 1.0,
        world_size: int = 2,
    ) -> None:
        """`truth` knows the machine; `cause_of` says which plans fail, `factor_of` how much slower a plan is."""
        self.asked: list[Plan] = []
        self._truth = PredictedTruth(truth) if isinstance(truth, Predictor) else truth
        self._behaviour = behaviour
        self._random = np.random.default_rng(seed)
        self._cause_of, self._factor_of = cause_of, factor_of
        self._world_size = world_size
        self._seconds = 0.0
        self._slowness = behaviour.drift * self._random.standard_normal()
        self._disturbance = 0.0
        self.epoch_seconds = cache(self._epoch_seconds)

    def clock(self) -> float:
        """Return the simulated seconds since the beginning."""
        return self._seconds

    def now(self) -> datetime:
        """Return the simulated time."""
        return _BEGINNING + timedelta(seconds=self._seconds)

    def _epoch_seconds(self, plan: Plan) -> float:
        """Return the true epoch time, without noise and drift."""
        return self._truth.epoch_seconds(plan) * self._factor(plan)

    @property
    def is_disturbed(self) -> bool:
        """Whether another program slowed the last run down."""
        return self._disturbance > 0

    @property
    def world_size(self) -> int:
        """Ranks of a group; plans are run with as many as they have."""
        return self._world_size

    def start(self) -> "SimulatedRanks":
        return SimulatedRanks(self)

    def ask(
        self,
        request: Request,
        timeout_seconds: float,
        on_wait: Callable[[], None] = lambda: None,
        on_step: Callable[[float], bool] | None = None,
    ) -> Answers | Cause:
        """Answer like `WarmPool.ask`, at once; only trials are supported."""
        del timeout_seconds, on_wait
        steps_and_outcome, go_on = self.steps_and_outcome(request), None
        while True:
            try:
                seconds = steps_and_outcome.send(go_on)
            except StopIteration as end:
                outcome: Answers | Cause = end.value
                return outcome
            go_on = on_step is None or on_step(seconds)

    def steps_and_outcome(self, request: Request) -> Generator[float, bool | None, Answers | Cause]:
        """Yield the seconds of each timed step, until the answer is False; return the outcome."""
        plan, task = request.plan, request.task
        assert isinstance(task, Trial)
        self.asked.append(plan)
        self._pass(self._behaviour.start_seconds)
        self._disturbance = self._disturb()
        if cause := self._cause_of(plan) or self._fault(request, task):
            return cause
        step_seconds = self._truth.step_seconds(plan)
        for step in task.warmup_steps:
            self._measure(plan, float(step_seconds[step]))
        measured: list[float] = []
        for step in task.timed_steps:
            measured.append(self._measure(plan, float(step_seconds[step])))
            if not (yield measured[-1]):
                break
        steps = task.timed_steps[: len(measured)]
        slower = sum(measured) / float(step_seconds[list(steps)].sum())
        samples = int(self._truth.step_samples(plan)[list(steps)].sum())
        peaks = self._truth.peaks(plan, (*task.warmup_steps, *steps))
        stages = (self._stage(plan, steps, rank, slower, peaks) for rank in range(plan.layout.world_size))
        return Answers(reports=tuple(_report(stage, measured, samples) for stage in stages))

    def _disturb(self) -> float:
        """Draw the share by which another program slows a run down; nothing is drawn on an undisturbed machine."""
        behaviour = self._behaviour
        if not behaviour.disturbed_share or self._random.random() >= behaviour.disturbed_share:
            return 0.0
        return float(self._random.exponential(behaviour.disturbance))

    def _fault(self, request: Request, task: Trial) -> Cause | None:
        if self._random.random() < self._behaviour.crash_share:
            return Crash(rank=0, detail="a simulated fault")
        memory = self._truth.peaks(request.plan, (*task.warmup_steps, *task.timed_steps))
        for rank in range(request.plan.layout.world_size):
            stage = request.plan.layout.grid.coordinates(rank).stage
            if memory[stage] > request.memory_limit_bytes:
                return OutOfMemory(
                    stage=stage, rank=rank, needed_bytes=memory[stage], limit_bytes=request.memory_limit_bytes
                )
        return None

    def _factor(self, plan: Plan) -> float:
        own = np.random.default_rng(int(plan.id, 16)).standard_normal()
        return self._factor_of(plan) * math.exp(self._behaviour.plan_width * own)

    def _measure(self, plan: Plan, seconds: float) -> float:
        noise = math.exp(self._behaviour.noise * self._random.standard_normal() + self._slowness)
        measured = seconds * self._factor(plan) * noise * (1 + self._disturbance)
        self._pass(measured)
        return measured

    def _pass(self, seconds: float) -> None:
        """Advance the clock and the drift of the machine."""
        behaviour = self._behaviour
        self._seconds += seconds
        kept = math.exp(-seconds / behaviour.drift_seconds)
        other = behaviour.drift * self._random.standard_normal()
        self._slowness = kept * self._slowness + math.sqrt(1 - kept**2) * other

    def _stage(
        self, plan: Plan, steps: tuple[int, ...], rank: int, slower: float, peaks: tuple[int, ...]
    ) -> StageMeasurement:
        where = plan.layout.grid.coordinates(rank)
        load, forward, backward, update = (slower * seconds for seconds in self._truth.stage_seconds(plan, steps, rank))
        return StageMeasurement(
            stage=where.stage,
            data_rank=where.data_rank,
            load_seconds=load,
            forward_seconds=forward,
            backward_seconds=backward,
            optimizer_seconds=update,
            idle_seconds=0.0,
            peak_bytes=peaks[where.stage],
            static_bytes=0,
            tensor_rank=where.tensor_rank,
        )


def _report(stage: StageMeasurement, seconds: list[float], samples: int) -> TrialReport:
    return TrialReport(
        step_seconds=tuple(seconds),
        losses=(1.0,) * len(seconds),
        samples=samples,
        text_tokens=0,
        vision_units=0,
        stage=stage,
    )


class SimulatedRanks:
    """Ranks that have their answer at once."""

    aftermath_seconds = 0.0

    def __init__(self, machine: SimulatedLauncher) -> None:
        self._machine = machine
        self._course: Generator[float, bool | None, Answers | Cause]
        self._step: float | None = None
        self._answers: dict[int, Answer] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        return ()

    def send(self, request: Request) -> None:
        assert isinstance(request.task, Trial)
        self._answers = {}
        self._course = self._machine.steps_and_outcome(request)
        self._go_on(None)
        while self._step is not None and not request.task.steered:
            self._go_on(True)

    def _go_on(self, go_on: bool | None) -> None:
        try:
            self._step = self._course.send(go_on)
        except StopIteration as end:
            self._step = None
            self._answers = _answers(end.value)

    def begun(self) -> set[int]:
        return set(range(self._machine.world_size))

    def next_step(self) -> float | None:
        step, self._step = self._step, None
        return step

    def decide(self, *, go_on: bool) -> None:
        self._go_on(go_on)

    def stop(self, when: Stop) -> None:
        """Only trainings stop."""

    def answers(self) -> dict[int, Answer]:
        return self._answers

    def ended(self) -> dict[int, Crash]:
        return {}

    def end(self) -> None:
        self._answers = {}


def _answers(outcome: Answers | Cause) -> dict[int, Answer]:
    """Return the answers by rank; none if the ranks never answer."""
    reports: dict[int, Report]
    match outcome:
        case Answers():
            reports = dict(enumerate(outcome.reports))
        case Timeout():
            reports = {}
        case cause:
            reports = {cause.rank: FailureReport(cause=cause)}
    lean = Footprint(descriptors=3, threads=1, resident_bytes=0)
    return {rank: Answer(report=report, footprint=lean) for rank, report in reports.items()}


class Undisturbed:
    """Conditions of a simulated machine without other users."""

    def __init__(self, _: Hardware) -> None:
        """On any hardware."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self) -> None:
        pass

    @property
    def conditions(self) -> Conditions:
        return Conditions(
            cores=2, disturbing_cpu=0.0, own_cpu=0.0, disturbing_gpu=False, throttled=(), power_watts=None
        )


class Observed(Undisturbed):
    """Conditions of a simulated machine on which other programs run at times."""

    def __init__(self, machine: SimulatedLauncher, hardware: Hardware) -> None:
        """Observe the machine, on any hardware."""
        super().__init__(hardware)
        self._machine = machine

    @property
    def conditions(self) -> Conditions:
        return replace(super().conditions, disturbing_gpu=self._machine.is_disturbed)


class Clock(Protocol):
    """A simulated machine."""

    def now(self) -> datetime:
        """Return the simulated time."""


class SimulatedLedger(KnownTrials):
    """A ledger in memory, on the clock of the simulated machine."""

    def __init__(self, launcher: Clock, known: Iterable[FinishedTrial] = ()) -> None:
        """`known` are trials of other studies on the same workload."""
        super().__init__(None, known)
        self._launcher = launcher

    def catch_up(self) -> tuple[list[FinishedTrial], list[RunningTrial]]:
        return [], []

    def exclusive(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_left(self, agent_id: str | None) -> bool:
        return True

    def left(self) -> list[FinishedTrial]:
        return [*self.everything()]

    def begin(self, plan: Plan, role: Role, parameters: Mapping[str, Any]) -> RunningTrial:
        number = len(self.trials) + len(self.open)
        trial = RunningTrial(
            id=f"{number:032x}",
            study_id=_STUDY,
            number=number,
            plan=plan,
            role=str(role),
            parameters=parameters,
            started=self._launcher.now(),
            agent_id=None,
        )
        self.open += (trial,)
        return trial

    def put(self, trial: RunningTrial, run_result: RunResult) -> TrialResult:
        return run_result.result(trial.id, self._launcher.now())

    def finish(self, trial: RunningTrial, result: TrialResult) -> FinishedTrial:
        return self._close(trial, result)
