import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.machine.conditions import Conditions
from autotune.prediction.predictor import Prediction
from autotune.prediction.trial_steps import warmup_of
from autotune.search.execution.runner import Runner, estimate_epoch
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import Role
from tests.machines.simulated import Behaviour, SimulatedLauncher, Undisturbed
from tests.machines.simulated_nvml import simulate
from tests.values import storage as storage_values
from tests.values.data import index_of
from tests.values.search import MEBI, predictor_of, prepared_of, runner_of
from tests.values.training import plan_of
from trials.outcome import Cause, Completed, Failed, Measurement, OutOfMemory, Rejected, Timeout
from trials.plan import Levelled, Packed, Padded, Plan
from trials.run.pool import Answers
from trials.stage import Recomputed
from trials.tasks.answer import TrialReport
from trials.tasks.request import Request, Trial

PLAN = plan_of("4+0", "1+4", packing=Packed(qv=12, qt=600, qv_min=12, qt_min=500))
PREDICTOR = predictor_of()
OF_TWO_LENGTHS = predictor_of(index=index_of([(1, 50), (1, 570), (1, 50)] * 200), batch=24)


class Recorder(SimulatedLauncher):
    """Records the tasks that it is given."""

    tasks: tuple[Trial, ...] = ()

    def ask(self, request: Request, *arguments: Any, **options: Any) -> Answers:
        assert isinstance(request.task, Trial)
        self.tasks += (request.task,)
        answer = super().ask(request, *arguments, **options)
        assert isinstance(answer, Answers)
        return answer


class Reporting(Recorder):
    """Changes the reports of the ranks."""

    def __init__(self, change: Callable[[TrialReport], TrialReport]) -> None:
        super().__init__(PREDICTOR)
        self._change = change

    def ask(self, request: Request, *arguments: Any, **options: Any) -> Answers:
        reports = super().ask(request, *arguments, **options).reports
        return Answers(reports=tuple(self._change(report) for report in reports if isinstance(report, TrialReport)))


def measurement(steps: tuple[int, ...], seconds: tuple[float, ...]) -> Measurement:
    outcome = storage_values.completed()
    assert isinstance(outcome, Completed)
    return replace(outcome.measurement, steps=steps, step_seconds=seconds)


def prediction(*seconds: float) -> Prediction:
    samples = np.full(len(seconds), 16)
    return replace(PREDICTOR.predict(PLAN), step_seconds=np.array(seconds), step_samples=samples)


@given(st.lists(st.floats(0.1, 10), min_size=3, max_size=20), st.floats(0.2, 5), st.data())
def test_a_machine_that_is_slower_by_one_factor_is_estimated_exactly(
    predicted: list[float], factor: float, data: st.DataObject
) -> None:
    steps = tuple(sorted(data.draw(st.sets(st.integers(0, len(predicted) - 1), min_size=2))))
    measured = tuple(predicted[step] * factor for step in steps)
    seconds, error = estimate_epoch(measurement(steps, measured), prediction(*predicted))
    assert seconds == pytest.approx(sum(predicted) * factor)
    assert error == pytest.approx(0, abs=1e-6 * seconds)


def test_the_error_is_that_of_the_mean_ratio_of_measured_to_predicted() -> None:
    seconds, error = estimate_epoch(measurement((0, 2), (2.2, 1.8)), prediction(2.0, 6.0, 2.0))
    assert seconds == pytest.approx(10.0)
    assert error == pytest.approx(10.0 * np.std([1.1, 0.9], ddof=1) / np.sqrt(2))


def test_the_estimate_of_all_steps_is_their_sum() -> None:
    assert estimate_epoch(measurement((0, 1), (3.0, 1.0)), prediction(1.0, 5.0))[0] == pytest.approx(4.0)


def test_a_single_step_has_no_error_of_its_own() -> None:
    seconds, error = estimate_epoch(measurement((1,), (3.0,)), prediction(1.0, 5.0, 4.0))
    assert (seconds, error) == (6.0, 0.0)


