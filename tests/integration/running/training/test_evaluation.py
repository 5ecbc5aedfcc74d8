"""Evaluation on held-out samples: the loss of transformers' own model, and no effect on the training."""

import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from autotune.training.launched_report import stopped_text
from autotune.workload import Prepared
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of, variant_of
from trials.channels.folder import file_rendezvous
from trials.data import latest
from trials.data.loader import encode
from trials.engine.group import process_group
from trials.errors import DataError
from trials.model.family import Images, load_family
from trials.model.skeleton import load_config
from trials.outcome import Crash
from trials.plan import Levelled, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Recomputed
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.session import Session, open_session
from trials.tasks.stop import Stop
from trials.tasks.training.evaluation import Evaluator, check_weights
from trials.tasks.training.progress import PROGRESS_FILE
from trials.tasks.training.schedule import Schedule
from trials.tasks.training.training import run_training

pytestmark = pytest.mark.ranks

PLANS = {
    "pipeline": plan_of("3+0r1,0", "1+2"),
    "data, padded": plan_of("4+2r0,1", data=2, zero=1, packing=Padded(samples=3)),
    "packs shared": plan_of("4+2r0,1", data=2, zero=1, packing=replace(PACKED, sequence=2)),
}
PLANS["weights in shards"] = plan_of("4+2r0,1", data=2, zero=3)
PLANS["layers cut"] = plan_of("4+2r0,1", tensor=2, zero=1)
PLANS["levels"] = replace(
    plan_of("4+2r0,1", data=2),
    packing=Levelled(levels=(replace(PACKED, qt=130, qt_min=0), replace(PACKED, qt_min=0, sequence=2))),
    stages=(replace(PLANS["packs shared"].stages[0], further_levels=(Recomputed(vision=4, language=0),)),),
)
TRAINING = {"epochs": 2, "global_batch_samples": 8, "learning_rate": 5e-3}


