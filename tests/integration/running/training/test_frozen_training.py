"""Trainings in which parts of the model stay as they are."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.running.training.test_training import losses, stored_tensors
from tests.values.saved_models import saved_model
from tests.values.training import plan_of, prepared_of, train
from trials.errors import OutputTaken
from trials.model.skeleton import build_skeleton, load_config
from trials.run.pool import WarmPool
from trials.tasks.request import Training
from trials.tasks.training.output import open_output
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines
from trials.tasks.training.settings import training_settings

pytestmark = pytest.mark.ranks


@pytest.mark.long
def test_a_frozen_part_keeps_its_bits_and_is_in_no_checkpoint(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    saved_model(shallow, tmp_path / "model")
    model = {"path": str(tmp_path / "model"), "weights": "pretrained", "dtype": "bfloat16"}
    training = {"freeze": ["vision"], "global_batch_samples": 12, "learning_rate": 5e-3, "clip_norm": 1.0}
    plan = plan_of("3+0r1,0", "1+2r1,1", zero=1)
    whole = prepared_of(shallow, tmp_path / "whole", model=model, training=training)
    report = train(pool, whole, plan)
    parts = prepared_of(shallow, tmp_path / "parts", model=model, training=training)
    assert not train(pool, parts, plan, max_steps=2).finished
    assert train(pool, parts, plan).steps == report.steps
    assert losses(parts) == losses(whole)
    assert report.model is not None
    before, after = stored_tensors(tmp_path / "model"), stored_tensors(report.model)
    assert before.keys() == after.keys()
    frozen = {name for name in before if "vision_model" in name or "vision_tower" in name}
    assert frozen
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.to(torch.bfloat16)) == (name in frozen), name
    folder = parts.job.training.output / f"checkpoint-{report.steps}"
    held = {key.partition(":")[2] for file in folder.glob("*.safetensors") for key in load_file(file)}
    skeleton = build_skeleton(load_config(str(tmp_path / "model")), torch.bfloat16)
    vision = skeleton.chain.paths_of("vision")
    assert held == {
        name
        for name, _ in skeleton.model.named_parameters()
        if not name.startswith(tuple(f"{each}." for each in vision))
    }
    other = parts.job.training.model_copy(update={"freeze": ("vision", "projector")})
    request = parts.request(plan, Training(output=parts.job.training.output))
    settings = training_settings(request, parts.index)
    changed = parts.job.model_copy(update={"training": other})
    assert settings.freeze == ("vision",)
    with pytest.raises(OutputTaken, match="freeze"):
        open_output(parts.job.training.output, training_settings(replace(request, job=changed), parts.index), plan)


def test_the_learning_rate_that_is_told_is_the_highest_of_the_trained_parts(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    training = {
        "freeze": ["vision"],
        "learning_rate": 1e-2,
        "learning_rates": {"projector": 1e-4, "language": 1e-3},
        "max_steps": 2,
        "schedule": "linear",
    }
    prepared = prepared_of(shallow, tmp_path, training=training)
    train(pool, prepared, plan_of("3+0", "1+2"))
    lines = read_lines(prepared.job.training.output / PROGRESS_FILE)
    assert [line.learning_rate for line in lines if isinstance(line, Progress)] == [1e-3, 5e-4]