def test_the_heaviest_and_the_costliest_step_warm_up_and_the_most_typical_ones_are_timed(tmp_path: Path) -> None:
    pool = Recorder(PREDICTOR)
    runner_of(tmp_path, pool, warmup_steps=2, timed_steps=3).run(PLAN)
    seconds, samples = PREDICTOR.predict(PLAN).step_seconds, PREDICTOR.predict(PLAN).step_samples
    (task,) = pool.tasks
    assert task.warmup_steps == warmup_of(PREDICTOR.predict(PLAN), 2)
    assert not set(task.warmup_steps) & set(task.timed_steps)
    assert list(task.timed_steps) == sorted(task.timed_steps)
    far = np.abs(seconds / seconds.mean() - 1) + np.abs(samples / samples.mean() - 1)
    others = [step for step in range(len(seconds)) if step not in (*task.warmup_steps, *task.timed_steps)]
    assert max(far[list(task.timed_steps)]) <= min(far[others])


@pytest.mark.parametrize(
    ("batch", "steps", "warmup", "timed"),
    [(240, 1, 1, 1), (120, 2, 1, 1), (120, 2, 3, 1), (80, 3, 1, 2), (80, 3, 0, 3)],
)
def test_an_epoch_of_few_steps_is_measured_all_the_same(
    tmp_path: Path, batch: int, steps: int, warmup: int, timed: int
) -> None:
    predictor = predictor_of(batch=batch)
    plan = replace(PLAN, packing=Padded(samples=4))
    assert len(predictor.predict(plan).step_seconds) == steps
    pool = Recorder(predictor)
    result = runner_of(tmp_path, pool, predictor=predictor, warmup_steps=warmup, timed_steps=3).run(plan)
    assert (len(pool.tasks[0].warmup_steps), len(pool.tasks[0].timed_steps)) == (min(warmup, steps), timed)
    assert result.epoch_seconds == pytest.approx(predictor.predict(plan).epoch_seconds, rel=0.05)


def whole_steps(*, whole: bool) -> Plan:
    """Return a plan with levels of short and of long samples, in steps of their own or in all of them."""
    short, long = (Packed(qv=12, qt=qt, qv_min=12, qt_min=qt) for qt in (150, 600))
    nothing = (Recomputed(vision=0, language=0),)
    return replace(
        PLAN,
        packing=Levelled(levels=(short, long), whole_steps=whole),
        stages=tuple(replace(stage, further_levels=nothing) for stage in PLAN.stages),
    )


def test_a_plan_with_steps_of_like_samples_is_rejected(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, SimulatedLauncher(PREDICTOR), predictor=OF_TWO_LENGTHS)
    assert runner.rejection(whole_steps(whole=False)) is None
    rejected = runner.rejection(whole_steps(whole=True))
    assert rejected is not None
    said = r"it changes what is learned: the variance of length between steps is \d+\.\d\d times that of random order"
    assert re.match(said, rejected.reason)


def test_a_baseline_with_steps_of_like_samples_is_compared_and_a_warning_says_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(tmp_path, SimulatedLauncher(PREDICTOR), predictor=OF_TWO_LENGTHS)
    plan = whole_steps(whole=True)
    assert runner.rejection(plan, Role.CONFIRM) is None
    assert not caplog.records
    assert runner.rejection(plan, Role.HBP) is None
    (said,) = (each.getMessage() for each in caplog.records if each.levelname == "WARNING")
    assert said.startswith("baseline hbp is only compared, since it changes what is learned: the variance of length")
    assert runner.rejection(plan, Role.INHERITED) is not None


class Uneven(Recorder):
    """Ranks of which the later ones have less work, and wait for the first one in their update."""

    def ask(self, request: Request, *arguments: Any, **options: Any) -> Answers:
        reports = []
        for report in super().ask(request, *arguments, **options).reports:
            assert isinstance(report, TrialReport)
            update = 0.5 + 10 * report.stage.stage + report.stage.data_rank
            stage = replace(report.stage, optimizer_seconds=update, idle_seconds=0.25)
            reports.append(replace(report, stage=stage))
        return Answers(reports=tuple(reports))


