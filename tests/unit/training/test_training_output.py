"""What a training may do in its output folder: files of others are never changed or removed."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import JobError
from autotune.training.training_output import check_output, held
from tests.values.training import job_of, plan_of
from trials import wire
from trials.errors import OutputTaken
from trials.tasks.training.output import (
    STATE_FILE,
    OpenedOutput,
    PlanChange,
    TrainingState,
    checkpoint_folder,
    describe_file,
    has_checkpoint_after,
    note_failed_plan,
    open_output,
    partial_folder,
    publish,
    remove_old_checkpoints,
)
from trials.tasks.training.settings import Settings

SETTINGS = Settings(
    plan="945b356dd79b0367",
    data="c0ffee",
    model="beef",
    weights="random",
    dtype="float32",
    seed=0,
    evaluation_data="cafe",
    global_batch_samples=8,
    oversize="own-pack",
    learning_rate=1e-3,
    epochs=1,
)
PLAN = plan_of("4+2")


def write_checkpoint(output: Path, opened: OpenedOutput, steps: int, keep: int = 2) -> Path:
    """A checkpoint whose tensors are a few bytes, through the functions that ranks use."""
    final = checkpoint_folder(output, steps)
    partial = partial_folder(final, opened.record)
    partial.mkdir()
    (partial / "stage-0.safetensors").write_bytes(b"tensors of step %d" % steps)
    files = (describe_file(partial, "stage-0.safetensors"),)
    state = TrainingState(steps=steps, plan="p", data="d", training=opened.record.id, files=files)
    publish(partial, final, STATE_FILE, state)
    remove_old_checkpoints(output, opened.record, steps, keep)
    return final


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", ["checkpoint-500", "model", "progress.jsonl", "autotune.json"])
def test_an_output_with_results_of_another_program_is_refused_and_stays_as_it_is(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "theirs").write_text("of days")
    with pytest.raises(
        OutputTaken, match=f"holds {name}, which no training of this version of autotune wrote; name an empty or a new"
    ):
        open_output(tmp_path, SETTINGS, PLAN)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [name, f"{name}/theirs"]


def test_files_with_other_names_may_stand_in_the_output(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-notes.txt").write_text("ideas")
    (tmp_path / "checkpoint-007").mkdir()
    opened = open_output(tmp_path, SETTINGS, PLAN)
    for steps in (2, 4, 6):
        write_checkpoint(tmp_path, opened, steps)
    assert names(tmp_path) == [
        "autotune.json",
        "checkpoint-007",
        "checkpoint-4",
        "checkpoint-6",
        "checkpoint-notes.txt",
    ]


def test_only_files_that_a_checkpoint_lists_are_removed(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    first = write_checkpoint(tmp_path, opened, 2)
    (first / "evaluation.txt").write_text("good")
    linked = tmp_path.parent / f"{tmp_path.name}-linked"
    shutil.copytree(first, linked)
    (tmp_path / "checkpoint-3").symlink_to(linked)
    for steps in (4, 6):
        write_checkpoint(tmp_path, opened, steps)
    assert names(first) == ["evaluation.txt"]
    assert names(linked) == ["evaluation.txt", "stage-0.safetensors", "state.json"]


@pytest.mark.parametrize(
    ("keep", "kept"), [(1, ["checkpoint-8"]), (3, ["checkpoint-4", "checkpoint-6", "checkpoint-8"])]
)
def test_the_last_checkpoints_of_this_training_are_kept(keep: int, kept: list[str], tmp_path: Path) -> None:
    other = open_output(tmp_path / "other", SETTINGS, PLAN)
    opened = open_output(tmp_path / "output", SETTINGS, PLAN)
    theirs = shutil.copytree(write_checkpoint(tmp_path / "other", other, 1), tmp_path / "output" / "checkpoint-1")
    for steps in (2, 4, 6, 8):
        write_checkpoint(tmp_path / "output", opened, steps, keep)
    assert names(tmp_path / "output") == ["autotune.json", theirs.name, *kept]


def test_a_file_in_the_place_of_a_checkpoint_is_renamed(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    (tmp_path / "checkpoint-2").mkdir()
    (tmp_path / "checkpoint-2" / "theirs").touch()
    write_checkpoint(tmp_path, opened, 2)
    assert names(tmp_path / "checkpoint-2.old-1") == ["theirs"]
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 2


def zero(file: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def test_a_changed_plan_takes_over_at_the_checkpoint_that_is_left(tmp_path: Path) -> None:
    first, second = plan_of("4+2"), plan_of("3+0", "1+2")
    settings = [replace(SETTINGS, plan=each.id) for each in (first, second)]
    opened = open_output(tmp_path, settings[0], first)
    for steps in (2, 4):
        write_checkpoint(tmp_path, opened, steps)
    with pytest.raises(OutputTaken, match=f"or change its plan with `--resume-with {second.id}`"):
        open_output(tmp_path, settings[1], second)
    changed = open_output(tmp_path, settings[1], second, instead_of=first)
    assert changed.record.changes == (PlanChange(plan=first, steps=4),)
    assert open_output(tmp_path, settings[1], second) == changed
    # A plan that ran no step is no part of the training.
    back = open_output(tmp_path, settings[0], first, instead_of=second)
    assert (back.record.plan, back.record.changes) == (first, ())
    open_output(tmp_path, settings[1], second, instead_of=first)
    zero(tmp_path / "checkpoint-4" / "stage-0.safetensors")
    left = open_output(tmp_path, settings[1], second)
    assert (left.steps, left.record.changes) == (2, (PlanChange(plan=first, steps=2),))


def test_a_plan_whose_launch_failed_is_noted_once_and_kept(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    for _ in range(2):
        note_failed_plan(tmp_path, "a plan")
    assert open_output(tmp_path, SETTINGS, PLAN).record == replace(opened.record, failed=("a plan",))


def test_only_the_trainings_own_later_checkpoints_count_as_progress(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    write_checkpoint(tmp_path, opened, 2)
    stranger = replace(opened, record=replace(opened.record, id=16 * "f"))
    write_checkpoint(tmp_path, stranger, 4)
    assert (has_checkpoint_after(tmp_path, 1), has_checkpoint_after(tmp_path, 2)) == (True, False)


def test_a_record_with_a_pattern_for_its_id_removes_nothing(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    record = tmp_path / "autotune.json"
    record.write_text(record.read_text().replace(opened.record.id, "*"))
    foreign = tmp_path / ".checkpoint-8.deadbeef.partial"
    foreign.mkdir()
    with pytest.raises(OutputTaken, match=r"holds autotune\.json, which no training of this version of autotune wrote"):
        open_output(tmp_path, SETTINGS, PLAN)
    assert foreign.exists()


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    left = partial_folder(checkpoint_folder(tmp_path, 8), opened.record)
    left.mkdir()
    foreign = tmp_path / ".checkpoint-8.deadbeef.partial"
    foreign.mkdir()
    open_output(tmp_path, SETTINGS, PLAN)
    assert (left.exists(), foreign.exists()) == (False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 7}, "belongs to a training with seed 0, not 7; name another folder"),
        ({"global_batch_samples": 16}, "global_batch_samples 8, not 16"),
        ({"weights": "0123"}, "weights random, not 0123"),
        ({"evaluation_data": "f00d"}, "with other samples of evaluation, .*; go back to those samples, leave"),
        ({"plan": "x", "dtype": "bfloat16"}, "plan 945b356dd79b0367, not x; dtype float32, not bfloat16"),
    ],
)
def test_a_training_is_not_resumed_with_other_settings(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    open_output(tmp_path, SETTINGS, PLAN)
    with pytest.raises(OutputTaken, match=message):
        open_output(tmp_path, replace(SETTINGS, **change), PLAN)
    open_output(tmp_path, SETTINGS, PLAN)


def test_a_training_goes_on_without_evaluations_and_keeps_the_samples_of_those_that_it_had(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without = replace(SETTINGS, evaluation_data=None)
    open_output(tmp_path, without, PLAN)
    opened = open_output(tmp_path, SETTINGS, PLAN)
    assert open_output(tmp_path, without, PLAN) == opened
    with pytest.raises(OutputTaken, match="other samples of evaluation"):
        open_output(tmp_path, replace(SETTINGS, evaluation_data="f00d"), PLAN)
    assert not caplog.messages


def test_a_training_continues_with_another_learning_rate_and_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_output(tmp_path, SETTINGS, PLAN)
    cosine = replace(SETTINGS, schedule="cosine", learning_rate=5e-4, epochs=2)
    open_output(tmp_path, cosine, PLAN)
    assert "the schedule cosine, with training.warmup: 0, is laid over the new number of steps" in caplog.messages[-1]
    caplog.clear()
    open_output(tmp_path, cosine, PLAN)
    assert not caplog.messages
    open_output(tmp_path, SETTINGS, PLAN)
    caplog.clear()
    open_output(tmp_path, replace(SETTINGS, learning_rate=5e-4, epochs=2), PLAN)
    assert "the training continues with learning_rate 0.0005; it was 0.001 before" in caplog.text
    assert "the training continues with epochs 2; it was 1 before" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "jumps"),
    [
        ({"warmup": 0.03}, {"warmup": 0.03, "max_steps": 9}, True),  # a share of all steps
        ({"warmup": 3}, {"warmup": 5}, True),
        ({"warmup": 3}, {"warmup": 3, "max_steps": 9}, False),
        ({}, {"epochs": 2}, False),
        ({"schedule": "linear"}, {}, True),
    ],
)
def test_a_constant_schedule_jumps_only_by_its_warm_up(
    before: dict[str, Any], after: dict[str, Any], jumps: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_output(tmp_path, replace(SETTINGS, **before), PLAN)
    open_output(tmp_path, replace(SETTINGS, **after), PLAN)
    assert ("the learning rate may jump here" in caplog.text) == jumps


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rates": {"vision": 2e-6}}, "learning_rates {'vision': 2e-06}; it was {} before"),
        ({"max_steps": 9}, "max_steps 9; it had none before"),
        ({"schedule": "cosine"}, "schedule cosine; it was constant before"),
        ({"warmup": 0.03}, "warmup 0.03; it was 0.0 before"),
        ({"weight_decay": 0.1}, "weight_decay 0.1; it was 0.01 before"),
        ({"betas": (0.9, 0.95)}, "betas (0.9, 0.95); it was (0.9, 0.999) before"),
        ({"clip_norm": 1.0}, "clip_norm 1.0; it had none before"),
    ],
)
def test_a_training_continues_with_other_settings_of_its_optimizer_and_warns(
    change: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_output(tmp_path, SETTINGS, PLAN)
    opened = open_output(tmp_path, replace(SETTINGS, **change), PLAN)
    assert f"the training continues with {message}" in caplog.text
    caplog.clear()
    assert open_output(tmp_path, replace(SETTINGS, **change), PLAN) == opened
    assert not caplog.messages


def test_the_record_of_a_training_before_optimizer_settings_opens_with_their_defaults(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    document = json.loads((tmp_path / "autotune.json").read_text())
    for name in (
        "evaluation_data",
        "freeze",
        "lora",
        "learning_rates",
        "max_steps",
        "schedule",
        "warmup",
        "weight_decay",
        "betas",
        "clip_norm",
    ):
        del document["settings"][name]
    (tmp_path / "autotune.json").write_text(json.dumps(document))
    assert open_output(tmp_path, SETTINGS, PLAN) == opened
    assert not caplog.messages


# --- before anything runs ---


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "data").mkdir()
    record = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps(record) + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "holds the model"),
        ("model", "is inside the model's folder"),
        ("model/output", "is inside the model's folder"),
        ("data", "holds the data "),
        ("link", "is inside the model's folder"),
        ("pictures", "holds the images in "),
    ],
)
def test_an_output_that_overlaps_with_an_input_is_refused(output: str, message: str, inputs: Path) -> None:
    (inputs / "link").symlink_to("model")
    (inputs / "pictures" / "of-cats").mkdir(parents=True)
    sources = [{"path": str(inputs / "data" / "train.jsonl"), "images": str(inputs / "pictures" / "of-cats")}]
    with pytest.raises(JobError, match=message):
        check_output(job_of(inputs, inputs / output, data={"sources": sources}))


@pytest.mark.parametrize("image", ["0.png", "of-cats/0.JPG"])
def test_a_folder_of_images_is_no_output_until_a_training_has_it(image: str, inputs: Path) -> None:
    folder = inputs / "pictures"
    folder.joinpath(image).parent.mkdir(parents=True)
    folder.joinpath(image).touch()
    with pytest.raises(JobError, match=f"holds {image}, which may be of the data; name an empty or a new folder"):
        check_output(job_of(inputs, folder))
    check_output(job_of(inputs, folder / "output"))
    open_output(folder, SETTINGS, PLAN)
    check_output(job_of(inputs, folder))


def test_an_output_next_to_its_inputs_is_accepted(inputs: Path) -> None:
    check_output(job_of(inputs, inputs / "data" / "output"))
    assert not (inputs / "data" / "output").exists()


def test_a_final_model_that_is_the_next_trainings_input_is_not_replaced(inputs: Path) -> None:
    shutil.move(inputs / "model", inputs / "output" / "model")
    job = job_of(inputs, inputs / "output")
    job = job.model_copy(update={"model": job.model.model_copy(update={"path": str(inputs / "output" / "model")})})
    with pytest.raises(JobError, match="holds the model; name a separate folder"):
        check_output(job)


def test_two_trainings_do_not_share_an_output(tmp_path: Path) -> None:
    with (
        held(tmp_path / "output"),
        pytest.raises(JobError, match="another training writes to"),
        held(tmp_path / "output"),
    ):
        pass


def test_states_that_name_files_elsewhere_are_not_read(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    final = write_checkpoint(tmp_path, opened, 2)
    precious = tmp_path / "precious"
    precious.touch()
    text = (final / STATE_FILE).read_text()
    (final / STATE_FILE).write_text(text.replace("stage-0.safetensors", "../precious"))
    for steps in (4, 6, 8):
        write_checkpoint(tmp_path, opened, steps)
    assert precious.exists()


def test_a_pipe_in_place_of_a_state_is_not_read(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    write_checkpoint(tmp_path, opened, 2)
    (tmp_path / "checkpoint-9").mkdir()
    os.mkfifo(tmp_path / "checkpoint-9" / STATE_FILE)
    assert open_output(tmp_path, SETTINGS, PLAN).steps == 2


def test_the_state_of_a_checkpoint_is_what_was_written(tmp_path: Path) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    state = wire.read(TrainingState, write_checkpoint(tmp_path, opened, 2) / STATE_FILE)
    assert state is not None
    assert (state.steps, state.training, [file.size for file in state.files]) == (2, opened.record.id, [17])
