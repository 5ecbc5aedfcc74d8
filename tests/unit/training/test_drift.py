"""The watch on the speed of a training: what it stores, when it reports, and which part it names."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from autotune.training.drift import Drift, Patience, Promise, SpeedWatch, greatest_growth
from autotune.training.speed_window import Pace
from tests.values.storage import completed
from trials.outcome import Completed
from trials.plan import Layout
from trials.tasks.training.progress import SPEED_FILE, WINDOW_STEPS, Progress, RankTimes

GRID = Layout(pipeline=2, data=3, zero=1)
LOADS, PASSES = (0.1, 0.1, 0.1, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.5, 1.5, 1.5)


def pace(seconds: float, loads: Sequence[float] = LOADS, passes: Sequence[float] = PASSES) -> Pace:
    stages = (0, 0, 0, 1, 1, 1)[: len(loads)]
    return Pace(seconds=seconds, times=RankTimes.of(stages, loads, passes))


USUAL = pace(2.0)
PROMISE = Promise(tokens_per_second=800.0, pace=USUAL.of_step(1 / 1600))


def step(number: int, seconds: float = 2.0, tokens: int = 1600, now: Pace = USUAL) -> Progress:
    return Progress(
        step=number,
        of=500,
        loss=1.0,
        seconds=seconds,
        samples=16,
        text_tokens=tokens,
        # The first step warms up.
        window=None if (number - 1) % WINDOW_STEPS or number == 1 else now.times,
    )


def watched(folder: Path, steps: Sequence[Progress], promise: Promise | None = PROMISE) -> list[Drift]:
    """Return the reported drifts of a launch with these steps."""
    found: list[Drift] = []
    watch = SpeedWatch(GRID, promise, lambda drift, _: found.append(drift), Patience())
    for each in steps:
        watch.step(each, "a launch", folder)
    return found


def numbered(*seconds: float) -> list[Progress]:
    return [step(number, each) for number, each in enumerate(seconds, 1)]


def test_a_training_that_is_slower_by_more_than_a_tenth_for_fifty_steps_is_reported_once(tmp_path: Path) -> None:
    (drift,) = watched(tmp_path, numbered(9.0, *20 * [2.0], *120 * [2.5]))
    assert (drift.step, drift.steps) == (71, 50)
    assert drift.samples_per_second == pytest.approx(6.4)
    assert drift.promised_samples_per_second == pytest.approx(8.0)


@pytest.mark.parametrize(
    "seconds",
    [
        [9.0, *200 * [2.15]],
        [9.0, *44 * [2.5], *100 * [2.0]],
        [*40 * [2.0], 300.0, *100 * [2.0]],
        [9.0, *40 * [2.5], *10 * [2.0], *40 * [2.5]],
    ],
    ids=["hardly slower", "44 steps", "one long pause", "with a fast window between"],
)
def test_what_is_short_or_slight_is_not_reported(tmp_path: Path, seconds: list[float]) -> None:
    assert watched(tmp_path, numbered(*seconds)) == []


def test_a_second_drift_is_reported_after_the_speed_was_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = watched(tmp_path, numbered(9.0, *60 * [2.5], *10 * [2.0], *50 * [2.5]))
    assert [drift.step for drift in found] == [51, 121]
    assert caplog.messages == ["the training is no longer slower, since step 62"]


def test_longer_samples_are_not_slower(tmp_path: Path) -> None:
    steps = [step(number, seconds=3.0, tokens=2400) for number in range(1, 100)]
    assert watched(tmp_path, steps) == []
    lines = [json.loads(line) for line in (tmp_path / SPEED_FILE).read_text().splitlines()]
    assert len(lines) == 9
    assert lines[0] == {
        "launch": "a launch",
        "step": 11,
        "steps": 10,
        "samples_per_second": pytest.approx(16 / 3),
        "promised_samples_per_second": pytest.approx(16 / 3),
    }


def test_a_plan_without_a_promise_is_compared_with_the_first_steps(tmp_path: Path) -> None:
    (drift,) = watched(tmp_path, numbered(9.0, *50 * [2.0], *50 * [2.5]), promise=None)
    assert (drift.step, drift.growth is not None) == (101, True)
    lines = (tmp_path / SPEED_FILE).read_text().splitlines()
    assert {json.loads(line)["promised_samples_per_second"] for line in lines} == {None}


GROWN = {
    "loading": pace(2.6, loads=(0.7, 0.1, 0.1, 0.0, 0.0, 0.0)),
    "communication": pace(2.6, passes=(1.0, 1.0, 1.0, 1.5, 1.5, 1.55)),
    "computing on all ranks": pace(2.6, passes=(1.3, 1.3, 1.3, 1.95, 2.0, 1.95)),
    "computing on the ranks of stage 1": pace(2.6, passes=(1.0, 1.0, 1.0, 2.1, 2.1, 2.1)),
    "computing on rank 1 of stage 0": pace(2.6, passes=(1.0, 2.4, 1.0, 1.5, 1.5, 1.5)),
}


@pytest.mark.parametrize(("part", "now"), GROWN.items(), ids=GROWN)
def test_the_part_that_grew_most_is_named(part: str, now: Pace) -> None:
    assert greatest_growth(GRID, USUAL, now).part == part


def test_of_two_ranks_the_slow_one_is_named() -> None:
    usual = pace(2.0, (0.1, 0.1), (1.0, 1.0))
    now = pace(4.0, (0.1, 0.1), (1.1, 3.0))
    layout = Layout(pipeline=1, data=2, zero=1)
    assert greatest_growth(layout, usual, now).part == "computing on rank 1"


def test_a_report_says_how_much_slower_the_training_and_its_part_are(tmp_path: Path) -> None:
    slow = GROWN["computing on rank 1 of stage 0"]
    (drift,) = watched(tmp_path, [step(number, 2.6, now=slow) for number in range(1, 60)])
    assert str(drift) == (
        "the training is slower: 6.2 instead of 8.0 samples/s (-23%) over the 50 steps to 51; "
        "what grew most is computing on rank 1 of stage 0: 2.4 s a step instead of 1 s"
    )


def test_the_pace_of_a_trial_is_that_of_its_steps() -> None:
    outcome = completed()
    assert isinstance(outcome, Completed)
    found = Pace.of_measurement(outcome.measurement)  # two steps of 0.5 s and 0.6 s, 9000 tokens
    assert found.seconds == pytest.approx(1.1 / 9000)
    assert found.times.loads.greatest == pytest.approx(0.02 / 9000)
    assert [stage.greatest for stage in found.times.passes] == pytest.approx([0.6 / 9000, 2.6 / 9000])
    assert found.times.busy_seconds == pytest.approx(2.62 / 9000)
