"""The model of a training that goes on with more epochs."""

from pathlib import Path

import pytest

from tests.unit.training.test_training_output import PLAN, SETTINGS
from trials.tasks.training.output import (
    RECORD_FILE,
    OpenedOutput,
    TrainingState,
    describe_file,
    open_output,
    partial_folder,
    publish,
    written_model,
)


def write_model(output: Path, opened: OpenedOutput, steps: int) -> None:
    """A model with a file in a folder, as a tokenizer writes its further chat templates."""
    partial = partial_folder(output / "model", opened.record)
    (partial / "templates").mkdir(parents=True)
    for name in ("weights.safetensors", "templates/other.jinja"):
        (partial / name).write_text(f"{name} after {steps} steps")
    files = tuple(describe_file(partial, name) for name in ("weights.safetensors", "templates/other.jinja"))
    state = TrainingState(steps=steps, plan="p", data="d", training=opened.record.id, files=files)
    publish(partial, output / "model", RECORD_FILE, state)


def test_a_model_of_more_steps_replaces_the_earlier_one_of_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened = open_output(tmp_path, SETTINGS, PLAN)
    assert written_model(tmp_path) is None
    for steps in (2, 4):
        write_model(tmp_path, opened, steps)
        assert written_model(tmp_path) == steps
    assert not list(tmp_path.glob("*.old-*"))
    assert (tmp_path / "model" / "weights.safetensors").read_text().endswith("after 4 steps")
    assert not caplog.messages
    (tmp_path / "model" / "notes.txt").write_text("of a user")
    write_model(tmp_path, opened, 6)
    assert [each.name for each in (tmp_path / "model.old-1").iterdir()] == ["notes.txt"]
    assert "model.old-1" in caplog.text
    other = open_output(tmp_path / "other", SETTINGS, PLAN)
    write_model(tmp_path, other, 8)
    assert written_model(tmp_path) is None  # it is that of another training
    assert (tmp_path / "model.old-2" / "weights.safetensors").read_text().endswith("after 6 steps")
