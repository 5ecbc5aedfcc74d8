"""Trainings with LoRA: gradients are those of peft's own model, and peft loads the result."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from autotune.workload import Prepared
from tests.integration.models.test_parity import ADAM_SHARE, plain_model, reference
from tests.integration.running.training.test_training_families import checkpointed
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import PACKED, plan_of, prepared_of, train
from trials.data.tokens import pack
from trials.model.family import join_samples
from trials.model.stage import StageModule
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.request import Training
from trials.tasks.session import build_stage
from trials.tasks.training.adapter import peft_name

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft asks for it
]

CASES: dict[str, tuple[dict[str, Any], Plan]] = {
    "language layers, behind a frozen stage": ({"rank": 4, "alpha": 12}, plan_of("4+0r2,0", "0+2r0,1")),
    "both towers": ({"rank": 8, "parts": ["vision", "language"]}, plan_of("2+0r1,0", "2+2r1,1", zero=1)),
    "some targets and the projector": (
        {"rank": 8, "targets": ["q_proj", "self_attn.v_proj"], "train_projector": True},
        plan_of("4+2r3,1", data=2, zero=1),
    ),
    "both towers, packs shared": (
        {"rank": 4, "parts": ["vision", "language"]},
        plan_of("4+2r3,1", data=2, zero=1, packing=replace(PACKED, sequence=2)),
    ),
}


@pytest.mark.parametrize("name", parameters({name: name for name in CASES}, short=("some targets and the projector",)))
def test_gradients_are_those_of_pefts_own_model_which_loads_the_result(
    name: str, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    lora, plan = CASES[name]
    saved_model(shallow, tmp_path / "model")
    prepared = prepared_of(
        shallow,
        tmp_path,
        model={"path": str(tmp_path / "model"), "weights": "pretrained"},
        training={"lora": lora, "global_batch_samples": 24, "learning_rate": 2e-2, "checkpoint_every": 1},
    )
    assert train(pool, prepared, plan, max_steps=1).steps == 1
    report = train(pool, prepared, plan)
    assert report.steps > 1
    assert report.model is not None
    first, second = (checkpointed(prepared.job.training.output / f"checkpoint-{steps}") for steps in (1, 2))
    base = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    trained: Any = PeftModel.from_pretrained(base, report.model)
    last = checkpointed(prepared.job.training.output / f"checkpoint-{report.steps}")
    assert stored_names(report.model) == {peft_name(key.partition(":")[2]) for key in last}
    check_gradients(prepared, plan, trained.peft_config["default"], first, second)
    check_logits(prepared, trained, last)


def stored_names(folder: Path) -> set[str]:
    return set(load_file(folder / "adapter_model.safetensors"))


def check_gradients(
    prepared: Prepared, plan: Plan, config: Any, first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]
) -> None:
    """Compare the gradients of the second step, when B is no longer 0, with those of the samples one by one."""
    config.inference_mode = False
    model: Any = get_peft_model(plain_model(prepared.job.model, 0), config)
    names = {
        parameter_name.replace("modules_to_save.default.", "").removeprefix("base_model.model."): parameter
        for parameter_name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert names.keys() == {key.partition(":")[2] for key in first}
    with torch.no_grad():
        for name, parameter in names.items():
            parameter.copy_(first[f"weight:{name}"])
    reference(prepared, plan, 1, model)
    assert any(parameter.grad.any() for name, parameter in names.items() if "lora_A" in name)
    for name, parameter in names.items():
        key = f"exp_avg:{name}"
        found = (second[key] - (1 - ADAM_SHARE) * first[key]) / ADAM_SHARE
        difference = torch.linalg.vector_norm(found - parameter.grad)
        # Two moments are subtracted, whose rounding counts.
        assert difference <= 1e-4 * torch.linalg.vector_norm(parameter.grad) + 1e-6 * first[key].norm() + 1e-9, name


def check_logits(prepared: Prepared, trained: Any, weights: dict[str, torch.Tensor]) -> None:
    """Compare the loaded adapter on its model with a stage that has the weights of the last checkpoint."""
    stage = whole_stage(prepared)
    held = dict(stage.model.named_parameters())
    with torch.no_grad():
        for key, tensor in weights.items():
            part, _, name = key.partition(":")
            if part == "weight":
                held[name].copy_(tensor)
        images = stage.family.random_images(stage.model.config, 3)
        ids = torch.cat([torch.tensor([105, 106]), images.input_ids, torch.tensor([107, 108, 109])])
        tokens = join_samples(stage.family, stage.model.config, [(ids, images.grids)])
        found = stage.head(stage(pack((images.pixels,), tokens))[0])
        inputs = stage.family.model_inputs(stage.model.config, ids, images)
        torch.testing.assert_close(trained.eval()(**inputs).logits[0], found, rtol=1e-4, atol=1e-5)
        with trained.disable_adapter():
            assert not torch.allclose(trained(**inputs).logits[0], found, rtol=1e-2)


def whole_stage(prepared: Prepared) -> StageModule:
    shape = prepared.workload.model
    plan = plan_of(f"{shape.vision_layers}+{shape.language_layers}")
    return build_stage(prepared.request(plan, Training(output=Path())), 0, torch.device("cpu")).eval()