def test_waiting_inside_the_update_counts_as_waiting(tmp_path: Path) -> None:
    plan = plan_of("4+0", "1+4", data=2, packing=PLAN.packing)
    outcome = runner_of(tmp_path, Uneven(PREDICTOR)).run(plan).outcome
    assert isinstance(outcome, Completed)
    ranks = {(rank.stage, rank.data_rank): rank for rank in outcome.measurement.stages}
    assert {where: (rank.optimizer_seconds, rank.idle_seconds) for where, rank in ranks.items()} == {
        (0, 0): (0.5, 0.25),
        (0, 1): (0.5, 1.25),
        (1, 0): (10.5, 0.25),
        (1, 1): (10.5, 1.25),
    }


def test_a_completed_trial_says_what_an_epoch_takes(tmp_path: Path) -> None:
    result = runner_of(tmp_path, SimulatedLauncher(PREDICTOR, factor_of=lambda _: 1.5)).run(PLAN)
    assert isinstance(result.outcome, Completed)
    assert len(result.outcome.measurement.stages) == 2
    assert result.epoch_seconds == pytest.approx(1.5 * PREDICTOR.predict(PLAN).epoch_seconds, rel=0.03)
    assert result.epoch_seconds_error is not None
    assert 0 < result.epoch_seconds_error < 0.03 * PREDICTOR.predict(PLAN).epoch_seconds


def conditions(disturbing_gpu: bool, power_watts: float | None = None) -> Conditions:
    return Conditions(
        cores=2,
        disturbing_cpu=0.0,
        own_cpu=2.0,
        disturbing_gpu=disturbing_gpu,
        throttled=(),
        power_watts=power_watts,
    )


@pytest.mark.parametrize(
    ("disturbed", "runs", "disturbance"),
    [
        ((False,), 1, None),
        ((True, False), 2, None),
        ((True, True), 2, "another process computed on the devices"),
    ],
    ids=["never", "once", "twice"],
)
def test_a_disturbed_trial_is_run_once_more_and_marked_when_that_is_disturbed_too(
    tmp_path: Path, disturbed: tuple[bool, ...], runs: int, disturbance: str | None
) -> None:
    machine = iter([conditions(disturbing, 100.0 * run) for run, disturbing in enumerate(disturbed, 1)])

    class OtherMachine(Undisturbed):
        @property
        def conditions(self) -> Conditions:
            return next(machine)

    pool = SimulatedLauncher(PREDICTOR)
    result = Runner(prepared_of(tmp_path), CalibratedPredictor(PREDICTOR), pool, OtherMachine).run(PLAN)
    assert isinstance(result.outcome, Completed)
    assert pool.asked == [PLAN] * runs
    timed = sum(result.outcome.measurement.step_seconds)
    assert result.disturbance == disturbance
    assert result.energy_joules == pytest.approx(100.0 * runs * timed)
    assert [run.disturbance for run in result.disturbed] == ["another process computed on the devices"] * (runs - 1)
    assert result.seconds is not None


def test_a_trial_on_a_device_that_is_slowed_down_is_run_once_more_and_the_reason_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(monkeypatch)
    slowdown = pynvml.nvmlClocksEventReasonHwThermalSlowdown
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCurrentClocksEventReasons", lambda handle: slowdown * int(handle))
    pool = SimulatedLauncher(PREDICTOR)
    result = Runner(prepared_of(tmp_path), CalibratedPredictor(PREDICTOR), pool).run(PLAN)
    assert pool.asked == [PLAN] * 2
    assert result.disturbance == "the devices were slowed down: thermal slowdown by the hardware"