@pytest.fixture(scope="module")
def with_dropout(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with dropout in its vision layers, so that the random state matters."""

    def change(config: dict[str, Any]) -> None:
        config["vision_config"]["hidden_dropout_prob"] = 0.2

    return variant_of(shallow, tmp_path_factory.mktemp("dropout"), change)


def train(pool: WarmPool, prepared: Prepared, plan: Plan, max_steps: int | None = None) -> TrainingReport:
    answer = pool.ask(prepared.request(plan, Training(output=prepared.job.training.output, max_steps=max_steps)), 180)
    assert isinstance(answer, Answers), answer
    report = answer.reports[0]
    assert isinstance(report, TrainingReport)
    return report


def lines(prepared: Prepared) -> list[dict[str, Any]]:
    return list(map(json.loads, (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()))


def losses(prepared: Prepared, key: str = "loss") -> dict[int, float]:
    found = [(line["step"], line[key]) for line in lines(prepared) if key in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def reference(prepared: Prepared, folder: Path) -> float:
    """The mean loss of transformers' own model over the target tokens of the held-out samples, one by one."""
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    config = load_config(str(folder))
    family = load_family(config)
    encoder = family.encoder(prepared.job.model.path)
    assert prepared.held_out is not None
    total, targets = 0.0, 0
    for row in range(len(prepared.held_out)):
        sample = encode(prepared.held_out, row, encoder, pixels=True)
        ids, images = torch.from_numpy(sample.input_ids), None
        if sample.pixel_values is not None:
            grids = torch.from_numpy(sample.grids)
            images = Images(pixels=torch.from_numpy(sample.pixel_values), grids=grids, input_ids=ids)
        with torch.no_grad():
            logits = model(**family.model_inputs(config, ids, images)).logits[0]
        labels = torch.from_numpy(sample.labels)[1:]
        total += float(cross_entropy(logits[:-1], labels, reduction="sum"))
        targets += int((labels != -100).sum())
    return total / targets


@pytest.mark.parametrize("plan", parameters(PLANS, short=("pipeline",)))
def test_an_evaluation_has_transformers_own_loss_and_leaves_the_training_alone(
    plan: Plan, with_dropout: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def prepared(name: str) -> Prepared:
        return prepared_of(with_dropout, tmp_path / name, data=data, training=TRAINING, evaluation=evaluation)

    data = {"sources": [{"path": str(with_dropout / "data" / "train.jsonl"), "sampling": "first:23"}]}
    evaluation = {"samples": 7, "every": 3}
    alone = replace(prepared("alone"), held_out_file=None)
    whole = prepared("whole")
    expected, done = train(pool, alone, plan), train(pool, whole, plan)
    assert done.steps == expected.steps == 4
    assert losses(whole) == losses(alone)
    evaluations = losses(whole, "evaluation_loss")
    assert sorted(evaluations) == [3, 4]
    assert not losses(alone, "evaluation_loss")
    assert done.model is not None
    assert evaluations[4] == pytest.approx(reference(whole, done.model), rel=1e-4)
    assert {line["samples"] for line in lines(whole) if "evaluation_loss" in line} == {7}

    parts = prepared("parts")
    train(pool, parts, plan, max_steps=3)
    progress = parts.job.training.output / PROGRESS_FILE
    kept = progress.read_text().splitlines()[:3]  # as after a launch that ended between checkpoint and evaluation
    progress.write_text("\n".join(kept) + "\n")
    train(pool, parts, plan)
    assert losses(parts, "evaluation_loss") == pytest.approx(evaluations, rel=1e-5)
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 3, 4, 4]


@pytest.mark.parametrize("plan", parameters(PLANS, short=("data, padded",)))
def test_weights_of_samples_do_not_change_the_loss_of_an_evaluation(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared = prepared_of(
        shallow,
        tmp_path,
        training={**TRAINING, "epochs": 1, "max_steps": 1, "loss_weighting": "sample"},
        evaluation={"samples": 9},
    )
    done = train(pool, prepared, plan)
    assert done.model is not None
    assert losses(prepared, "evaluation_loss") == {1: pytest.approx(reference(prepared, done.model), rel=1e-5)}


@pytest.mark.long
def test_a_learning_rate_that_makes_nan_leaves_the_last_good_checkpoint(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def at(learning_rate: float) -> Prepared:
        changed = prepared.job.training.model_copy(update={"learning_rate": learning_rate})
        return replace(prepared, job=prepared.job.model_copy(update={"training": changed}))

    plan = PLANS["pipeline"]
    prepared = prepared_of(shallow, tmp_path, training={**TRAINING, "checkpoint_every": 1, "keep_checkpoints": 1})
    output = prepared.job.training.output
    train(pool, prepared, plan, max_steps=2)
    before = {path: path.read_bytes() for path in output.rglob("*.safetensors")}
    refused = pool.ask(at(1e30).request(plan, Training(output=output)), 120)
    assert isinstance(refused, Crash)
    assert "step 3, learning rate 1e+30: the loss after this step is nan; lower" in refused.detail
    assert {path: path.read_bytes() for path in output.rglob("*.safetensors")} == before
    assert train(pool, prepared, plan, max_steps=4).steps == 4
    assert sorted(losses(prepared)) == [1, 2, 3, 4]


@contextmanager
def session_alone(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    """Open the session of a training on one rank in this process."""
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    request = prepared.request(plan_of("4+2"), Training(output=prepared.job.training.output))
    with (
        tempfile.TemporaryDirectory() as folder,
        process_group(0, 0, 1, file_rendezvous(Path(folder) / "rendezvous")) as device,
        open_session(request, 0, device) as session,
    ):
        yield session


def train_alone(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch, asked_to_stop: Callable[[], Stop | None]
) -> TrainingReport:
    """Train on one rank in this process, so that the test decides when it is asked to stop."""
    with session_alone(prepared, monkeypatch) as session:
        assert isinstance(session.request.task, Training)
        return run_training(session, session.request.task, asked_to_stop)


def test_a_training_whose_last_evaluation_fails_has_its_model(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = held_out_file(shallow, tmp_path)
    prepared = prepared_of(
        shallow,
        tmp_path,
        training={"global_batch_samples": 4, "learning_rate": 5e-3, "max_steps": 1},
        evaluation={"sources": [{"path": str(held_out), "images": str(shallow / "data")}]},
    )
    model = prepared.job.training.output / "model"
    for _ in range(2):  # the second launch begins with the evaluation
        # Each pack of an evaluation is read after a look at what asks to stop.
        with pytest.raises(DataError, match="no sample can be read to evaluate the model on"):
            train_alone(prepared, monkeypatch, partial(lose, held_out))
        # The process of a rank ends here, and leaves no group.
        comm.destroy_process_group()
        comm.comm.cdb = None
        assert (model / "model.safetensors.index.json").exists()
        shutil.rmtree(model)


def lose(file: Path) -> None:
    """Overwrite a file with zeros."""
    file.write_bytes(bytes(file.stat().st_size))


def test_a_training_whose_held_out_file_is_lost_ends_before_its_first_step(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    held_out = held_out_file(shallow, tmp_path)
    evaluation = {"sources": [{"path": str(held_out), "images": str(shallow / "data")}]}
    prepared = prepared_of(shallow, tmp_path, training=TRAINING, evaluation=evaluation)
    lose(held_out)
    request = prepared.request(PLANS["pipeline"], Training(output=prepared.job.training.output))
    answer = pool.ask(request, 120)
    assert isinstance(answer, Crash), answer
    assert re.search(r"4 of 4 samples of \S+held-out\.jsonl that were tried cannot be read", answer.detail)
    assert not (prepared.job.training.output / PROGRESS_FILE).exists()


def test_samples_of_an_evaluation_are_not_among_the_latest_of_the_training(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = held_out_file(shallow, tmp_path)
    evaluation = {"sources": [{"path": str(held_out), "images": str(shallow / "data")}]}
    prepared = prepared_of(shallow, tmp_path, training=TRAINING, evaluation=evaluation)
    records = held_out.read_bytes().splitlines(keepends=True)
    held_out.write_bytes(b"".join([*(bytes(len(each)) for each in records[:5]), records[5]]))
    progress = tmp_path / PROGRESS_FILE
    with session_alone(prepared, monkeypatch) as session:
        session.latest.add(26, ["lost"] * 12)
        schedule = Schedule(name="constant", warmup=0, total=1)
        assert Evaluator(session, progress, {1}, 1, schedule).run(1, lambda: False)
        session.latest.add(5)
        with pytest.raises(DataError, match="17 of the last 32 samples cannot be read"):
            session.latest.add(1, ["lost"] * 5)
    assert '"blank_samples":5' in progress.read_text()


@pytest.mark.parametrize("on_error", ["skip", "fail"])
def test_a_first_pack_that_is_lost_prevents_no_checkpoint(
    on_error: str, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(shallow / "data", tmp_path / "data")
    file = tmp_path / "data" / "train.jsonl"
    data = {"sources": [{"path": str(file)}], "on_error": on_error}
    prepared = prepared_of(shallow, tmp_path, data=data, training=TRAINING)
    lose(file)
    monkeypatch.setattr(latest, "_LATEST", 1)  # a pack of the test's data has fewer samples
    with session_alone(prepared, monkeypatch) as session:
        check_weights(session, session.epoch(0))
        assert session.blank == {}


@pytest.mark.parametrize("plan", parameters(PLANS, short=("pipeline",)))
def test_held_out_samples_that_cannot_be_read_are_counted(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    held_out = held_out_file(shallow, tmp_path)
    prepared = prepared_of(
        shallow,
        tmp_path,
        training={**TRAINING, "epochs": 1, "max_steps": 1},
        evaluation={"sources": [{"path": str(held_out), "images": str(shallow / "data")}]},
    )
    records = held_out.read_bytes().splitlines(keepends=True)
    held_out.write_bytes(
        b"".join(bytes(len(each)) if number in (1, 4) else each for number, each in enumerate(records))
    )
    assert train(pool, prepared, plan).blank_samples == 0
    (line,) = (line for line in lines(prepared) if "evaluation_loss" in line)
    assert (line["samples"], line["blank_samples"]) == (4, 2)


def held_out_file(example: Path, folder: Path) -> Path:
    """The last 6 records of the example's data, in a file of their own that a test may change."""
    records = (example / "data" / "train.jsonl").read_bytes().splitlines(keepends=True)
    path = folder / "held-out.jsonl"
    path.write_bytes(b"".join(records[-6:]))
    return path


def test_a_stop_in_the_last_evaluation_is_told_and_the_next_launch_makes_it(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepared_of(
        shallow, tmp_path, training={"global_batch_samples": 4, "max_steps": 1}, evaluation={"samples": 16}
    )
    for _ in range(2):  # the second launch has nothing but the evaluation left
        stopped = train_alone(prepared, monkeypatch, lambda: Stop.NOW)
        assert (stopped.finished, stopped.stopped) == (True, Stop.NOW)
        assert stopped_text(stopped, None) == (
            "Stopped in the evaluation after step 1, the last one; the same command makes it"
        )
        assert not losses(prepared, "evaluation_loss")
    whole = train_alone(prepared, monkeypatch, lambda: None)
    assert (whole.finished, whole.stopped) == (True, None)
    assert list(losses(prepared, "evaluation_loss")) == [1]


def test_a_training_that_is_asked_to_stop_during_an_evaluation_writes_a_checkpoint_first(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(stop_at: int | None) -> TrainingReport:
        asked = itertools.count(1)
        return train_alone(prepared, monkeypatch, lambda: Stop.NOW if next(asked) == stop_at else None)

    prepared = prepared_of(
        shallow,
        tmp_path,
        data={"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:28"}]},
        training={"global_batch_samples": 4, "learning_rate": 5e-3, "checkpoint_every": 3},
        evaluation={"samples": 16, "every": 2},
    )
    output = prepared.job.training.output
    # Asked after each of two steps, and before each part of the evaluation: the fourth is inside of it.
    stopped = run(4)
    assert (stopped.steps, stopped.stopped, stopped.finished) == (2, Stop.NOW, False)
    assert (output / "checkpoint-2" / "state.json").exists()
    assert not losses(prepared, "evaluation_loss")
    # The next launch begins with this evaluation, and is asked in it again.
    again = run(2)
    assert (again.steps, again.stopped) == (2, Stop.NOW)
    assert not losses(prepared, "evaluation_loss")
    whole = run(None)
    assert whole.finished
    assert sorted(losses(prepared, "evaluation_loss")) == sorted({*range(2, whole.steps + 1, 2), whole.steps})
    assert [line["step"] for line in lines(prepared)][:4] == [1, 2, 2, 3]
