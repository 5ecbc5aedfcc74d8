"""From which checkpoint of its output folder a training goes on, and what becomes of the others."""

import json
import shutil
from pathlib import Path

import pytest

from tests.unit.training.test_training_output import PLAN, SETTINGS, names, write_checkpoint, zero
from trials.errors import OutputTaken
from trials.tasks.training.output import (
    STATE_FILE,
    TrainingState,
    checkpoint_folder,
    has_checkpoint_after,
    open_output,
    partial_folder,
    publish,
)
from trials.tasks.training.progress import PROGRESS_FILE, Progress, append_line


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: zero(folder / "stage-0.safetensors"), "stage-0.safetensors has changed since it was written"),
        (lambda folder: cut(folder / "stage-0.safetensors"), "stage-0.safetensors has 16 bytes instead of 17"),
        (lambda folder: (folder / "stage-0.safetensors").unlink(), "stage-0.safetensors cannot be read (No such file"),
        (lambda folder: zero(folder / "state.json"), "state.json cannot be read"),
        (lambda folder: (folder / "state.json").unlink(), "state.json cannot be read"),
    ],
    ids=["zeroed", "cut", "missing", "state zeroed", "state missing"],
)
def test_a_broken_checkpoint_is_skipped_and_the_previous_one_is_used(
    damage: object, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert callable(damage)
    opened = open_output(tmp_path, SETTINGS, PLAN)
    for steps in (2, 4):
        write_checkpoint(tmp_path, opened, steps)
        append_line(tmp_path / PROGRESS_FILE, Progress(step=steps, of=6, loss=1, seconds=1, samples=8))
    damage(tmp_path / "checkpoint-4")
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 2
    assert message in caplog.text
    assert "so checkpoint-4 is not used" in caplog.text
    assert f"of a step that is trained again; it was renamed to {tmp_path / 'checkpoint-4.old-1'}" in caplog.text
    steps_left = [json.loads(line)["step"] for line in (tmp_path / PROGRESS_FILE).read_text().splitlines()]
    assert steps_left == [2]


def test_a_training_whose_checkpoints_are_all_broken_does_not_start_again_by_itself(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    zero(write_checkpoint(tmp_path, opened, 2) / "stage-0.safetensors")
    step = Progress(step=2, of=6, loss=1, seconds=1, samples=8)
    append_line(tmp_path / PROGRESS_FILE, step)
    with pytest.raises(OutputTaken, match=r"no checkpoint in .* can be used, checkpoint-2 included; restore one"):
        open_output(tmp_path, SETTINGS, PLAN)
    assert (tmp_path / PROGRESS_FILE).read_text()


@pytest.mark.parametrize("keep", [1, 2])
def test_checkpoints_after_the_one_that_is_used_neither_count_nor_come_back(keep: int, tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    for steps in (10, 20, 30):
        write_checkpoint(tmp_path, opened, steps, keep=3)
    damaged = tmp_path / "checkpoint-20" / "stage-0.safetensors"
    cut(damaged)
    unread = (tmp_path / "checkpoint-30" / STATE_FILE).rename(tmp_path / "not readable for a while")
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 10
    assert not has_checkpoint_after(tmp_path, 10)
    unread.rename(tmp_path / "checkpoint-30.old-1" / STATE_FILE)
    for steps in (12, 14):
        write_checkpoint(tmp_path, opened, steps, keep)
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 14
    left = ["checkpoint-12", "checkpoint-14"][-keep:]
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*[0-9]")) == sorted(
        [*left, "checkpoint-20.old-1", "checkpoint-30.old-1"]
    )


def test_a_checkpoint_after_the_one_just_written_takes_no_place_of_it(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    write_checkpoint(tmp_path, opened, 20, keep=1)
    for steps in (12, 14):
        write_checkpoint(tmp_path, opened, steps, keep=1)
    assert names(tmp_path) == ["autotune.json", "checkpoint-14", "checkpoint-20"]


def test_a_training_goes_on_from_a_checkpoint_that_was_moved_and_linked(tmp_path: Path) -> None:
    output = tmp_path / "output"
    opened = open_output(output, SETTINGS, PLAN)
    for steps in (2, 4):
        moved = write_checkpoint(output, opened, steps).rename(tmp_path / f"moved-{steps}")
        checkpoint_folder(output, steps).symlink_to(moved)
    assert open_output(output, SETTINGS, PLAN).steps == 4
    write_checkpoint(output, opened, 6, keep=1)
    assert names(tmp_path / "moved-2") == names(tmp_path / "moved-4") == ["stage-0.safetensors", "state.json"]
    shutil.rmtree(output / "checkpoint-6")
    shutil.rmtree(tmp_path / "moved-4")
    assert open_output(output, SETTINGS, PLAN).steps == 2
    shutil.rmtree(tmp_path / "moved-2")
    with pytest.raises(OutputTaken, match=r"no checkpoint in .* can be used, checkpoint-2 included"):
        open_output(output, SETTINGS, PLAN)


def test_a_training_whose_checkpoints_are_gone_begins_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_output(tmp_path, SETTINGS, PLAN)
    append_line(tmp_path / PROGRESS_FILE, Progress(step=3, of=6, loss=1, seconds=1, samples=8))
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 0
    assert caplog.messages == [f"{tmp_path} holds no checkpoint, so its 3 steps are trained again"]
    open_output(tmp_path, SETTINGS, PLAN)
    assert len(caplog.messages) == 1


def test_a_training_that_has_ended_does_not_begin_again_when_its_checkpoints_are_gone(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    partial = partial_folder(tmp_path / "model", opened.record)
    partial.mkdir()
    state = TrainingState(steps=6, plan="p", data="d", training=opened.record.id, files=())
    publish(partial, tmp_path / "model", "autotune.json", state)
    with pytest.raises(
        OutputTaken, match=r"holds the model of step 6, but no checkpoint; restore one, or name another"
    ):
        open_output(tmp_path, SETTINGS, PLAN)
