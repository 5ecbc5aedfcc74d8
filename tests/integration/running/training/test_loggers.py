"""TensorBoard and Weights & Biases get the progress of a training, and no step of a resumed one twice."""

import json
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from autotune.errors import JobError
from autotune.loggers import LoggedRun
from autotune.training.full_training import launch
from autotune.training.training_log import TrainingLog, check_loggers, metrics
from storage.spool import Spool
from storage.store import open_store
from tests.programs.processes import wait_for
from tests.values.training import job_of, plan_of, prepared_of
from trials.sites.local import LocalSite
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

Metrics = list[tuple[str, int, Any]]
PLAN = plan_of("4+2", data=2, zero=1)


def tensorboard_metrics(output: Path) -> Metrics:
    events = EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    names = events.Tags()["scalars"]
    return [(name, event.step, event.value) for name in names for event in events.Scalars(name)]


def wandb_records(output: Path) -> list[Any]:
    """The records of all offline runs: a header, then blocks of 32 KiB in LevelDB's log format."""
    proto: Any = wandb_internal_pb2
    found = []
    for path in sorted(output.glob("wandb/offline-run-*/*.wandb")):
        content, place, parts = path.read_bytes(), 7, b""
        while place < len(content):
            if 32768 - place % 32768 < 7:
                place += 32768 - place % 32768
            _, size, kind = struct.unpack("<IHB", content[place : place + 7].ljust(7, b"\0"))
            if place + 7 + size > len(content):
                break  # still being written
            parts += content[place + 7 : place + 7 + size]
            place += 7 + size
            if kind in (1, 4):  # whole, or the last part
                found.append(proto.Record.FromString(parts))
                parts = b""
    return found


def wandb_metrics(records: list[Any]) -> Metrics:
    found: Metrics = []
    for record in (record.history for record in records if record.HasField("history")):
        values = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.item}
        found += [(name, values["step"], value) for name, value in values.items() if "/" in name]
    return found


@pytest.mark.ranks
def test_every_step_and_evaluation_of_a_resumed_training_is_logged_once(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(steps: int | None) -> None:
        with open_store(f"sqlite:///{tmp_path / 'known.db'}") as store:
            launch(
                prepared,
                PLAN,
                store,
                Spool(tmp_path / "spool"),
                tmp_path / "launches",
                site=LocalSite("cpu"),
                promised_samples_per_second=None,
                max_steps=steps,
            )

    monkeypatch.setenv("WANDB_MODE", "offline")
    prepared = prepared_of(
        shallow,
        tmp_path,
        data={"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]},
        training={"epochs": 2, "checkpoint_every": 1, "clip_norm": 1.0, "loggers": ["tensorboard", "wandb"]},
        evaluation={"samples": 8, "every": 2},
    )
    output = prepared.job.training.output
    run(3)
    shutil.rmtree(output / "checkpoint-3")
    run(None)
    lines = read_lines(output / PROGRESS_FILE)
    expected = sorted((name, line.step, value) for line in lines for name, value in metrics(line).items())
    assert {name for name, *_ in expected} >= {"train/loss", "train/grad_norm", "train/tokens_per_second", "eval/loss"}
    assert [step for name, step, _ in expected if name == "train/loss"] == [1, 2, 3, 4]
    assert [step for name, step, _ in expected if name == "eval/loss"] == [2, 4]
    close: Metrics = [(name, step, pytest.approx(value, rel=1e-6)) for name, step, value in expected]
    assert sorted(tensorboard_metrics(output)) == close
    # Its process writes on for a moment after a run has ended.
    wait_for(lambda: sum(record.HasField("exit") for record in wandb_records(output)) == 2)
    records = wandb_records(output)
    sent = sorted(wandb_metrics(records))
    # Times of a step that ran twice are those of its first run.
    assert [(name, step) for name, step, _ in sent] == [(name, step) for name, step, _ in expected]
    assert [each for each in sent if each[0].endswith("/loss")] == [each for each in close if each[0].endswith("/loss")]
    runs = [record.run for record in records if record.HasField("run")]
    assert {run.run_id for run in runs} == {json.loads((output / "autotune.json").read_text())["id"]}
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert config["plan"]["id"] == PLAN.id
    assert config["job"]["training"]["clip_norm"] == 1.0


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
