"""What `autotune show` says of a training."""

from dataclasses import replace

from autotune.results.launch_report import ShownLaunch, launch_text
from storage.launch_speed import LaunchWindow
from storage.records import LaunchRecord, LaunchResult
from storage.validity import Change, Verdict
from tests.values.storage import NOON, WORKLOAD, slow_window, window_of


def launch(*windows: LaunchWindow) -> ShownLaunch:
    return training_of(record_of(*windows))


def training_of(record: LaunchRecord, *changes: Change) -> ShownLaunch:
    return ShownLaunch(launch=record, workload=WORKLOAD, changes=changes, place=None)


def record_of(*windows: LaunchWindow) -> LaunchRecord:
    return LaunchRecord(
        id="a launch",
        plan_id="a plan",
        workload_fingerprint="a workload",
        started=NOON,
        promised_samples_per_second=8.0,
        result=LaunchResult(
            launch_id="a launch", status="finished", steps=61, training_samples_per_second=7.2, finished=NOON
        ),
        windows=windows,
    )


def test_a_training_is_shown_with_the_stretches_in_which_it_was_as_promised_and_slower() -> None:
    shown = launch(
        *(window_of("a launch", first) for first in (2, 12)),
        *(slow_window("a launch", first, speed) for first, speed in ((22, 7.0), (32, 5.25))),
        *(window_of("a launch", first) for first in (42, 52)),
    )
    lines = [line.split(maxsplit=4) for line in launch_text(shown).splitlines()]
    assert " ".join(lines[0]) == (
        "Launched 2026-11-20 12:00 UTC: finished after 61 steps, 7.2 samples/s "
        "(promised 8.0 for samples of as many tokens)"
    )
    assert lines[3:] == [
        ["2-21", "8.0", "8.0", "+0%"],
        ["22-41", "6.0", "8.0", "-25%", "communication: 0.75 s a step instead of 0.25 s"],
        ["42-61", "8.0", "8.0", "+0%"],
    ]


def test_the_promise_for_a_training_is_for_samples_of_as_many_tokens() -> None:
    """First 10 s of short samples, which the plan trains at 16 a second, then 20 s of those of its search."""
    short = window_of(
        "a launch",
        2,
        step_seconds=1.0,
        training_samples_per_second=16.0,
        promised_samples_per_second=16.0,
    )
    (first, *_) = launch_text(launch(short, window_of("a launch", 12))).splitlines()
    assert first.endswith("(promised 10.7 for samples of as many tokens)")


def test_a_plan_that_was_never_measured_is_slow_where_a_part_grew() -> None:
    windows = (window_of("a launch"), slow_window("a launch", 12))
    shown = launch(*(replace(window, promised_samples_per_second=None) for window in windows))
    assert [line.split(maxsplit=2)[:2] for line in launch_text(shown).splitlines()[3:]] == [
        ["2-11", "8.0"],
        ["12-21", "6.0"],
    ]


def test_windows_of_a_curriculum_are_apart_from_those_that_were_promised() -> None:
    short, usual = window_of("a launch", promised_samples_per_second=None), window_of("a launch", 12)
    assert [line.split() for line in launch_text(launch(short, usual)).splitlines()[3:]] == [
        ["2-11", "8.0"],
        ["12-21", "8.0", "8.0", "+0%"],
    ]


def test_of_many_stretches_those_that_lost_most_are_shown() -> None:
    windows = [
        slow_window("a launch", first, 4.0 if first > 500 else 7.0) if first % 20 == 2 else window_of("a launch", first)
        for first in range(2, 602, 10)
    ]
    lines = launch_text(launch(*windows)).splitlines()
    shown = [f"{first}-{first + 9}" for first in (442, 462, 482, 502, 522, 542, 562, 582)]
    assert [line.split()[0] for line in lines[3:-1]] == shown
    assert lines[-1] == "52 stretches that lost less are left out; --json has every window"


def test_a_stall_loses_more_than_its_window_usually_takes() -> None:
    """A window with a step of 142 s, and eight times two windows whose steps all take 4 s."""
    stall = slow_window("a launch", 2, 1.0)
    slow = [slow_window("a launch", first + more, 4.0) for first in range(22, 262, 30) for more in (0, 10)]
    usual = [window_of("a launch", first) for first in range(12, 272, 30)]
    lines = launch_text(launch(*sorted((stall, *slow, *usual), key=lambda window: window.first_step))).splitlines()
    assert lines[3].split()[:4] == ["2-11", "1.0", "8.0", "-88%"]


def test_a_training_of_another_database_and_workload_is_shown_as_one() -> None:
    change = Change(field="model.family", then="one", now="another", verdict=Verdict.INVALID)
    line = launch_text(training_of(replace(record_of(), imported_from="host: their.db"), change))
    assert line.startswith(
        "Launched 2026-11-20 12:00 UTC elsewhere, imported from host: their.db, on another workload: "
        f"{WORKLOAD.model.name} on {WORKLOAD.hardware} (model.family was one, now another): finished after 61 steps"
    )


def test_a_launch_without_windows_is_one_line() -> None:
    (line,) = launch_text(launch()).splitlines()
    assert line.endswith("7.2 samples/s (promised 8.0 for the samples of its search)")
