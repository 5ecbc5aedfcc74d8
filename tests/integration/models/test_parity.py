"""A plan changes how a step is computed, not what: loss and gradients equal those of the plain model."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForImageTextToText

from autotune.workload import Prepared
from tests.tiny_models import glm4v, glm4v_moe, qwen3_vl
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import offloading, plan_of, prepared_of, stage, variant_of
from trials.data.loader import encode
from trials.data.records.sample import IGNORED
from trials.job import ModelSection
from trials.launchers.local import LocalLauncher
from trials.model.family import Images, load_family, prompt_types
from trials.model.skeleton import build_skeleton, load_config
from trials.model.weights import draw_buffers, draw_weights
from trials.plan import Levelled, Packed, Padded, Plan
from trials.run.pool import Answers, WarmPool
from trials.stage import Recomputed
from trials.tasks.request import Training
from trials.tasks.training.progress import PROGRESS_FILE

pytestmark = pytest.mark.ranks

ADAM_SHARE = 0.1
"""AdamW's first moment after one step is this much of the gradient: 1 - beta1."""
PADDED = Padded(samples=4)
TIGHT = Packed(qv=6, qt=300, qv_min=6, qt_min=200, packer="best-fit")

TWO_RANKS = {
    "split in the vision tower, nothing recomputed": plan_of("3+0", "1+2"),
    "split in the language model, some recomputed": plan_of("4+1r2,0s1,1", "0+1s0,1", packing=TIGHT),
    "split between the two, everything recomputed": plan_of("4+0r4,0", "0+2r0,2"),
    "one language layer on the last stage, padded": plan_of("4+1r4,1", "0+1", packing=PADDED),
    "split in the vision tower, padded, everything recomputed": plan_of("3+0r3,0", "1+2r1,2", packing=PADDED),
    "data parallel": plan_of("4+2", data=2),
    "data parallel, ZeRO 2, all selectively": plan_of("4+2s4,2", data=2, zero=2, packing=TIGHT),
    "data parallel, ZeRO 1, some recomputed": plan_of("4+2r1,1s2,1", data=2, zero=1, packing=TIGHT),
    "data parallel, ZeRO 1, padded, everything recomputed": plan_of("4+2r4,2", data=2, zero=1, packing=PADDED),
    # A CPU stands in for a device here: the product refuses such plans on it.
    "split in the vision tower, everything offloaded": offloading(plan_of("3+0r3,0", "1+2r1,2"), "both"),
    "data parallel, ZeRO 1, vision offloaded, language recomputed": offloading(
        plan_of("4+2r2,1", data=2, zero=1), "vision"
    ),
    "data parallel, ZeRO 2, language offloaded": offloading(plan_of("4+2r0,2", data=2, zero=2), "language"),
}
WEIGHTED_ON_ONE = {
    "packed": plan_of("4+2r0,1", packing=TIGHT),
    "padded, recomputed": plan_of("4+2r4,2", packing=PADDED),
}
WEIGHTED_ON_TWO = {
    "pipeline": plan_of("4+1r1,0", "0+1", packing=TIGHT),
    "pipeline, padded": plan_of("2+0", "2+2r1,1", packing=PADDED),
    "data parallel, ZeRO 1": plan_of("4+2", data=2, zero=1, packing=TIGHT),
    "data parallel, padded": plan_of("4+2", data=2, packing=PADDED),
    "packs shared": plan_of("4+2", data=2, packing=replace(TIGHT, qt_min=0, sequence=2)),
    "levels": replace(
        plan_of("4+2", data=2),
        packing=Levelled(levels=(replace(TIGHT, qt=130, qt_min=0), replace(TIGHT, qt_min=0, sequence=2))),
        stages=(replace(stage("4+2"), further_levels=(Recomputed(vision=1, language=0),)),),
    ),
}
SHARES: Mapping[str, Callable[[int], float]] = {"token": float, "sample": lambda _: 1.0, "square": math.sqrt}
"""What the mean loss of a sample counts in its step, by its number of targets."""
FOUR_RANKS = {
    "pipeline and data parallel": plan_of("3+0", "1+2r1,0", data=2),
    "pipeline and data parallel, ZeRO 1": plan_of("3+0r2,0", "1+2", data=2, zero=1),
    "four stages": plan_of("1+0s1,0", "2+0r1,0s1,0", "1+1", "0+1r0,1"),
}


