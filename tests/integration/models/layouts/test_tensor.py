"""Language layers that ranks hold together: loss and gradients equal those of the plain model on single samples."""

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from autotune.workload import Prepared
from storage.store import Store
from tests.contracts.test_families import TINY
from tests.integration.models.layouts.test_sharing import check_change, compared, levelled
from tests.integration.models.test_parity import check
from tests.integration.running.test_certificate import faults_in
from tests.integration.running.training.test_changed_plans import lines, prepared
from tests.machines.faulty_ranks import TENSOR_FAULTS, serve_with_tensor_faults
from tests.machines.own_ranks import on_ranks
from tests.tiny_models import text
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import PACKED, plan_of, prepared_of, train
from trials import plugins, wire
from trials.channels.folder import FolderChannel
from trials.engine.group import process_group
from trials.plan import Packed, Padded, Plan
from trials.run.pool import WarmPool
from trials.sharing.group import SharingGroup
from trials.tasks.request import Certification, Request, Training, write_request
from trials.tasks.session import open_session
from trials.tasks.training.output import MODEL_FOLDER
from trials.tasks.training.training import run_training

pytestmark = pytest.mark.ranks

TIGHT = Packed(qv=3, qt=161, qv_min=0, qt_min=0)
"""Odd numbers of tokens and units, and packs of one unit or none."""
SHARED = replace(TIGHT, sequence=2)
WITHIN = 1e-5

TWO_RANKS = {
    "full packs": plan_of("4+2", tensor=2),
    "small packs, recomputed, ZeRO 1": plan_of("4+2r1,1s2,1", tensor=2, zero=1, packing=TIGHT),
    "everything recomputed": plan_of("4+2r4,2", tensor=2, packing=TIGHT),
    "padded": plan_of("4+2r0,1", tensor=2, packing=Padded(samples=3)),
}
FOUR_RANKS = {
    "data parallel": plan_of("4+2r1,1", data=2, tensor=2, packing=TIGHT),
    "data parallel, ZeRO 1": plan_of("4+2r4,0", data=2, tensor=2, zero=1),
    "small packs shared, recomputed, ZeRO 1": plan_of("4+2r1,1s2,1", data=2, tensor=2, zero=1, packing=SHARED),
    "packs shared": plan_of("4+2", data=2, tensor=2, packing=replace(PACKED, sequence=2)),
    "split in the vision tower": plan_of("2+0r1,0", "2+2r0,1", tensor=2, packing=TIGHT),
    "split in the language model, ZeRO 1": plan_of("4+1r1,1", "0+1r0,1", tensor=2, zero=1),
    "split between the two": plan_of("4+0", "0+2r0,1", tensor=2, packing=TIGHT),
}
CHANGES = {
    "cut in two, then data parallel": (
        plan_of("4+2r1,0", tensor=2, zero=1),
        plan_of("4+2r2,1", data=2, zero=3),
    ),
    "pipeline, then cut in two": (plan_of("2+0r1,0", "2+2"), plan_of("4+2r0,1", tensor=2)),
}
FAMILIES = (
    "aya-vision",
    "cohere2-vision",
    "deepseek-vl",
    "gemma3",
    "got-ocr2",
    "idefics3",
    "llava",
    "llava-next",
    "llava-next-video",
    "llava-onevision",
    "llava-siglip",
    "lighton-ocr",
    "mistral3",
    "mistral3-inner-features",
    "ovis2",
    "paddleocr-vl",
    "paligemma",
    "pixtral",
    "qwen2-vl",
    "qwen2-5-vl",
    "qwen3-vl",
    "smolvlm",
    "vipllava",
)
BIASED = {"attention_bias": True, "mlp_bias": True}
TEXT_KINDS: dict[str, dict[str, Any]] = {
    "llama": BIASED, "qwen2 window": {}, "qwen3": {}, "gemma3_text": {}, "gemma2": {}, "granite": {}, "cohere2": {},
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("plan", TWO_RANKS.values(), ids=TWO_RANKS)
def test_layers_that_two_ranks_hold_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path), pool, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", FOUR_RANKS.values(), ids=FOUR_RANKS)
def test_layers_cut_on_four_ranks_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path, hardware={"devices": 4}), four_ranks, WITHIN)


