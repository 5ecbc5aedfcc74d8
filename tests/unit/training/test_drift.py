"""The watch on the speed of a training: what it stores, when it reports, and which part it names."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autotune.training.drift import Drift, Patience, Promise, SpeedWatch, greatest_growth
from autotune.training.speed_window import MOST_WINDOWS, SpeedWindow, StepTimes, WindowJoiner
from storage.launch_speed import LaunchWindow
from tests.values.storage import completed
from trials.outcome import Completed
from trials.plan import Layout
from trials.tasks.request import WINDOW_STEPS
from trials.tasks.training.progress import Progress, RankTimes

GRID = Layout(pipeline=2, data=3, zero=1)
LOADS, PASSES = (0.1, 0.1, 0.1, 0.0, 0.0, 0.0), (1.0, 1.0, 1.0, 1.5, 1.5, 1.5)


def step_times(seconds: float, loads: Sequence[float] = LOADS, passes: Sequence[float] = PASSES) -> StepTimes:
    stages = (0, 0, 0, 1, 1, 1)[: len(loads)]
    return StepTimes(seconds=seconds, times=RankTimes.of(stages, loads, passes))


USUAL = step_times(2.0)
PROMISE = Promise(tokens_per_second=800.0, step_times=USUAL.of_step(1 / 1600))


def step(number: int, seconds: float = 2.0, tokens: int = 1600, now: StepTimes = USUAL) -> Progress:
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


def watched(
    steps: Sequence[Progress],
    promise: Promise | None = PROMISE,
    windows: list[LaunchWindow] | None = None,
    curriculum_steps: int = 0,
) -> list[Drift]:
    """Return the reported drifts of a launch with these steps; add its stored windows to `windows`."""
    found: list[Drift] = []
    kept: list[LaunchWindow] = [] if windows is None else windows
    watch = SpeedWatch(
        GRID,
        promise,
        Patience(),
        on_drift=lambda drift, _: found.append(drift),
        on_window=kept.append,
        curriculum_steps=curriculum_steps,
    )
    for each in steps:
        watch.step(each, "a launch")
    watch.end()
    return found


def numbered(*seconds: float) -> list[Progress]:
    return [step(number, each) for number, each in enumerate(seconds, 1)]


def test_a_training_that_is_slower_by_more_than_a_tenth_for_fifty_steps_is_reported_once() -> None:
    (drift,) = watched(numbered(9.0, *20 * [2.0], *120 * [2.5]))
    assert (drift.step, drift.steps) == (71, 50)
    assert (drift.training_samples_per_second, drift.tokens_per_sample) == pytest.approx((6.4, 100.0))
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
def test_what_is_short_or_slight_is_not_reported(seconds: list[float]) -> None:
    assert watched(numbered(*seconds)) == []


def test_a_second_drift_is_reported_after_the_speed_was_back(caplog: pytest.LogCaptureFixture) -> None:
    found = watched(numbered(9.0, *60 * [2.5], *10 * [2.0], *50 * [2.5]))
    assert [drift.step for drift in found] == [51, 121]
    assert caplog.messages == ["the training is no longer slower, since step 62"]


def test_longer_samples_are_not_slower() -> None:
    steps = [step(number, seconds=3.0, tokens=2400) for number in range(1, 100)]
    assert watched(steps) == []


def test_a_window_is_stored_with_its_speed_the_promised_one_and_its_parts() -> None:
    windows: list[LaunchWindow] = []
    watched([step(1, 9.0), *(step(number, seconds=3.0, tokens=2400) for number in range(2, 100))], windows=windows)
    # The last 8 steps are not a whole window: without a stop, as in a crash, they have no times of the ranks.
    assert [(window.first_step, window.last_step) for window in windows] == [
        (first, first + 9) for first in range(2, 90, 10)
    ]
    first = windows[0]
    assert (first.launch_id, first.step_seconds, first.parts.growth) == ("a launch", 3.0, None)
    assert [
        first.training_samples_per_second,
        first.promised_samples_per_second,
        first.tokens_per_second,
    ] == pytest.approx([16 / 3, 16 / 3, 800.0])
    assert [first.parts.loads.greatest, first.parts.other_seconds] == pytest.approx([0.1, 1.5])
    assert [stage.greatest for stage in first.parts.passes] == pytest.approx([1.0, 1.5])
    assert [stage.rank for stage in first.parts.passes] == [0, 3]


def test_the_steps_before_a_stop_are_stored_with_their_number_and_not_judged() -> None:
    windows: list[LaunchWindow] = []
    steps = numbered(9.0, *20 * [2.0], *44 * [2.5])
    assert watched([*steps[:-1], replace(steps[-1], window=USUAL.times)], windows=windows) == []
    assert [(window.first_step, window.last_step, window.steps) for window in windows[-2:]] == [
        (52, 61, 10),
        (62, 65, 4),
    ]
    assert windows[-1].change == pytest.approx(2.0 / 2.5 - 1)


def test_a_slow_window_is_stored_with_the_part_that_grew() -> None:
    windows: list[LaunchWindow] = []
    watched([step(number, 2.6, now=GROWN["communication"]) for number in range(1, 12)], windows=windows)
    (window,) = windows
    assert window.change == pytest.approx(2.0 / 2.6 - 1)
    assert str(window.parts.growth) == "communication: 1.05 s a step instead of 0.5 s"


def test_no_part_is_named_where_none_grew() -> None:
    """The trial of the plan was slower in every part than the training, and yet more is promised."""
    trial = step_times(4.0, [2 * each for each in LOADS], [2 * each for each in PASSES])
    promise = Promise(tokens_per_second=800.0, step_times=trial.of_step(1 / 1600))
    (drift,) = watched(numbered(9.0, *120 * [2.5]), promise)
    assert drift.growth is None
    assert "grew most" not in str(drift)


def window_of(first: int, steps: int = WINDOW_STEPS) -> SpeedWindow:
    return SpeedWindow(
        first_step=first,
        last_step=first + steps - 1,
        step_seconds=steps * (1.0,),
        samples=8 * steps,
        text_tokens=800 * steps,
        times=USUAL.times,
    )


@pytest.mark.parametrize(("steps", "expected"), [(2000, 200), (20_000, 253), (1_000_000, 264)])
def test_a_training_of_any_length_stores_a_few_hundred_windows_that_hold_all_of_its_steps(
    steps: int, expected: int
) -> None:
    joiner = WindowJoiner()
    found = [joiner.add(window_of(first), steps) for first in range(1, steps, WINDOW_STEPS)]
    windows = [window for window in (*found, joiner.rest()) if window is not None]
    assert len(windows) == expected <= MOST_WINDOWS + 8
    assert [window.steps for window in windows[:3]] == ([10, 10, 10] if steps == 2000 else [10, 20, 40])
    assert max(window.steps for window in windows) <= max(WINDOW_STEPS, steps / MOST_WINDOWS + WINDOW_STEPS)
    ends = [0, *(window.last_step for window in windows)]
    assert ends[-1] == steps
    assert [window.first_step for window in windows] == [end + 1 for end in ends[:-1]]


def test_a_plan_without_a_promise_is_compared_with_the_first_steps() -> None:
    windows: list[LaunchWindow] = []
    (drift,) = watched(numbered(9.0, *50 * [2.0], *50 * [2.5]), None, windows)
    assert (drift.step, drift.growth is not None) == (101, True)
    assert {window.promised_samples_per_second for window in windows} == {None}
    assert [window.parts.growth is not None for window in windows] == 5 * [False] + 5 * [True]


@pytest.mark.parametrize("promise", [PROMISE, None], ids=["promised", "not promised"])
def test_the_steps_of_a_curriculum_are_compared_with_nothing(promise: Promise | None) -> None:
    windows: list[LaunchWindow] = []
    short = [step(number, 2.6, now=GROWN["communication"]) for number in range(1, 72)]
    usual = [step(number) for number in range(72, 132)]
    slow = [step(number, 2.6, now=GROWN["communication"]) for number in range(132, 192)]
    (drift,) = watched([*short, *usual, *slow], promise, windows, curriculum_steps=70)
    assert (drift.step, drift.growth is not None) == (181, True)
    assert [window.parts.growth is not None for window in windows] == 13 * [False] + 6 * [True]
    assert [window.promised_samples_per_second is None for window in windows] == [
        window.first_step <= 70 or promise is None for window in windows
    ]


GROWN = {
    "loading": step_times(2.6, loads=(0.7, 0.1, 0.1, 0.0, 0.0, 0.0)),
    "communication": step_times(2.6, passes=(1.0, 1.0, 1.0, 1.5, 1.5, 1.55)),
    "computing on all ranks": step_times(2.6, passes=(1.3, 1.3, 1.3, 1.95, 2.0, 1.95)),
    "computing on the ranks of stage 1": step_times(2.6, passes=(1.0, 1.0, 1.0, 2.1, 2.1, 2.1)),
    "computing on rank 1 of stage 0": step_times(2.6, passes=(1.0, 2.4, 1.0, 1.5, 1.5, 1.5)),
}


@pytest.mark.parametrize(("part", "now"), GROWN.items(), ids=GROWN)
def test_the_part_that_grew_most_is_named(part: str, now: StepTimes) -> None:
    assert greatest_growth(GRID, USUAL, now).part == part


def test_of_two_ranks_the_slow_one_is_named() -> None:
    usual = step_times(2.0, (0.1, 0.1), (1.0, 1.0))
    now = step_times(4.0, (0.1, 0.1), (1.1, 3.0))
    layout = Layout(pipeline=1, data=2, zero=1)
    assert greatest_growth(layout, usual, now).part == "computing on rank 1"


def test_a_report_says_how_much_slower_the_training_and_its_part_are() -> None:
    slow = GROWN["computing on rank 1 of stage 0"]
    (drift,) = watched([step(number, 2.6, now=slow) for number in range(1, 60)])
    assert str(drift) == (
        "the training is slower: 6.2 instead of 8.0 samples/s (-23%) over the 50 steps to 51; "
        "what grew most is computing on rank 1 of stage 0: 2.4 s a step instead of 1 s"
    )


def test_the_pace_of_a_trial_is_that_of_its_steps() -> None:
    outcome = completed()
    assert isinstance(outcome, Completed)
    found = StepTimes.of_measurement(outcome.measurement)  # two steps of 0.5 s and 0.6 s, 9000 tokens
    assert found.seconds == pytest.approx(1.1 / 9000)
    assert found.times.loads.greatest == pytest.approx(0.02 / 9000)
    assert [stage.greatest for stage in found.times.passes] == pytest.approx([0.6 / 9000, 2.6 / 9000])
    assert found.times.busy_seconds == pytest.approx(2.62 / 9000)
