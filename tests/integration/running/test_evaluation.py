"""Evaluation on held-out samples: the loss of transformers' own model, and no effect on the training."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from autotune.workload import Prepared
from tests.training_values import plan_of, prepared_of, variant_of
from trials.data.loader import encode
from trials.model.family import Images, load_family
from trials.model.skeleton import load_config
from trials.outcome import Crash
from trials.plan import Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

PLANS = {
    "pipeline": plan_of("3+0r1,0", "1+2"),
    "data, padded": plan_of("4+2r0,1", data=2, zero=1, packing=Padded(samples=3)),
}
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


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
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
    assert losses(parts, "evaluation_loss")[3] == pytest.approx(evaluations[3], rel=1e-6)
    # A resumed training draws its dropout anew.
    assert losses(parts, "evaluation_loss") == pytest.approx(evaluations, rel=1e-2)
    assert [line["step"] for line in lines(parts)] == [1, 2, 3, 3, 4, 4]


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
    assert "step 3, learning rate 1e+30: the loss with the weights after it is nan; lower" in refused.detail
    assert {path: path.read_bytes() for path in output.rglob("*.safetensors")} == before
    assert train(pool, prepared, plan, max_steps=4).steps == 4
    assert sorted(losses(prepared)) == [1, 2, 3, 4]
