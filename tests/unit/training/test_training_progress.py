"""The file of finished steps: what is written to it, and what is read from it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from trials import wire
from trials.plan import Layout
from trials.tasks.training.progress import (
    PROGRESS_FILE,
    Evaluated,
    Line,
    Progress,
    ProgressReader,
    RankTimes,
    append_line,
    drop_steps_after,
    read_lines,
)
from trials.tasks.training.spread import Spread
from trials.tasks.training.training import RankClock


def test_foreign_and_torn_lines_of_the_progress_file_are_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / PROGRESS_FILE
    path.write_bytes(b'{"event": "theirs"}\n{"step": 1, "of')
    seen: list[Line] = []
    reader = ProgressReader(path, seen.append)
    step = Progress(step=2, of=6, loss=1.5, seconds=1, samples=8)
    append_line(path, step)
    with path.open("ab") as file:
        file.write(b"\xff\xfe not text\n[]\n")
    append_line(path, replace(step, step=3))
    reader.look()
    assert [each.step for each in seen] == [2, 3]
    assert caplog.text.count("is ignored") == 2
    assert path.read_bytes().startswith(b'{"event": "theirs"}\n{"step": 1, "of\n')


def test_the_wait_for_data_is_a_share_of_the_steps_after_the_first(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE
    reader = ProgressReader(path, lambda _: None)
    assert reader.data_wait_share is None
    first = Progress(step=1, of=3, loss=1.5, seconds=9, samples=8, data_wait_seconds=8)
    for step in (first, replace(first, step=2, seconds=1, data_wait_seconds=0.25), replace(first, step=3, seconds=3)):
        append_line(path, step if step.step < 3 else replace(step, data_wait_seconds=0.75))
    reader.look()
    assert reader.data_wait_share == 0.25


def test_the_tokens_of_a_sample_are_those_of_the_steps_after_the_first(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE
    reader = ProgressReader(path, lambda _: None)
    assert reader.tokens_per_sample is None
    first = Progress(step=1, of=3, loss=1.5, seconds=9, samples=8, text_tokens=9000)
    for step in (first, replace(first, step=2, text_tokens=800), replace(first, step=3, samples=4, text_tokens=1600)):
        append_line(path, step)
    reader.look()
    assert reader.tokens_per_sample == 200


def test_steps_of_older_versions_have_no_wait_for_data(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE
    path.write_text('{"step": 1, "of": 6, "loss": 1.5, "seconds": 1, "samples": 8}\n')
    assert list(read_lines(path)) == [Progress(step=1, of=6, loss=1.5, seconds=1, samples=8, data_wait_seconds=0.0)]


@pytest.mark.parametrize(
    "change", ['"data_wait_seconds": -1', '"seconds": 0', '"seconds": -1.5', '"step": 0', '"samples": -8']
)
def test_a_step_that_there_cannot_be_is_passed_over(tmp_path: Path, change: str) -> None:
    path = tmp_path / PROGRESS_FILE
    seen: list[Line] = []
    reader = ProgressReader(path, seen.append)
    step = Progress(step=1, of=6, loss=1.5, seconds=1, samples=8)
    append_line(path, step)
    with path.open("a") as file:
        file.write(json.dumps(asdict(step) | json.loads(f"{{{change}}}")) + "\n")
    reader.look()
    assert seen == [step]
    assert reader.training_samples_per_second is None


@pytest.mark.parametrize("change", [{"seconds": -1}, {"step": 0}, {"samples": 0}])
def test_an_evaluation_that_there_cannot_be_is_passed_over(tmp_path: Path, change: dict[str, int]) -> None:
    path = tmp_path / PROGRESS_FILE
    found = Evaluated(step=1, of=6, evaluation_loss=1.5, seconds=1, samples=8)
    append_line(path, found)
    with path.open("a") as file:
        file.write(json.dumps(asdict(found) | change) + "\n")
    assert list(read_lines(path)) == [found]


def test_a_full_disk_does_not_end_a_training_that_reports_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / PROGRESS_FILE).symlink_to("/dev/full")
    append_line(tmp_path / PROGRESS_FILE, Progress(step=2, of=6, loss=1, seconds=1, samples=8))
    assert "step 2 is not in" in caplog.text
    assert "No space left on device" in caplog.text


def test_evaluations_stand_between_the_steps_and_are_dropped_with_them(tmp_path: Path) -> None:
    path = tmp_path / PROGRESS_FILE
    seen: list[Line] = []
    reader = ProgressReader(path, seen.append)
    steps = [Progress(step=number, of=6, loss=1.5, seconds=1, samples=8) for number in (1, 2, 3)]
    evaluations = [Evaluated(step=number, of=6, evaluation_loss=2.5, seconds=9, samples=4) for number in (2, 3)]
    written: list[Line] = [steps[0], steps[1], evaluations[0], steps[2], evaluations[1]]
    for line in written:
        append_line(path, line)
    reader.look()
    assert seen == written == list(read_lines(path))
    assert (reader.count, reader.steps) == (3, 3)
    assert reader.training_samples_per_second == 8
    drop_steps_after(path, 2)
    assert list(read_lines(path)) == written[:3]


RANKS = 4096
STAGES = [rank // 512 for rank in range(RANKS)]


def test_a_line_needs_no_more_room_for_many_ranks() -> None:
    times = RankTimes.of(STAGES, [0.001 * rank for rank in range(RANKS)], [1 / 3 + rank for rank in range(RANKS)])
    step = Progress(step=10**6, of=10**6, loss=1 / 3, seconds=1 / 3, samples=4096, window=times)
    assert len(wire.encode(step)) < 1000
    assert times.passes[-1] == Spread(median=3839 + 1 / 3, greatest=4095 + 1 / 3, rank=4095)
    assert times.loads.rank == 4095
    assert times.busy_seconds == pytest.approx(4.095 + 4095 + 1 / 3)


def test_means_of_windows_are_weighted_and_name_the_rank_that_was_slowest_most_often() -> None:
    windows = [RankTimes.of((0, 0), (0.0, 0.0), passes) for passes in ((2.0, 1.0), (1.0, 4.0), (3.0, 1.0))]
    mean = RankTimes.mean(windows, (1, 3, 1))
    assert mean.passes == (Spread(median=1.0, greatest=(2 + 3 * 4 + 3) / 5, rank=1),)
    assert mean.busy_seconds == (2 + 3 * 4 + 3) / 5


def test_a_clock_leaves_out_the_first_step_and_ends_a_window_with_the_launch() -> None:
    clock = RankClock(Layout(pipeline=2, data=1, zero=0), window_steps=2)
    steps = [torch.tensor([[0.5 * number, 1.0], [0.0, 2.0 * number]]) for number in range(6)]
    found = [clock.add(times, is_last=number == 5) for number, times in enumerate(steps)]
    assert [window is not None for window in found] == [False, False, True, False, True, True]
    assert found[2] == RankTimes(
        loads=Spread(median=0.0, greatest=0.75, rank=0),
        passes=(Spread(median=1.0, greatest=1.0, rank=0), Spread(median=3.0, greatest=3.0, rank=1)),
        busy_seconds=3.0,
    )
    assert found[5] == RankTimes.of((0, 1), (2.5, 0.0), (1.0, 10.0))
