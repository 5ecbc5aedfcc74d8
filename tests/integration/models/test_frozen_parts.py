"""Parts that do not train: the others get the gradients of the plain model, whatever the split, and no more is done."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.models.test_parity import reference, trained_gradients
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of, variant_of
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Plan
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Training
from trials.workload import Part

pytestmark = pytest.mark.ranks

SHARED = replace(PACKED, sequence=2)

CASES: dict[str, tuple[tuple[Part, ...], Plan]] = {
    "first stage frozen, the second's leading layers too": (("vision",), plan_of("3+0r2,0", "1+2r1,1")),
    "only the projector, whose stage is the first": (("vision", "language"), plan_of("4+1r4,1", "0+1r0,1")),
    "only the projector, behind a frozen stage": (("vision", "language"), plan_of("2+0", "2+2r1,2", zero=1)),
    "only the vision tower, before a frozen stage": (("projector", "language"), plan_of("4+1r1,1", "0+1r0,1")),
    "no projector, with a tied embedding on two stages": (("projector",), plan_of("4+1", "0+1r0,1")),
    "data parallel, ZeRO 1": (("vision", "language"), plan_of("4+2r4,2", data=2, zero=1)),
    "data parallel, ZeRO 3": (("language",), plan_of("4+2", data=2, zero=3)),
    "layers cut, only the projector": (("vision", "language"), plan_of("4+2r4,2", tensor=2, zero=1)),
    "layers cut, no vision tower": (("vision",), plan_of("4+2r1,1", tensor=2)),
    "layers cut, only the vision tower": (("projector", "language"), plan_of("4+2r1,1", tensor=2)),
    "shared packs, only the projector": (("vision", "language"), plan_of("4+2r4,2", data=2, zero=1, packing=SHARED)),
    "shared packs, no vision tower": (("vision",), plan_of("4+2r1,1", data=2, packing=SHARED)),
    "shared packs, only the vision tower": (("projector", "language"), plan_of("4+2r1,1", data=2, packing=SHARED)),
}


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with few layers, and an output projection that is the word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.mark.parametrize(
    ("freeze", "plan"),
    parameters(
        CASES,
        short=("first stage frozen, the second's leading layers too",),
    ),
)
def test_the_other_parts_have_the_clipped_gradients_of_the_plain_model(
    freeze: tuple[Part, ...], plan: Plan, tied: Path, pool: WarmPool, tmp_path: Path
) -> None:
    prepared = prepared_of(tied, tmp_path, training={"freeze": freeze, "clip_norm": 0.1})
    output = prepared.job.training.output
    answer = pool.ask(prepared.request(plan, Training(output=output, max_steps=1)), 120)
    assert isinstance(answer, Answers), answer
    chain = build_skeleton(load_config(prepared.job.model.path), torch.float32).chain
    frozen = tuple(f"{path}." for part in freeze for path in chain.paths_of(part))
    gradients = {
        name: gradient for name, gradient in reference(prepared, plan)[1].items() if not name.startswith(frozen)
    }
    norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients.values()]).norm()
    assert norm > 0.1
    trained = trained_gradients(output / "checkpoint-1")
    copies = trained.keys() - gradients.keys()
    assert copies <= {"lm_head.weight"}
    for name, gradient in gradients.items():
        wanted = gradient * 0.1 / norm
        difference = torch.linalg.vector_norm(trained[name] - wanted)
        assert difference <= 1e-4 * torch.linalg.vector_norm(wanted) + 1e-9, name
