"""Settings of the schedule that count steps, against the steps that a job makes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import JobError
from autotune.training.full_training import launch
from tests.programs.users import JobFile, refusal
from tests.values.training import plan_of, prepared_of

pytestmark = pytest.mark.usefixtures("home")


def test_a_warmup_longer_than_the_training_is_refused_before_anything_is_measured(job: JobFile) -> None:
    code, reported = refusal("run", job.spoil(training__warmup=30, training__epochs=2))
    assert code == 2
    assert reported == (
        "training.warmup: 30 steps are more than the 14 steps of the training; lower it, give a share below 1, or "
        "train longer"
    )


def test_a_warmup_within_the_steps_of_a_smaller_batch_is_not_refused(example: Path, tmp_path: Path) -> None:
    longest = {"warmup": 9, "global_batch_samples": 8}
    with pytest.raises(JobError, match="9 steps are more than the 7 steps"):
        prepared_of(example, tmp_path, training=longest)
    prepared_of(example, tmp_path, training={**longest, "batch_tolerance": 0.4})


def test_steps_beyond_the_epochs_are_named(example: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    prepared_of(example, tmp_path, training={"max_steps": 14, "global_batch_samples": 8, "epochs": 2})
    assert "max_steps" not in caplog.text
    prepared_of(example, tmp_path, training={"max_steps": 15, "global_batch_samples": 8, "epochs": 2})
    assert "training.max_steps: 15 are more than the 14 steps that training.epochs: 2 makes at most" in caplog.text


def test_a_warmup_longer_than_the_training_with_this_plan_is_refused(example: Path, tmp_path: Path) -> None:
    prepared = prepared_of(example, tmp_path, training={"global_batch_samples": 8})
    plan = plan_of("12+8", data=2)
    steps = prepared.epoch(plan.packing, plan.layout.data).steps
    training = prepared.job.training.model_copy(update={"warmup": steps + 1.0})
    prepared = replace(prepared, job=prepared.job.model_copy(update={"training": training}))
    unused: Any = None
    with pytest.raises(JobError, match=rf"{steps + 1} steps are more than the {steps} steps of the training; lower it"):
        launch(
            prepared,
            plan,
            unused,
            unused,
            tmp_path,
            site=unused,
            promised_samples_per_second=None,
            max_steps=None,
        )
