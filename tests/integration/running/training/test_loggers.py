"""Loggers of a training that cannot be used, or cannot write."""

import sys
from pathlib import Path

import pytest

from autotune.errors import JobError
from autotune.loggers import LoggedRun
from autotune.training.training_log import TrainingLog, check_loggers
from tests.values.training import job_of
from trials.tasks.training.progress import Progress


def test_a_logger_that_cannot_write_is_warned_of_once_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    run = LoggedRun(id="0" * 16, output=tmp_path, config={}, done=0, logged=frozenset())
    with TrainingLog(["tensorboard"], run) as log:
        for step in (1, 2):
            log.add(Progress(step=step, of=2, loss=1.5, seconds=1, samples=8))
    (warning,) = caplog.messages
    assert warning.startswith("training.loggers: tensorboard failed and is switched off for the rest of this launch: ")
    assert (tmp_path / "tensorboard").read_text() == "in the way"


def test_a_logger_that_cannot_be_used_is_refused_with_the_remedy(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(name: str) -> str:
        with pytest.raises(JobError) as caught:
            check_loggers(job_of(example, tmp_path, training={"loggers": [name]}))
        return str(caught.value)

    assert refusal("tensorbord") == "training.loggers: 'tensorbord' is not a logger; known are: tensorboard, wandb"
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "install it with `pip install tensorboard`, or remove tensorboard" in refusal("tensorboard")
