"""A training of several launches: TensorBoard and Weights & Biases get no step twice, and each end is recorded."""

import json
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from autotune.machine import agent, conditions
from autotune.machine.conditions import Conditions
from autotune.training import full_training
from autotune.training.full_training import Launched, launch
from autotune.training.training_log import metrics
from autotune.workload import Prepared
from storage.records import LaunchResult
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.processes import wait_for
from tests.values.training import plan_of, prepared_of
from trials.sites.local import LocalSite
from trials.tasks.training.output import note_launch
from trials.tasks.training.progress import PROGRESS_FILE, read_lines
from trials.workload import Hardware

pytestmark = pytest.mark.ranks

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


def launched(
    prepared: Prepared, store: Store, folder: Path, steps: int | None, stops: Callable[[], None] = lambda: None
) -> Launched:
    """Train until these steps, with the files of the launch in `folder`."""
    return launch(
        prepared,
        PLAN,
        store,
        Spool(folder / "spool"),
        folder / "launches",
        site=LocalSite("cpu"),
        promised_samples_per_second=None,
        max_steps=steps,
        stops=stops,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A training of two launches with both loggers, of which the first one's last checkpoint is lost.

    The agent of a launch in between is gone.
    """

    output: Path
    results: tuple[LaunchResult | None, ...]
    """Of the three launches."""
    last: Launched
    judged: tuple[Conditions, ...]
    """By which its launches were found to be disturbed."""


@pytest.fixture(scope="module")
def resumed(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Resumed:
    folder = tmp_path_factory.mktemp("resumed")
    url = f"sqlite:///{folder / 'known.db'}"
    judged: list[Conditions] = []

    def disturbance(found: Conditions, _: Hardware) -> str:
        judged.append(found)
        return "a reason"

    def run(steps: int | None) -> Launched:
        with open_store(url) as store:
            return launched(prepared, store, folder, steps)

    prepared = prepared_of(
        shallow,
        folder,
        data={"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]},
        training={"epochs": 2, "checkpoint_every": 1, "clip_norm": 1.0, "loggers": ["tensorboard", "wandb"]},
        evaluation={"samples": 8, "every": 2},
    )
    output = prepared.job.training.output
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setattr(full_training, "disturbance", disturbance)
        patch.setattr(conditions, "_LEAST_SECONDS", 0.0)  # a launch of few steps may take less than a second
        run(3)
        shutil.rmtree(output / "checkpoint-3")
        with open_store(url) as store:
            gone = store.add_agent(agent.machine(), "1 1").id
            note_launch(output, store.start_launch(PLAN, prepared.workload.fingerprint, None, gone).id)
        last = run(None)
    with open_store(url) as store:
        results = tuple(each.result for each in store.launches(PLAN.id))
    return Resumed(output=output, results=results, last=last, judged=tuple(judged))


@pytest.mark.long
def test_the_end_of_a_launch_whose_agent_is_gone_is_recorded_by_the_next_one(resumed: Resumed) -> None:
    ends = [(each.status, each.steps) for each in resumed.results if each is not None]
    assert ends == [("paused", 3), ("interrupted", 3), ("finished", 4)]


def test_a_resumed_launch_that_ends_before_its_first_step_ends_after_the_steps_of_its_checkpoint(
    shallow: Path, tmp_path: Path
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    prepared = prepared_of(shallow, tmp_path, training={"epochs": 2, "checkpoint_every": 1})
    with open_store(f"sqlite:///{tmp_path / 'known.db'}") as store:
        launched(prepared, store, tmp_path, 2)
        with pytest.raises(KeyboardInterrupt):
            launched(prepared, store, tmp_path, 2, interrupted)
        results = [each.result for each in store.launches(PLAN.id)]
    assert [(each.status, each.steps) for each in results if each] == [("paused", 2), ("interrupted", 2)]


def test_a_launch_is_judged_by_the_conditions_while_its_ranks_computed(resumed: Resumed) -> None:
    assert resumed.last.disturbance == "a reason"
    assert len(resumed.judged) == 2
    assert all(each.own_cpu > 0 for each in resumed.judged)  # that of the ranks


def test_the_end_of_a_launch_has_the_step_of_the_model(resumed: Resumed) -> None:
    assert resumed.last.model_step == resumed.last.report.steps == 4


def test_every_step_and_evaluation_of_a_resumed_training_is_logged_once(resumed: Resumed) -> None:
    output = resumed.output
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


@pytest.mark.long
def test_a_step_that_is_trained_again_with_another_learning_rate_is_logged_again(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    prepared = prepared_of(shallow, tmp_path, training={"checkpoint_every": 1, "loggers": ["wandb"]})
    training = prepared.job.training.model_copy(update={"learning_rate": 1e-5})
    output = prepared.job.training.output
    with open_store(f"sqlite:///{tmp_path / 'known.db'}") as store:
        launched(prepared, store, tmp_path, 2)
        shutil.rmtree(output / "checkpoint-2")
        launched(replace(prepared, job=prepared.job.model_copy(update={"training": training})), store, tmp_path, 2)
    wait_for(lambda: sum(record.HasField("exit") for record in wandb_records(output)) == 2)
    sent = wandb_metrics(wandb_records(output))
    rates = [(step, value) for name, step, value in sent if name == "train/learning_rate"]
    assert rates == [(1, 1e-3), (2, 1e-3), (2, 1e-5)]
