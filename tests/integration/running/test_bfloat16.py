"""bfloat16 trains with float32 sums and states, under every layout."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from autotune.workload import Prepared
from tests.values.parameters import parameters
from tests.values.training import plan_of, prepared_of, variant_of
from trials.data.loader import micro_batches
from trials.data.tokens import pack
from trials.launchers.local import LocalLauncher
from trials.model.ends.head_loss import targets_of
from trials.model.inputs.encoders import load_encoder
from trials.plan import Padded, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Training
from trials.tasks.session import build_stage

pytestmark = pytest.mark.ranks

ADAM_SHARE = 0.1
"""AdamW's first moment after one step is this much of the gradient: 1 - beta1."""
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-3}
"""Relative, of each tensor's norm."""
Tensors = dict[str, torch.Tensor]


def small_packs(*stages: str, data: int = 1, zero: ZeroStage = 1) -> Plan:
    """Packs of one sample each, so there are as many micro-batches as samples."""
    return plan_of(*stages, data=data, zero=zero, packing=Padded(samples=1))


WHOLE = small_packs("4+2")
TWO_RANKS = {
    "data parallel, ZeRO 1": small_packs("4+2r1,0", data=2),
    "data parallel, ZeRO 2": small_packs("4+2r0,1", data=2, zero=2),
    "data parallel, ZeRO 3": small_packs("4+2", data=2, zero=3),
    "pipeline": small_packs("3+0", "1+2r0,1"),
}


@pytest.fixture(scope="module")
def tied(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose output projection is its word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread, like a rank: the order of a sum depends on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("plan", parameters(TWO_RANKS, short=("data parallel, ZeRO 1",)))
def test_gradients_on_two_ranks_are_a_float32_sum_over_micro_batches(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared(shallow, tmp_path), pool)


@pytest.mark.long
def test_gradients_on_four_ranks_are_a_float32_sum_over_micro_batches_data_ranks_and_both_uses_of_a_tied_weight(
    tied: Path, tmp_path: Path
) -> None:
    with WarmPool(LocalLauncher(tmp_path / "pool", 4, "cpu")) as pool:
        check(small_packs("3+0", "1+2", data=2), prepared(tied, tmp_path, devices=4), pool)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", TWO_RANKS.values(), ids=TWO_RANKS)
def test_a_resumed_training_has_the_states_of_an_uninterrupted_one(
    plan: Plan, dtype: str, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    whole, parts = (prepared(shallow, tmp_path / name, samples=4, dtype=dtype) for name in ("whole", "parts"))
    train(whole, plan, pool, steps=4)
    train(parts, plan, pool, steps=2)
    train(parts, plan, pool, steps=4)
    expected, found = (states(each, steps=4) for each in (whole, parts))
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert tensor.dtype == torch.float32, key
        difference = torch.linalg.vector_norm(found[key] - tensor)
        # Not to the bit: how the processor sums a product depends on where its memory lies.
        assert difference <= TOLERANCES[dtype] * torch.linalg.vector_norm(tensor), key


def prepared(example: Path, folder: Path, *, devices: int = 2, samples: int = 24, dtype: str = "bfloat16") -> Prepared:
    return prepared_of(
        example,
        folder,
        model={"dtype": dtype},
        hardware={"devices": devices},
        training={"global_batch_samples": samples, "epochs": 2},
    )


def train(prepared: Prepared, plan: Plan, pool: WarmPool, *, steps: int) -> None:
    task = Training(output=prepared.job.training.output, max_steps=steps)
    answer = pool.ask(prepared.request(plan, task), 180)
    assert isinstance(answer, Answers), answer


def states(prepared: Prepared, *, steps: int) -> Tensors:
    """All tensors of a checkpoint: `weight:NAME` and the moments."""
    found = {}
    for path in (prepared.job.training.output / f"checkpoint-{steps}").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found.update({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 (not a dict)
    return found


def check(plan: Plan, prepared: Prepared, pool: WarmPool) -> None:
    """Trains one step, and compares its gradient with the sum of those that one rank computes of each micro-batch."""
    train(prepared, plan, pool, steps=1)
    found = states(prepared, steps=1)
    error = total = 0.0
    for name, gradient in summed_gradients(prepared, plan).items():
        error += float((found[f"exp_avg:{name}"] / ADAM_SHARE - gradient).square().sum())
        total += float(gradient.square().sum())
    assert total > 0
    assert error <= (1e-3) ** 2 * total  # a bfloat16 sum of this many terms is off by 0.4 % at least
    # Without clipping, too, so that a norm that is not finite ends the training.
    line = json.loads((prepared.job.training.output / "progress.jsonl").read_text())
    assert line["gradient_norm"] == pytest.approx(total**0.5, rel=1e-3)


def summed_gradients(prepared: Prepared, plan: Plan) -> Tensors:
    """The step's gradient: a float32 sum of the bfloat16 gradients of its micro-batches."""
    stage = build_stage(prepared.request(WHOLE, Training(output=Path())), 0, torch.device("cpu"))
    encoder = load_encoder(prepared.job.model, prepared.job.data)
    epoch = prepared.epoch(plan.packing, plan.layout.data)
    scale = torch.tensor(1 / epoch.step(0).target_tokens)
    sums = {name: torch.zeros_like(weight, dtype=torch.float32) for name, weight in stage.model.named_parameters()}
    for rank in range(plan.layout.data):
        for batch in micro_batches(prepared.index, epoch, [0], rank, encoder, pixels=True, workers=0, on_error="fail"):
            assert batch.pixel_values is not None
            stage(pack((batch.pixel_values,), batch.tokens), targets_of(batch.labels, scale)).backward()
            for name, weight in stage.model.named_parameters():
                if weight.grad is not None:
                    sums[name] += weight.grad
            stage.zero_grad(set_to_none=True)
    return sums