@pytest.mark.parametrize("disturbing_gpu", [False, True])
def test_memory_is_only_taken_by_who_computes_on_the_devices(tmp_path: Path, disturbing_gpu: bool) -> None:
    class Loaded(Undisturbed):
        @property
        def conditions(self) -> Conditions:
            return replace(conditions(disturbing_gpu), disturbing_cpu=1e3)

    def disturbance_with(cause: Cause) -> str | None:
        pool = SimulatedLauncher(PREDICTOR, cause_of=lambda _: cause)
        result = Runner(prepared_of(tmp_path), CalibratedPredictor(PREDICTOR), pool, Loaded).run(PLAN)
        assert result.outcome == Failed(cause=cause)
        return result.disturbance

    short = disturbance_with(OutOfMemory(stage=0, rank=0, needed_bytes=2, limit_bytes=1))
    assert (short is not None) == disturbing_gpu
    assert disturbance_with(Timeout(seconds=5)) is not None


def test_on_a_machine_that_is_always_disturbed_only_the_first_trial_is_run_again(tmp_path: Path) -> None:
    class Shared(Undisturbed):
        @property
        def conditions(self) -> Conditions:
            return conditions(disturbing_gpu=True)

    launcher = SimulatedLauncher(PREDICTOR)
    runner = Runner(prepared_of(tmp_path), CalibratedPredictor(PREDICTOR), launcher, Shared)
    assert [runner.run(PLAN).disturbance is not None for _ in range(2)] == [True, True]
    assert len(launcher.asked) == 3


def steps_of(folder: Path, noise: float, **search: Any) -> int:
    """Return the number of steps that a trial timed on a machine with that noise."""
    launcher = SimulatedLauncher(PREDICTOR, Behaviour(noise=noise))
    outcome = runner_of(folder, launcher, **search).run(PLAN).outcome
    assert isinstance(outcome, Completed)
    assert not outcome.shortened
    return len(outcome.measurement.step_seconds)


def test_a_trial_times_fewer_steps_once_their_mean_is_sure(tmp_path: Path) -> None:
    assert steps_of(tmp_path, 0.001, timed_steps=8, step_error=0.01) == 3
    assert 3 < steps_of(tmp_path, 0.05, timed_steps=8, step_error=0.02) <= 8
    assert steps_of(tmp_path, 0.001, timed_steps=8, step_error=0.0) == 8


def test_a_trial_that_need_not_go_on_is_shortened(tmp_path: Path) -> None:
    estimates: list[float] = []

    def steps(seconds: float) -> bool:
        estimates.append(seconds)
        return len(estimates) < 2

    launcher = SimulatedLauncher(PREDICTOR, factor_of=lambda _: 1.5)
    result = runner_of(tmp_path, launcher, timed_steps=8, step_error=0.0).run(PLAN, steps)
    assert isinstance(result.outcome, Completed)
    assert result.outcome.shortened
    assert len(result.outcome.measurement.step_seconds) == len(result.outcome.measurement.steps) == 2
    whole = 1.5 * PREDICTOR.epoch_seconds(PLAN)
    assert estimates == pytest.approx([whole, whole], rel=0.05)
    assert result.epoch_seconds == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize(("end", "shortened"), [(3, True), (4, False)])
def test_a_trial_that_timed_all_of_its_steps_is_not_shortened(end: int, shortened: bool, tmp_path: Path) -> None:
    answers = iter([True] * (end - 1) + [False])
    runner = runner_of(tmp_path, SimulatedLauncher(PREDICTOR), timed_steps=4, step_error=0.0)
    outcome = runner.run(PLAN, lambda _: next(answers)).outcome
    assert isinstance(outcome, Completed)
    assert (len(outcome.measurement.step_seconds), outcome.shortened) == (end, shortened)


def test_a_disturbed_trial_is_repeated_to_its_end(tmp_path: Path) -> None:
    machine = iter([conditions(disturbing_gpu=True), conditions(disturbing_gpu=False)])

    class OnceDisturbed(Undisturbed):
        @property
        def conditions(self) -> Conditions:
            return next(machine)

    prepared = prepared_of(tmp_path, timed_steps=4, step_error=0.0)
    runner = Runner(prepared, CalibratedPredictor(PREDICTOR), SimulatedLauncher(PREDICTOR), OnceDisturbed)
    outcome = runner.run(PLAN, lambda _: False).outcome
    assert isinstance(outcome, Completed)
    assert not outcome.shortened
    assert len(outcome.measurement.step_seconds) == 4


