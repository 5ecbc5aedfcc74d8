"""The full training: checkpoints, exact resume, and a final model that transformers reads."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, AutoTokenizer

from autotune.workload import Prepared
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import plan_of, prepared_of, train, variant_of
from trials.outcome import Crash
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.answer import TrainingReport
from trials.tasks.request import Training
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

PIPELINE = plan_of("3+0r1,0", "1+2")
ZERO = plan_of("4+2r0,1", data=2, zero=1)
SPLIT_WEIGHTS = plan_of("4+2r0,1", data=2, zero=3)
PLANS = {"pipeline": PIPELINE, "ZeRO 1": ZERO, "ZeRO 3": SPLIT_WEIGHTS}
EPOCHS = {"epochs": 2, "global_batch_samples": 8, "learning_rate": 5e-3}


def losses(prepared: Prepared) -> dict[int, float]:
    """Return the losses by step; the progress file holds each step once."""
    lines = (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()
    records = list(map(json.loads, lines))
    found = {record["step"]: record["loss"] for record in records}
    assert len(found) == len(records)
    return found


def learning_rates(prepared: Prepared) -> dict[int, float]:
    """Return the learning rates by step."""
    lines = (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()
    return {record["step"]: record["learning_rate"] for record in map(json.loads, lines)}


@pytest.mark.parametrize("plan", parameters(PLANS, short=()))
def test_a_training_that_was_interrupted_goes_on_exactly(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    whole = prepared_of(shallow, tmp_path / "whole", data=data, training=EPOCHS)
    parts = prepared_of(shallow, tmp_path / "parts", data=data, training=EPOCHS)
    done = train(pool, whole, plan)
    assert done.finished
    stop = done.steps // 2 + 1
    stopped = train(pool, parts, plan, max_steps=stop)
    assert (stopped.steps, stopped.finished) == (stop, False)
    assert train(pool, parts, plan) == TrainingReport(
        steps=done.steps, finished=True, model=parts.job.training.output / "model", blank_samples=0
    )
    expected = losses(whole)
    assert sorted(expected) == list(range(1, done.steps + 1))
    assert losses(parts) == pytest.approx(expected, rel=1e-5)
    assert expected[done.steps] < expected[1] - 0.5


@pytest.mark.parametrize("plan", parameters(PLANS, short=("ZeRO 1",)))
def test_an_interrupted_training_draws_the_same_dropout(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def drop(config: dict[str, Any]) -> None:
        config["text_config"]["attention_dropout"] = 0.3

    dropping = variant_of(shallow, tmp_path / "dropping", drop)
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    cases = {"whole": dropping, "parts": dropping, "without": shallow}
    whole, parts, without = (
        prepared_of(each, tmp_path / name, data=data, training={**EPOCHS, "max_steps": 3})
        for name, each in cases.items()
    )
    train(pool, whole, plan)
    train(pool, parts, plan, max_steps=1)
    train(pool, parts, plan)
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-6)
    train(pool, without, plan, max_steps=1)
    assert losses(without)[1] != pytest.approx(losses(whole)[1], rel=1e-6)


@pytest.mark.parametrize("plan", parameters(PLANS, short=("ZeRO 1",)))
def test_an_interrupted_training_continues_its_schedule(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    training = {
        **EPOCHS,
        "max_steps": 5,
        "schedule": "cosine",
        "warmup": 2,
        "weight_decay": 0.1,
        "betas": (0.9, 0.95),
        "clip_norm": 0.5,
        "learning_rates": {"vision": 1e-3, "projector": 1e-2},
    }
    whole = prepared_of(shallow, tmp_path / "whole", data=data, training=training)
    parts = prepared_of(shallow, tmp_path / "parts", data=data, training=training)
    assert train(pool, whole, plan).steps == 5
    assert not train(pool, parts, plan, max_steps=3).finished
    done = train(pool, parts, plan)
    assert (done.steps, done.finished, done.model) == (5, True, parts.job.training.output / "model")
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    expected = {step: 1e-2 * factor for step, factor in enumerate((0, 0.5, 1, 0.75, 0.25), 1)}  # of the projector
    assert learning_rates(whole) == pytest.approx(expected)
    assert learning_rates(parts) == pytest.approx(expected)


def test_the_norm_that_clips_is_logged_with_and_without_zero(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    # Each step has all samples, so that it is the same one under every plan.
    training = {"epochs": 2, "global_batch_samples": 24, "learning_rate": 5e-3, "clip_norm": 0.5}
    norms = []
    for name, plan in {"ZeRO 1": ZERO, "pipeline": PIPELINE, "tensor": plan_of("4+2r0,1", tensor=2)}.items():
        prepared = prepared_of(shallow, tmp_path / name, data=data, training=training)
        train(pool, prepared, plan)
        lines = (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()
        norms.append([json.loads(line)["gradient_norm"] for line in lines])
    assert all(norm > 0.5 for norm in norms[0])
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=1e-4)


def test_checkpoints_after_some_steps_come_in_place_of_those_after_epochs(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    training = {"epochs": 4, "global_batch_samples": 24, "checkpoint_every": 3, "keep_checkpoints": 4}
    prepared = prepared_of(shallow, tmp_path, data=data, training=training)
    assert train(pool, prepared, ZERO).steps == 4
    saved = sorted(each.name for each in prepared.job.training.output.glob("checkpoint-*"))
    assert saved == ["checkpoint-3", "checkpoint-4"]  # the last one is that of the end


@pytest.mark.long
def test_a_training_ends_after_max_steps_and_continues_when_they_are_raised(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def to(steps: int) -> Prepared:
        changed = prepared.job.training.model_copy(update={"max_steps": steps})
        return replace(prepared, job=prepared.job.model_copy(update={"training": changed}))

    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    prepared = prepared_of(shallow, tmp_path, data=data, training={**EPOCHS, "schedule": "linear"})
    first = train(pool, to(2), PIPELINE)
    assert (first.steps, first.finished) == (2, True)
    refused = pool.ask(to(1).request(PIPELINE, Training(output=prepared.job.training.output)), 120)
    assert isinstance(refused, Crash)
    assert "checkpoint-2 is beyond the 1 step of training.max_steps: 1; raise it, or name" in refused.detail
    assert train(pool, to(4), PIPELINE).steps == 4
    assert learning_rates(prepared) == pytest.approx({1: 5e-3, 2: 2.5e-3, 3: 2.5e-3, 4: 1.25e-3})
    state = json.loads((prepared.job.training.output / "model" / "autotune.json").read_text())
    assert state["steps"] == 4


@pytest.mark.long
def test_a_training_goes_on_exactly_from_the_checkpoint_before_a_broken_one(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]}
    prepared = prepared_of(shallow, tmp_path, data=data, training={**EPOCHS, "checkpoint_every": 1})
    output = prepared.job.training.output
    train(pool, prepared, PIPELINE, max_steps=3)
    expected = losses(prepared)
    assert sorted(path.name for path in output.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    broken = output / "checkpoint-3" / "stage-1.safetensors"
    content = broken.read_bytes()
    broken.write_bytes(content[:-8000] + bytes(4000) + content[-4000:])
    assert train(pool, prepared, PIPELINE, max_steps=3).steps == 3
    assert losses(prepared) == pytest.approx(expected, rel=1e-5)
    assert broken.read_bytes() == content
    assert (output / "checkpoint-3.old-1" / broken.name).read_bytes() != content


@pytest.mark.long
def test_a_training_with_other_settings_does_not_go_on(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    def refused(**training: object) -> str:
        job = prepared.job.model_copy(update={"training": prepared.job.training.model_copy(update=training)})
        request = replace(prepared.request(ZERO, Training(output=prepared.job.training.output)), job=job)
        cause = pool.ask(request, 120)
        assert isinstance(cause, Crash)
        return cause.detail

    prepared = prepared_of(shallow, tmp_path, training=EPOCHS)
    train(pool, prepared, ZERO, max_steps=1)
    before = {path: path.read_bytes() for path in prepared.job.training.output.rglob("*") if path.is_file()}
    assert "belongs to a training with seed 0, not 1" in refused(seed=1)
    assert "global_batch_samples 8, not 6" in refused(global_batch_samples=6)
    assert before == {path: path.read_bytes() for path in prepared.job.training.output.rglob("*") if path.is_file()}


@pytest.mark.parametrize("plan", parameters({"pipeline": plan_of("3+0r1,0", "1+2", zero=1), "data": ZERO}, short=()))
def test_bfloat16_trains_and_goes_on_from_its_checkpoint(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "data": {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:18"}]},
        "training": {"global_batch_samples": 6, "learning_rate": 5e-3},
    }
    prepared = prepared_of(shallow, tmp_path, **settings)
    assert train(pool, prepared, plan, max_steps=2).steps == 2
    assert train(pool, prepared, plan).finished
    assert losses(prepared)[3] < losses(prepared)[1] - 0.2


@pytest.mark.parametrize(
    ("plan", "tied"),
    parameters(
        {
            "pipeline": (PIPELINE, False),
            "ZeRO 3": (SPLIT_WEIGHTS, False),
            "pipeline, tied": (PIPELINE, True),
        },
        short=("ZeRO 3",),
    ),
)
def test_the_final_model_is_the_trained_one_as_transformers_saves_it(
    plan: Plan, tied: bool, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    shutil.copytree(shallow / "model", tmp_path / "model")
    generation = {"temperature": 0.25, "do_sample": True, "transformers_version": "5.0.0"}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    further = tmp_path / "model" / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("{{ messages }}")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = tied
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    model_section = {"path": str(tmp_path / "model")}
    prepared = prepared_of(shallow, tmp_path, model=model_section, training={"global_batch_samples": 24})
    report = train(pool, prepared, plan)
    assert report.model is not None
    loaded: Any = AutoModelForImageTextToText.from_pretrained(report.model, output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model.generation_config.temperature == 0.25
    assert AutoTokenizer.from_pretrained(report.model).chat_template["tool_use"] == "{{ messages }}"
    checkpoint = prepared.job.training.output / f"checkpoint-{report.steps}"
    trained = model.state_dict()
    found = 0
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in (key for key in file.keys() if key.startswith("weight:")):  # noqa: SIM118 (not a dict)
                assert torch.equal(file.get_tensor(key), trained[key.removeprefix("weight:")])
                found += 1
    assert found == len(list(model.parameters()))
    model.save_pretrained(tmp_path / "again")
    saved, again = stored_tensors(report.model), stored_tensors(tmp_path / "again")
    assert saved.keys() == again.keys()
    assert all(torch.equal(saved[name], again[name]) for name in again)
    fresh = AutoModelForImageTextToText.from_config(model.config)
    fresh.save_pretrained(tmp_path / "fresh")  # whose layout does not depend on what was loaded
    assert saved.keys() == stored_tensors(tmp_path / "fresh").keys()
    written = {path: path.stat().st_mtime_ns for path in report.model.iterdir()}
    assert train(pool, prepared, plan) == report
    assert written == {path: path.stat().st_mtime_ns for path in report.model.iterdir()}


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = (load_file(path) for path in folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in file.items()}


def test_experts_and_their_routers_biases_are_read_and_saved(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    heads = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "intermediate_size": 32}
    saved_model(shallow, tmp_path / "model", text={"model_type": "solar_open", **heads, **experts})
    before = stored_tensors(tmp_path / "model")
    for name in (name for name in before if name.endswith("correction_bias")):
        before[name] += torch.arange(4)
    save_file(before, tmp_path / "model" / "model.safetensors")
    prepared = prepared_of(
        shallow,
        tmp_path,
        model={"path": str(tmp_path / "model"), "weights": "pretrained"},
        training={"global_batch_samples": 48, "learning_rate": 1e-9},
    )
    report = train(pool, prepared, plan_of("4+1", "0+2"))
    assert report.model is not None
    after = stored_tensors(report.model)
    assert "language_model.model.layers.2.mlp.experts.3.up_proj.weight" in after
    assert "language_model.model.layers.2.mlp.gate.e_score_correction_bias" in after
    assert after.keys() == before.keys()
    assert all(torch.allclose(after[name], before[name], atol=1e-6) for name in before)


@pytest.mark.long
def test_pretrained_weights_are_where_a_training_begins(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    first = prepared_of(shallow, tmp_path / "first", training={"global_batch_samples": 24, "learning_rate": 3e-3})
    model = train(pool, first, PIPELINE).model
    second = prepared_of(
        shallow, tmp_path / "second", model={"path": str(model), "weights": "pretrained"}, training={"seed": 5}
    )
    train(pool, second, ZERO, max_steps=1)
    assert losses(second)[1] < losses(first)[1] - 0.3