@pytest.mark.long
def test_levels_of_packs_may_share_them_among_ranks_that_hold_the_same_slices(
    shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    plan = levelled("4+2r1,0;3,2", sequences=(1, 2), data=2, zero=1)
    plan = replace(plan, layout=replace(plan.layout, tensor=2))
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 30}, hardware={"devices": 4})
    epoch = job.epoch(plan.packing, 2)
    assert {*epoch.packs.level_of_pack[epoch.rows(0)].ravel().tolist()} == {0, 1}
    check(plan, job, four_ranks, WITHIN)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {"alone": plan_of("4+2", tensor=2, packing=TIGHT), "pipeline": plan_of("4+1r1,0", "0+1", tensor=2, zero=1)},
        short=("pipeline",),
    ),
)
def test_a_tied_embedding_gets_the_gradients_of_both_its_uses(
    plan: Plan, tied: Path, pool: WarmPool, four_ranks: WarmPool, tmp_path: Path
) -> None:
    ranks = plan.layout.world_size
    job = prepared_of(tied, tmp_path, hardware={"devices": ranks})
    check(plan, job, pool if ranks == 2 else four_ranks, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plans", CHANGES.values(), ids=CHANGES)
def test_adamw_has_the_same_losses_and_weights_while_the_tensor_degree_changes(
    plans: tuple[Plan, Plan], shallow: Path, pool: WarmPool, profile_store: Store, tmp_path: Path
) -> None:
    check_change(plans, shallow, pool, tmp_path)


@pytest.mark.long
def test_the_final_model_and_a_resumed_training_are_those_of_one_rank(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    whole, cut = (
        prepared(shallow, tmp_path / name, epochs=3, global_batch_samples=24, clip_norm=0.5) for name in ("a", "b")
    )
    train(pool, whole, plan_of("3+0", "1+2", zero=1))
    plan = plan_of("4+2r0,1", tensor=2, zero=1)
    train(pool, cut, plan, max_steps=1)
    assert train(pool, cut, plan).finished
    norms = [[line["gradient_norm"] for line in lines(each)] for each in (whole, cut)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    one, other = (
        {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
        for folder in (each.job.training.output / MODEL_FOLDER for each in (whole, cut))
    )
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert tensor.shape == other[name].shape
        assert torch.linalg.vector_norm(tensor - other[name]) <= 1e-4 * torch.linalg.vector_norm(tensor), name


@pytest.mark.long
def test_slices_are_read_from_the_weights_that_transformers_saved(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    saved_model(shallow, tmp_path / "saved")
    model = {"path": str(tmp_path / "saved"), "weights": "pretrained"}
    check(plan_of("4+2", tensor=2, zero=1), prepared_of(shallow, tmp_path, model=model), pool, WITHIN)


@pytest.mark.long
def test_the_evaluation_of_a_pipeline_of_cut_layers_is_that_of_whole_ones(
    shallow: Path, pool: WarmPool, four_ranks: WarmPool, tmp_path: Path
) -> None:
    found = []
    for ranks, plan in ((pool, plan_of("4+1", "0+1")), (four_ranks, plan_of("4+1", "0+1", tensor=2))):
        folder = tmp_path / str(plan.layout.world_size)
        hardware = {"devices": plan.layout.world_size}
        job = prepared_of(shallow, folder, evaluation={"samples": 7, "every": 1}, hardware=hardware)
        train(ranks, job, plan, max_steps=1)
        found.append([line["evaluation_loss"] for line in lines(job) if "evaluation_loss" in line])
    assert len(found[0]) == 1
    assert found[1] == pytest.approx(found[0], rel=WITHIN)


@pytest.mark.parametrize("family", parameters({name: name for name in FAMILIES}, short=()))
def test_every_family_with_a_plan_has_its_layers_cut(
    family: str, example: Path, pool: WarmPool, tmp_path: Path
) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    job = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")})
    shape = job.workload.model
    units, tokens = (int(2.5 * column.max()) for column in (job.index.vision_units, job.index.text_tokens))
    packing = Packed(qv=units, qt=tokens, qv_min=0, qt_min=0)
    check(plan_of(f"{shape.vision_layers}+{shape.language_layers}r1,1", tensor=2, packing=packing), job, pool, WITHIN)


@pytest.mark.parametrize("kind", parameters({name: name for name in TEXT_KINDS}, short=()))
def test_models_for_text_alone_have_their_layers_cut(kind: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    job, plan = cut_text(example, tmp_path, kind, **TEXT_KINDS[kind])
    found = compared(job, plan, pool)
    assert [part.part for part in found.parts] == ["language"]
    assert 0 < found.parts[0].difference < WITHIN


def cut_text(example: Path, folder: Path, kind: str, **settings: Any) -> tuple[Prepared, Plan]:
    """A job of a model for text alone, and a plan whose two ranks hold its layers together."""
    text.make_kind(folder / "model", kind, **settings)
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()[:24]]
    for record in records:
        record.pop("image", None)
        record["conversations"][0]["value"] = record["conversations"][0]["value"].replace("<image>\n", "")
    (folder / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    sources = {"sources": [{"path": str(folder / "train.jsonl")}]}
    job = prepared_of(example, folder, model={"path": str(folder / "model")}, data=sources)
    packing = Packed(qv=1, qt=int(2.5 * job.index.text_tokens.max()), qv_min=0, qt_min=0)
    return job, plan_of(f"0+{job.workload.model.language_layers}r0,1", tensor=2, packing=packing)


def test_ranks_drop_of_their_own_tokens_and_compute_the_same_where_both_have_all(example: Path, tmp_path: Path) -> None:
    job, plan = cut_text(example, tmp_path, "seed_oss", residual_dropout=0.3, attention_dropout=0.3)
    file = tmp_path / "request.json"
    file.write_text(wire.encode(job.request(plan, Training(output=tmp_path / "output", max_steps=1))))
    (masks, *shared), (of_other, *of_both) = on_ranks(dropped_in_a_step, file)
    assert len(masks) == len(of_other) > 0
    assert not {*masks} & {*of_other}
    assert all(shared)
    assert shared == of_both


def dropped_in_a_step(file: Path) -> tuple[list[str], list[str], list[str]]:
    """Return what a rank drops in the first step of a training, the gathered states, and the weights that it has whole.

    All as digests.
    """
    rank, request = int(os.environ["RANK"]), wire.decode(Request, file.read_text())
    masks: list[str] = []
    gathered: list[str] = []
    dropout, states_of_all = nn.functional.dropout, SharingGroup.states_of_all

    def noted(states: torch.Tensor, p: float, training: bool) -> torch.Tensor:
        scales = dropout(torch.ones_like(states), p, training)  # of states that are 0 as well
        if training:
            masks.append(digest(scales))
        return states * scales

    def joined(group: SharingGroup, part: torch.Tensor) -> torch.Tensor:
        whole = states_of_all(group, part)
        gathered.append(digest(whole))
        return whole

    with (
        process_group(rank, rank, 2, f"file://{file}.rendezvous") as device,
        open_session(request, rank, device) as session,
        patch.object(nn.functional, "dropout", noted),
        patch.object(SharingGroup, "states_of_all", joined),
    ):
        assert isinstance(request.task, Training)
        run_training(session, request.task, lambda: None)
        stage = session.engine.stage
        return masks, gathered, [digest(each) for each in stage.parameters() if each not in stage.slices]


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


@pytest.mark.long
def test_cut_layers_are_as_exact_in_bfloat16_as_whole_ones(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, model={"dtype": "bfloat16"}, training={"global_batch_samples": 9})
    plans = (plan_of("4+2r1,0", data=2, zero=1), plan_of("4+2r1,1", tensor=2, zero=1))
    one, other = (compared(job, plan, pool) for plan in plans)
    for whole, cut in zip(one.parts, other.parts, strict=True):
        assert 0 < cut.difference < 1.5 * whole.difference


def test_ranks_that_train_no_slice_train_in_bfloat16(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    found = []
    for dtype in ("float32", "bfloat16"):
        training = {"global_batch_samples": 9, "freeze": ["language"], "clip_norm": 0.01}
        job = prepared_of(shallow, tmp_path / dtype, model={"dtype": dtype}, training=training)
        train(pool, job, plan_of("4+2", tensor=2, zero=1), max_steps=1)
        (step,) = lines(job)
        found.append((step["loss"], step["gradient_norm"]))
    assert found[1] == pytest.approx(found[0], rel=0.01)


@pytest.mark.long
def test_every_fault_in_the_cutting_of_layers_shows(shallow: Path, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 9})
    request = job.request(plan_of("4+2", tensor=2), Certification(reference="transformers", follows=False))
    for name in TENSOR_FAULTS:
        write_request(FolderChannel(tmp_path / name), request)
    assert on_ranks(serve_with_tensor_faults, tmp_path) == [True, True]
    found = {name: faults_in(tmp_path / name) for name in TENSOR_FAULTS}
    assert found.pop("none") == ()
    for name, faults in found.items():
        assert any(text.startswith("the gradient of") for text in faults), name
