"""Gradients are clipped by the norm over the whole model, whatever the layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.models.test_parity import reference, trained_gradients
from tests.training_values import plan_of, prepared_of, variant_of
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks

CLIP_NORM = 0.5

PLANS = {
    "pipeline": plan_of("3+0", "1+2"),
    "pipeline, embedding on the second of its stages": plan_of("4+1", "0+1", zero=1),
    "data parallel": plan_of("4+2", data=2),
    "data parallel, ZeRO 1": plan_of("4+2", data=2, zero=1),
    "data parallel, ZeRO 2": plan_of("4+2", data=2, zero=2),
    "data parallel, ZeRO 3": plan_of("4+2", data=2, zero=3),
}


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_are_scaled_by_the_norm_over_all_ranks_and_stages(
    plan: Plan, tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    rates = {"vision": 2e-6, "projector": 1e-4}
    prepared = prepared_of(tied, tmp_path, training={"clip_norm": CLIP_NORM, "learning_rates": rates})
    output = prepared.job.training.output
    answer = pool.ask(prepared.request(plan, Training(output=output, max_steps=1)), 120)
    assert isinstance(answer, Answers), answer
    _, gradients = reference(prepared, plan)
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients.values()]))
    assert norm > 2 * CLIP_NORM
    trained = trained_gradients(output / "checkpoint-1")
    for name, gradient in gradients.items():
        wanted = gradient * CLIP_NORM / norm
        difference = torch.linalg.vector_norm(trained[name] - wanted)
        assert difference <= 1e-4 * torch.linalg.vector_norm(wanted) + 1e-9, name
