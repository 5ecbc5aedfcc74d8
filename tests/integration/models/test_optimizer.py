"""The first update is AdamW's, with clipped gradients and each part's learning rate and decay, whatever the layout."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.integration.models.test_parity import ADAM_SHARE, plain_model, reference
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, variant_of
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks

CLIP_NORM = 0.5
DECAY = 0.5
RATES = {"vision_tower": 1e-4, "multi_modal_projector": 1e-3, "language_model": 1e-2, "lm_head": 1e-2}
BETAS = (1 - ADAM_SHARE, 0.95)

PLANS = {
    "tensor": plan_of("4+2", tensor=2),
    "tensor, ZeRO 1": plan_of("4+2", tensor=2, zero=1),
    "pipeline and tensor": plan_of("4+1", "0+1", tensor=2),
    "pipeline and tensor, ZeRO 1": plan_of("4+0", "0+2", tensor=2, zero=1),
    "data and tensor, ZeRO 1": plan_of("4+2", data=2, tensor=2, zero=1),
    "pipeline": plan_of("4+0", "0+2"),
    "pipeline, ZeRO 1": plan_of("4+1", "0+1", zero=1),
    "data parallel": plan_of("4+2", data=2),
    "data parallel, ZeRO 1": plan_of("4+2", data=2, zero=1),
    "data parallel, ZeRO 2": plan_of("4+2", data=2, zero=2),
    "data parallel, ZeRO 3": plan_of("4+2", data=2, zero=3),
}


BFLOAT16_PLANS = {
    "tensor, ZeRO 1": plan_of("4+2", tensor=2, zero=1),
    "pipeline, ZeRO 1": plan_of("4+1", "0+1", zero=1),
    "data parallel, ZeRO 1": plan_of("4+2", data=2, zero=1),
    "data parallel, ZeRO 2": plan_of("4+2", data=2, zero=2),
}


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.mark.parametrize("plan", parameters(PLANS, short=("tensor, ZeRO 1",)))
def test_the_first_update_has_clipped_gradients_and_the_settings_of_each_part(
    plan: Plan, tied: Path, pool: WarmPool, four_ranks: WarmPool, tmp_path: Path
) -> None:
    training = {
        "clip_norm": CLIP_NORM,
        "betas": BETAS,
        "weight_decay": DECAY,
        "learning_rate": RATES["language_model"],
        "learning_rates": {"vision": RATES["vision_tower"], "projector": RATES["multi_modal_projector"]},
    }
    ranks = plan.layout.world_size
    prepared = prepared_of(tied, tmp_path, training=training, hardware={"devices": ranks})
    output = prepared.job.training.output
    answer = (pool if ranks == 2 else four_ranks).ask(prepared.request(plan, Training(output=output, max_steps=1)), 120)
    assert isinstance(answer, Answers), answer
    _, gradients = reference(prepared, plan)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients.values()]))
    assert norm > 2 * CLIP_NORM
    before = dict(plain_model(prepared.job.model, prepared.job.training.seed).named_parameters())
    trained = stored(output / "checkpoint-1")
    for name, gradient in gradients.items():
        clipped = trained["exp_avg", name] / (1 - BETAS[0])
        wanted = gradient * CLIP_NORM / norm
        difference = torch.linalg.vector_norm(clipped - wanted)
        assert difference <= 1e-4 * torch.linalg.vector_norm(wanted) + 1e-9, name
        rate = next(rate for part, rate in RATES.items() if part in name)
        decay = DECAY if gradient.ndim > 1 else 0.0
        magnitude = (trained["exp_avg_sq", name] / (1 - BETAS[1])).sqrt() + 1e-8
        updated = before[name].detach() * (1 - rate * decay) - rate * clipped / magnitude
        torch.testing.assert_close(trained["weight", name], updated, rtol=1e-6, atol=1e-3 * rate)
    # A tied weight, of which two stages hold a copy, is in a checkpoint once.
    assert {name for part, name in trained if part == "weight"} == set(gradients)


@pytest.mark.parametrize("plan", parameters(BFLOAT16_PLANS, short=("data parallel, ZeRO 1",)))
def test_gradients_of_bfloat16_weights_are_clipped_to_the_norm(
    plan: Plan, tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    training = {"clip_norm": CLIP_NORM, "learning_rates": {"vision": 1e-4}}
    prepared = prepared_of(tied, tmp_path, model={"dtype": "bfloat16"}, training=training)
    output = prepared.job.training.output
    answer = pool.ask(prepared.request(plan, Training(output=output, max_steps=1)), 120)
    assert isinstance(answer, Answers), answer
    trained = stored(output / "checkpoint-1")
    moments = [tensor for (part, name), tensor in trained.items() if part == "exp_avg"]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in moments])) / ADAM_SHARE
    assert norm == pytest.approx(CLIP_NORM, rel=1e-4)


def stored(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """Return the tensors of a checkpoint by (weight or moment, name of the parameter)."""
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                part, _, name = key.partition(":")
                found[part, name] = file.get_tensor(key)
    return found