@pytest.fixture(scope="module")
def tied_example(shallow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shallow example with a model whose output projection is its word embedding."""

    def change(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    return variant_of(shallow, tmp_path_factory.mktemp("tied"), change)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The references of small layers wait for each other's threads otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPool]:
    with WarmPool(LocalLauncher(tmp_path_factory.mktemp("one"), 1, "cpu")) as pool:
        yield pool


@pytest.mark.parametrize(
    "plan",
    parameters(
        TWO_RANKS,
        short=(
            "split in the vision tower, everything offloaded",
            "data parallel, ZeRO 1, some recomputed",
        ),
    ),
)
def test_loss_and_gradients_on_two_ranks_equal_the_plain_models(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path), pool)


@pytest.mark.parametrize("plan", parameters(FOUR_RANKS, short=("pipeline and data parallel, ZeRO 1",)))
def test_loss_and_gradients_on_four_ranks_equal_the_plain_models(
    plan: Plan, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path, hardware={"devices": 4}), four_ranks)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {"pipeline": plan_of("3+0", "1+2"), "data": plan_of("4+2", data=2, zero=1)},
        short=(),
    ),
)
def test_a_tied_embedding_gets_the_gradients_of_both_its_uses(
    plan: Plan, tied_example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(tied_example, tmp_path), pool)


@pytest.mark.parametrize("tied", parameters({"untied": False, "tied": True}, short=("tied",)))
def test_weights_that_transformers_saved_give_its_own_loss_and_gradients(
    tied: bool, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path / "saved", tied=tied)
    model = {"path": str(tmp_path / "saved"), "weights": "pretrained"}
    check(plan_of("3+0", "1+2"), prepared_of(shallow, tmp_path, model=model), pool)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "split between kept vision layers": plan_of("2+0r1,0", "2+4", packing=Padded(samples=4)),
            "split between layers with features": plan_of(
                "4+1r2,1", "0+3r0,3", packing=Packed(qv=200, qt=2000, qv_min=0, qt_min=0)
            ),
            "data parallel": plan_of("4+4r1,1", data=2, packing=Packed(qv=60, qt=900, qv_min=0, qt_min=0)),
        },
        short=("split between kept vision layers",),
    ),
)
def test_states_and_features_of_inner_vision_layers_travel_between_ranks(
    plan: Plan, example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    qwen3_vl.make(tmp_path / "model")
    check(plan, prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")}), pool)


@pytest.mark.parametrize("family", parameters({"glm4v": glm4v, "glm4v-moe": glm4v_moe}, short=("glm4v",)))
@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "split in the vision tower": plan_of("1+0r1,0", "2+2", packing=Padded(samples=4)),
            "split in the language model": plan_of(
                "3+1s2,1", "0+1s0,1", packing=Packed(qv=200, qt=2000, qv_min=0, qt_min=0)
            ),
            "data parallel": plan_of("3+2r1,1", data=2, zero=1, packing=Packed(qv=200, qt=2000, qv_min=0, qt_min=0)),
        },
        short=(),
    ),
)
def test_learned_positions_and_convolutions_of_patches_are_those_of_the_plain_model(
    plan: Plan, family: ModuleType, example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    family.make(tmp_path / "model")
    check(plan, prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")}), pool)


def weighted(plans: Mapping[str, Plan]) -> dict[str, tuple[Plan, str]]:
    return {f"{name}, {weighting}": (plan, weighting) for name, plan in plans.items() for weighting in list(SHARES)[1:]}


@pytest.mark.parametrize(("plan", "weighting"), parameters(weighted(WEIGHTED_ON_ONE), short=()))
def test_weights_of_samples_on_one_rank_are_those_of_the_plain_model(
    plan: Plan, weighting: str, shallow: Path, one_rank: WarmPool, tmp_path: Path
) -> None:
    training = {"loss_weighting": weighting}
    check(plan, prepared_of(shallow, tmp_path, training=training, hardware={"devices": 1}), one_rank, 1e-5)


@pytest.mark.parametrize(
    ("plan", "weighting"),
    parameters(
        weighted(WEIGHTED_ON_TWO),
        short=("pipeline, square", "levels, sample"),
    ),
)
def test_weights_of_samples_are_normalised_over_all_ranks_and_micro_batches(
    plan: Plan, weighting: str, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    training = {"loss_weighting": weighting, "global_batch_samples": 16}
    prepared = prepared_of(shallow, tmp_path, training=training)
    epoch = prepared.epoch(plan.packing, plan.layout.data)
    assert epoch.micro_batches > 1
    assert {*epoch.packs.level_of_pack[epoch.rows(0)].ravel()} == {*range(len(plan.packing.degrees))}
    check(plan, prepared, pool, 1e-5)


def check(plan: Plan, prepared: Prepared, pool: WarmPool, within: float = 1e-4) -> None:
    """Trains one step under the plan, and compares with the samples one by one through the Hugging Face model."""
    output = prepared.job.training.output
    answer = pool.ask(prepared.request(plan, Training(output=output, max_steps=1)), 120)
    assert isinstance(answer, Answers), answer
    loss, gradients = reference(prepared, plan)
    progress = json.loads((output / PROGRESS_FILE).read_text().splitlines()[0])
    assert progress["loss"] == pytest.approx(loss, rel=within)
    trained = trained_gradients(output / "checkpoint-1")
    assert set(gradients) <= set(trained)
    for name, gradient in gradients.items():
        difference = torch.linalg.vector_norm(trained[name] - gradient)
        assert difference <= within * torch.linalg.vector_norm(gradient) + 1e-9, name


def reference(
    prepared: Prepared, plan: Plan, number: int = 0, model: nn.Module | None = None
) -> tuple[float, dict[str, torch.Tensor]]:
    """The step's loss and its gradients, from each sample's own forward and backward pass."""
    settings = prepared.job.model
    model = model or plain_model(settings, prepared.job.training.seed)
    config = load_config(settings.path)
    family = load_family(config)
    encoder = family.encoder(settings.path)
    step = prepared.epoch(plan.packing, plan.layout.data).step(number)
    rows = [row for packs in step.packs for pack in packs for row in pack]
    samples = [encode(prepared.index, int(row), encoder, pixels=True) for row in rows]
    share = SHARES[prepared.job.training.loss_weighting]
    shares = [share(int((sample.labels[1:] != IGNORED).sum())) for sample in samples]
    total = 0.0
    for sample, of_sample in zip(samples, shares, strict=True):
        input_ids, grids = torch.from_numpy(sample.input_ids), torch.from_numpy(sample.grids)
        images = None
        if sample.pixel_values is not None:
            images = Images(pixels=torch.from_numpy(sample.pixel_values), grids=grids, input_ids=input_ids)
        types = prompt_types(torch.from_numpy(sample.positions))
        logits = model(**family.model_inputs(config, input_ids, images) | types).logits[0]
        targets = torch.from_numpy(sample.labels)[1:]
        loss = cross_entropy(logits[:-1], targets) * of_sample / math.fsum(shares)
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def plain_model(settings: ModelSection, seed: int) -> nn.Module:
    """The Hugging Face model with the weights that its folder holds, or that the ranks draw."""
    if settings.weights == "pretrained":
        loaded: nn.Module = AutoModelForImageTextToText.from_pretrained(
            settings.path, dtype=torch.float32, attn_implementation="eager"
        )
        return loaded.train()
    config = load_config(settings.path)
    skeleton = build_skeleton(config, torch.float32)
    device = torch.device("cpu")
    draw_weights(skeleton.model, (*skeleton.chain.parts, *skeleton.chain.unused), seed, device)
    draw_buffers(skeleton.model, skeleton.chain.buffers, device)
    model: nn.Module = AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    weights = skeleton.model.state_dict()
    if skeleton.tied:  # drawn apart, but one weight: that of the embedding
        weights |= {name: weights[original] for name, original in skeleton.tied.items()}
    model.load_state_dict(weights)
    return model.train()


def trained_gradients(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in checkpoint.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (not a dict)
                part, _, name = key.partition(":")
                if part == "exp_avg":
                    found[name] = file.get_tensor(key) / ADAM_SHARE
    return found