def test_a_step_takes_as_long_as_its_slowest_rank(tmp_path: Path) -> None:
    seconds = {0: (1.0, 4.0), 1: (3.0, 2.0)}
    uneven = Reporting(lambda report: replace(report, step_seconds=seconds[report.stage.stage]))
    outcome = runner_of(tmp_path, uneven).run(PLAN).outcome
    assert isinstance(outcome, Completed)
    assert outcome.measurement.step_seconds == (3.0, 4.0)


def test_a_trial_that_ended_early_is_measured_by_the_steps_that_ran(tmp_path: Path) -> None:
    pool = Reporting(lambda report: replace(report, step_seconds=report.step_seconds[:2], losses=report.losses[:2]))
    outcome = runner_of(tmp_path, pool, timed_steps=3).run(PLAN).outcome
    assert isinstance(outcome, Completed)
    assert len(pool.tasks[0].timed_steps) == 3
    assert outcome.measurement.steps == pool.tasks[0].timed_steps[:2]


def test_samples_that_trials_cannot_read_are_told_at_the_first_and_when_they_are_twice_as_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = runner_of(tmp_path, Reporting(lambda report: replace(report, blank_samples=3, blank_reason="a:5: gone")))
    for _ in range(4):
        runner.run(PLAN)
    said = rf"until that of plan {PLAN.id}, (\d+) samples could not be read .*blank one[s]? \(the first: a:5: gone\); "
    counts = [re.findall(said, message) for message in caplog.messages]
    assert [count for found in counts for count in found] == ["3", "6", "12"]


def test_a_failure_of_the_ranks_is_the_outcome(tmp_path: Path) -> None:
    cause = OutOfMemory(stage=0, rank=0, needed_bytes=3, limit_bytes=2)
    result = runner_of(tmp_path, SimulatedLauncher(PREDICTOR, cause_of=lambda _: cause)).run(PLAN)
    assert (result.outcome, result.epoch_seconds) == (Failed(cause=cause), None)


def rejection(folder: Path, plan: Plan, memory_limit_bytes: int = 1 << 40) -> str | None:
    pool = SimulatedLauncher(PREDICTOR)
    rejected = runner_of(folder, pool, memory_limit_bytes).rejection(plan)
    assert pool.asked == []
    return rejected.reason if isinstance(rejected, Rejected) else None


def test_a_plan_that_can_run_is_not_rejected(tmp_path: Path) -> None:
    assert rejection(tmp_path, PLAN) is None


def test_a_plan_of_another_model_is_rejected(tmp_path: Path) -> None:
    assert rejection(tmp_path, plan_of("5+5")) == "stages hold 5 language layers but the model has 4; remove 1"


def test_a_plan_that_misses_the_global_batch_is_rejected(tmp_path: Path) -> None:
    reason = rejection(tmp_path, replace(PLAN, packing=Padded(samples=12)))
    assert reason == "its steps miss the global batch by 25%"


def test_a_plan_certainly_above_the_memory_is_rejected_and_one_near_the_limit_is_run(tmp_path: Path) -> None:
    stages = CalibratedPredictor(PREDICTOR).predict(PLAN).stage_memory
    fullest = max(range(2), key=lambda stage: stages[stage].low)
    limit = round(stages[fullest].low) - MEBI
    assert rejection(tmp_path, PLAN, round(stages[fullest].low) + MEBI) is None
    assert rejection(tmp_path, PLAN, limit) == (
        f"stage {fullest} is predicted to need {stages[fullest].expected / MEBI:.0f} MiB, "
        f"{stages[fullest].low / MEBI:.0f} MiB at least, limit {limit / MEBI:.0f} MiB"
    )
