"""Trainings of models with layers that nothing runs, kept states, and a parameter outside modules."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from autotune.workload import Prepared
from tests.contracts.test_families import TINY
from tests.values.own_head import make_untied
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, train
from trials import plugins
from trials.data.tokens import pack
from trials.job import LoraSection, TrainingSection
from trials.model.family import join_samples
from trials.model.paths import tensors_at
from trials.model.skeleton import build_skeleton, load_config
from trials.model.trained import choose_trained, draw_trained
from trials.model.weights import draw_weights
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks import session
from trials.tasks.request import Training
from trials.tasks.session import build_stage
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

PLANS = {
    "llava": plan_of("2+0", "1+4"),
    "llava-siglip": plan_of("2+0r1,0", "2+4r2,1"),
    "llava-next": plan_of("3+1", "0+3"),
    "llava-onevision": plan_of("4+4", data=2, zero=1),
}
SPLIT_WEIGHTS = plan_of("3+4", data=2, zero=3)
NEWLINE = "model.image_newline"


def tiny(name: str, folder: Path) -> Path:
    """A model folder without weights."""
    plugins.load(TINY, name).make(folder)
    return folder


def job_of(example: Path, model: Path, folder: Path, *, weights: str = "random", **training: Any) -> Prepared:
    return prepared_of(
        example,
        folder,
        model={"path": str(model), "weights": weights},
        data={"sources": [{"path": str(example / "data" / "train.jsonl"), "sampling": "first:16"}]},
        training={"global_batch_samples": 8, "learning_rate": 5e-3, **training},
    )


def losses(prepared: Prepared) -> dict[int, float]:
    lines = (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def unused_names(model: Path) -> set[str]:
    """The weights under the paths that nothing runs."""
    skeleton = build_skeleton(load_config(str(model)), torch.float32)
    return {
        name for name in skeleton.model.state_dict() if name.startswith(tuple(f"{p}." for p in skeleton.chain.unused))
    }


def assert_equal_logits(prepared: Prepared, folder: Path, model: Any) -> None:
    """Compare transformers' model with a stage that reads the same folder, on a sample with images."""
    settings = prepared.job.model.model_copy(update={"path": str(folder), "weights": "pretrained"})
    shape = prepared.workload.model
    request = prepared.request(plan_of(f"{shape.vision_layers}+{shape.language_layers}"), Training(output=folder))
    request = replace(request, job=request.job.model_copy(update={"model": settings}))
    stage = build_stage(request, 0, torch.device("cpu")).eval()
    images = stage.family.random_images(model.config, 3)
    ids = torch.cat([torch.tensor([45, 46]), images.input_ids, torch.tensor([47, 48, 49])])
    tokens = join_samples(stage.family, model.config, [(ids, images.grids)])
    with torch.no_grad():
        found = stage.head(stage(pack((images.pixels,), tokens))[0])
        expected = model.eval()(**stage.family.model_inputs(model.config, ids, images)).logits[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "plan"),
    parameters({name: (name, plan) for name, plan in PLANS.items()}, short=("llava-siglip",)),
)
def test_a_trained_model_is_saved_whole_with_its_unused_layers_as_they_were(
    name: str, plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    source = tiny(name, tmp_path / "model")
    before = AutoModelForImageTextToText.from_config(load_config(str(source)), dtype=torch.float32)
    before.save_pretrained(source)
    prepared = job_of(shallow, source, tmp_path, weights="pretrained")
    report = train(pool, prepared, plan)
    assert report.model is not None
    loaded: Any = AutoModelForImageTextToText.from_pretrained(report.model, output_loading_info=True)
    trained, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    unused, old, new = unused_names(source), before.state_dict(), trained.state_dict()
    assert unused
    assert {key for key in new if torch.equal(new[key], old[key])} == unused
    assert_equal_logits(prepared, report.model, trained)
    fresh = AutoModelForImageTextToText.from_config(trained.config)
    fresh.save_pretrained(tmp_path / "fresh")
    stored = {key for file in report.model.glob("*.safetensors") for key in load_file(file)}
    assert stored == load_file(tmp_path / "fresh" / "model.safetensors").keys()


@pytest.mark.parametrize(
    ("name", "plan"),
    parameters(
        {"internvl": ("internvl", plan_of("4+1", "0+3")), "mistral3": ("mistral3", plan_of("4+4", data=2, zero=3))},
        short=("internvl", "mistral3"),
    ),
)
def test_a_head_of_its_own_is_trained_and_saved_although_the_configuration_ties_it(
    name: str, plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    source = tmp_path / "model"
    make_untied(plugins.load(TINY, name).make, source)
    assert AutoConfig.from_pretrained(source).tie_word_embeddings
    before = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32)
    prepared = job_of(shallow, source, tmp_path, weights="pretrained")
    assert not train(pool, prepared, plan, max_steps=1).finished
    report = train(pool, prepared, plan)
    assert report.model is not None
    loaded: Any = AutoModelForImageTextToText.from_pretrained(report.model, output_loading_info=True)
    trained, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not trained.config.tie_word_embeddings
    for matrix in ("get_input_embeddings", "get_output_embeddings"):
        assert not torch.equal(getattr(trained, matrix)().weight, getattr(before, matrix)().weight)
    assert trained.get_output_embeddings().weight is not trained.get_input_embeddings().weight
    assert_equal_logits(prepared, report.model, trained)


@pytest.mark.parametrize(
    "plan",
    parameters({"pipeline": PLANS["llava-next"], "ZeRO 3": SPLIT_WEIGHTS}, short=("pipeline",)),
)
def test_unused_layers_of_random_weights_and_a_parameter_outside_modules_are_drawn_from_the_seed(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    source = tiny("llava-next", tmp_path / "model")
    report = train(pool, job_of(shallow, source, tmp_path, seed=7), plan)
    assert report.model is not None
    loaded: Any = AutoModelForImageTextToText.from_pretrained(report.model, output_loading_info=True)
    trained, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    skeleton = build_skeleton(load_config(str(source)), torch.float32)
    draw_weights(skeleton.model, [NEWLINE, *skeleton.chain.unused], 7, torch.device("cpu"))
    drawn, saved = skeleton.model.state_dict(), trained.state_dict()
    assert all(torch.equal(saved[name], drawn[name]) for name in unused_names(source))
    assert any(drawn[name].std() > 0 for name in unused_names(source))
    assert not torch.allclose(saved[NEWLINE], drawn[NEWLINE])
    assert torch.allclose(saved[NEWLINE], drawn[NEWLINE], atol=5e-3 * report.steps * 1.1)


def test_another_seed_draws_other_weights_and_adapters(tmp_path: Path) -> None:
    source = tiny("llava", tmp_path / "model")

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        training = TrainingSection(lora=LoraSection(rank=2), seed=seed)
        skeleton = build_skeleton(load_config(str(source)), torch.float32)
        choose_trained(skeleton, training)
        draw_weights(skeleton.model, skeleton.chain.parts, seed, torch.device("cpu"))
        draw_trained(skeleton.model, skeleton.chain.parts, training)
        state: dict[str, torch.Tensor] = skeleton.model.state_dict()
        return {name: each for name, each in state.items() if not each.is_meta and each.std() > 0}

    first, again, other = drawn(7), drawn(7), drawn(8)
    assert any("lora_A" in name for name in first)
    assert first.keys() == other.keys()
    assert all(torch.equal(again[name], each) for name, each in first.items())
    assert not any(torch.equal(other[name], each) for name, each in first.items())


def test_unused_layers_are_drawn_on_the_device_of_the_rank(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny("llava", tmp_path / "model")
    request = job_of(shallow, source, tmp_path).request(PLANS["llava"], Training(output=tmp_path))
    on_gpu = torch.device("cuda", 0)

    def draw(model: Any, paths: Any, seed: int, device: torch.device) -> None:
        draw_weights(model, paths, seed, torch.device("cpu"))
        for each in (tensor for path in paths for tensor in tensors_at(model, path).values()):
            each.data += device.type == "cuda"

    monkeypatch.setattr(session, "draw_weights", draw)
    skeleton = build_skeleton(load_config(str(source)), torch.float32)
    draw(skeleton.model, skeleton.chain.unused, request.job.training.seed, on_gpu)
    drawn, found = skeleton.model.state_dict(), session.unused_tensors(request, on_gpu)
    assert found.keys() == unused_names(source)
    assert all(torch.equal(each, drawn[name]) for name, each in found.items())


@pytest.mark.parametrize(
    "plan",
    parameters({"pipeline": PLANS["llava-next"], "ZeRO 3": SPLIT_WEIGHTS}, short=()),
)
def test_a_parameter_outside_modules_is_drawn_trained_and_taken_up_again(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    source = tiny("llava-next", tmp_path / "model")
    whole = job_of(shallow, source, tmp_path / "whole", epochs=2)
    parts = job_of(shallow, source, tmp_path / "parts", epochs=2)
    done = train(pool, whole, plan)
    assert not train(pool, parts, plan, max_steps=2).finished
    report = train(pool, parts, plan)
    assert report.steps == done.steps
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-5)
    assert report.model is not None
    drawn = build_skeleton(load_config(str(source)), torch.float32).model
    draw_weights(drawn, [NEWLINE], parts.job.training.seed, torch.device("cpu"))
    held = checkpointed(parts.job.training.output / f"checkpoint-{done.steps}")
    saved = AutoModelForImageTextToText.from_pretrained(report.model).state_dict()[NEWLINE]
    assert torch.equal(held[f"weight:{NEWLINE}"], saved)
    assert (held[f"exp_avg_sq:{NEWLINE}"] > 0).all()
    assert not torch.allclose(saved, drawn.state_dict()[NEWLINE])
    assert torch.allclose(saved, drawn.state_dict()[NEWLINE], atol=5e-3 * done.steps * 1.1)


def checkpointed(folder: Path) -> dict[str, torch.Tensor]:
    files = [safe_open(path, framework="pt") for path in folder.glob("*.safetensors")]
    return {key: file.get_tensor(key) for file in files for key in file.keys()}  # noqa: SIM118 (not a dict)
