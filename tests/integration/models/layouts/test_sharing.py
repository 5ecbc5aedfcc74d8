"""Packs that ranks share: loss and gradients equal those of the plain model on single samples."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autotune.certification.certificate import StepComparison, compare
from autotune.workload import Prepared
from storage.store import Store
from tests.contracts.test_families import TINY
from tests.integration.models.test_parity import check
from tests.integration.running.test_certificate import faults_in
from tests.integration.running.training.test_changed_plans import change, losses, prepared
from tests.integration.running.training.test_training_families import checkpointed
from tests.machines.faulty_ranks import SHARING_FAULTS, serve_with_mixed_rows, serve_with_sharing_faults
from tests.machines.own_ranks import on_ranks
from tests.tiny_models import text
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of, train
from trials import plugins
from trials.certification import Reference
from trials.channels.folder import FolderChannel
from trials.plan import Levelled, Packed, Plan, ZeroStage
from trials.run.pool import Answers, WarmPool
from trials.stage import Recomputed
from trials.tasks.answer import CertificationReport, read_report
from trials.tasks.request import Certification, write_request

pytestmark = pytest.mark.ranks

SHARED = replace(PACKED, sequence=2)
BY_FOUR = replace(PACKED, sequence=4)
TIGHT = Packed(qv=3, qt=161, qv_min=0, qt_min=0, sequence=2)
"""Odd numbers of tokens and units, and packs of one unit or none."""
WITHIN = 1e-5

TWO_RANKS = {
    "full packs": plan_of("4+2", data=2, packing=SHARED),
    "small packs, recomputed, ZeRO 1": plan_of("4+2r1,1s2,1", data=2, zero=1, packing=TIGHT),
    "ZeRO 2, everything recomputed": plan_of("4+2r4,2", data=2, zero=2, packing=TIGHT),
    "ZeRO 3, recomputed": plan_of("4+2r1,1", data=2, zero=3, packing=TIGHT),
}
FOUR_RANKS = {
    "two packs in a row": plan_of("4+2r1,1", data=4, packing=TIGHT),
    "two packs in a row, ZeRO 1": plan_of("4+2r4,0", data=4, zero=1, packing=SHARED),
    "two packs in a row, ZeRO 2": plan_of("4+2", data=4, zero=2, packing=SHARED),
    "two packs in a row, ZeRO 3": plan_of("4+2r0,1", data=4, zero=3, packing=TIGHT),
    "more ranks than key heads": plan_of("4+2r2,2", data=4, packing=BY_FOUR),
    "more ranks than tiles, ZeRO 1": plan_of("4+2", data=4, zero=1, packing=replace(TIGHT, sequence=4)),
    "split in the vision tower": plan_of("2+0r1,0", "2+2r0,1", data=2, packing=TIGHT),
    "split in the language model, ZeRO 1": plan_of("4+1r1,1", "0+1r0,1", data=2, zero=1, packing=SHARED),
    "split between the two": plan_of("4+0", "0+2r0,1", data=2, packing=TIGHT),
}


def levelled(*stages: str, sequences: Sequence[int], data: int, zero: ZeroStage = 0) -> Plan:
    """A plan with levels of these sequence degrees; `4+2r1,1;3,0` recomputes 3 and 0 layers at the second level."""
    first, *further = zip(*(text.split(";") for text in stages), strict=True)
    plan = plan_of(*first, data=data, zero=zero)
    counts = [[tuple(map(int, text.split(","))) for text in of_level] for of_level in further]
    capacities = CAPACITIES[len(CAPACITIES) - len(sequences) :]
    packing = Levelled(
        levels=tuple(
            Packed(qv=qv, qt=qt, qv_min=0, qt_min=0, sequence=sequence)
            for (qv, qt), sequence in zip(capacities, sequences, strict=True)
        )
    )
    recomputed = zip(*counts, strict=True)
    changed = (
        replace(stage, further_levels=tuple(Recomputed(vision=vision, language=language) for vision, language in each))
        for stage, each in zip(plan.stages, recomputed, strict=True)
    )
    return Plan(packing=packing, layout=plan.layout, stages=tuple(changed))


CAPACITIES = ((6, 90), (6, 150), (12, 600))
LEVELS_OF_TWO = {
    "alone and shared, recomputed by level, ZeRO 1": levelled("4+2r1,0;3,2", sequences=(1, 2), data=2, zero=1),
    "both alone, recomputed by level": levelled("4+2r0,0;4,2", sequences=(1, 1), data=2),
    "both shared, ZeRO 3": levelled("4+2r1,1;1,1", sequences=(2, 2), data=2, zero=3),
    "alone and shared, recomputed by level, ZeRO 2": levelled("4+2r0,1;2,0", sequences=(1, 2), data=2, zero=2),
    "alone and shared, recomputed by level, ZeRO 3": levelled("4+2r0,1;2,0", sequences=(1, 2), data=2, zero=3),
    "shared, then alone": levelled("4+2;0,1", sequences=(2, 1), data=2),
}
LEVELS_OF_FOUR = {
    "three degrees": levelled("4+2r1,0;0,1;4,2", sequences=(1, 2, 4), data=4),
    "three degrees, ZeRO 1": levelled("4+2;1,1;2,2", sequences=(1, 2, 4), data=4, zero=1),
    "three degrees, ZeRO 3": levelled("4+2r0,1;0,1;2,2", sequences=(1, 2, 4), data=4, zero=3),
    "pipeline": levelled("3+0r1,0;3,0", "1+2;0,2", sequences=(1, 2), data=2),
    "pipeline, split in the language model, ZeRO 1": levelled(
        "4+1r0,1;2,0", "0+1;0,1", sequences=(1, 2), data=2, zero=1
    ),
    "pipeline of four": levelled("2+0;1,0", "2+0;2,0", "0+1;0,1", "0+1;0,0", sequences=(1, 1), data=1),
}

CHANGES = {
    "levels, then shared by all": (
        levelled("4+2r1,0;3,2", sequences=(1, 2), data=2, zero=1),
        plan_of("4+2r2,1", data=2, zero=3, packing=SHARED),
    ),
    "pipeline, then levels": (
        plan_of("2+0r1,0", "2+2"),
        levelled("4+2r0,1;2,0", sequences=(1, 2), data=2, zero=2),
    ),
}

FAMILIES = (
    "aya-vision",
    "cohere2-vision",
    "deepseek-vl",
    "gemma3",
    "glm4v",
    "glm4v-moe",
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
    "qwen3-vl-moe",
    "smolvlm",
    "vipllava",
)


@pytest.mark.long
@pytest.mark.parametrize("plan", TWO_RANKS.values(), ids=TWO_RANKS)
def test_packs_that_two_ranks_share_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path), pool, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", FOUR_RANKS.values(), ids=FOUR_RANKS)
def test_packs_shared_on_four_ranks_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(shallow, tmp_path, hardware={"devices": 4}), four_ranks, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", [plan_of("4+1r1,0", "0+1", data=2, packing=TIGHT)], ids=["pipeline"])
def test_a_tied_embedding_of_shared_packs_gets_the_gradients_of_both_its_uses(
    plan: Plan, tied: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    check(plan, prepared_of(tied, tmp_path, hardware={"devices": 4}), four_ranks, WITHIN)


@pytest.mark.long
def test_features_of_inner_vision_layers_reach_the_ranks_that_share_the_pack(
    shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    plugins.load(TINY, "qwen3-vl").make(tmp_path / "model")
    packing = Packed(qv=200, qt=2000, qv_min=0, qt_min=0, sequence=2)
    plan = plan_of("4+1r2,1", "0+3r0,3", data=2, packing=packing)
    job = prepared_of(shallow, tmp_path, model={"path": str(tmp_path / "model")}, hardware={"devices": 4})
    check(plan, job, four_ranks, WITHIN)


@pytest.mark.parametrize("plan", parameters(LEVELS_OF_TWO, short=("alone and shared, recomputed by level, ZeRO 1",)))
def test_packs_of_several_levels_on_two_ranks_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 30})
    epoch = job.epoch(plan.packing, 2)
    assert {*epoch.packs.level_of_pack[epoch.rows(0)].ravel().tolist()} == {0, 1}
    check(plan, job, pool, WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("plan", LEVELS_OF_FOUR.values(), ids=LEVELS_OF_FOUR)
def test_packs_of_several_levels_on_four_ranks_have_the_plain_models_gradients(
    plan: Plan, shallow: Path, four_ranks: WarmPool, tmp_path: Path
) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 36}, hardware={"devices": 4})
    epoch = job.epoch(plan.packing, plan.layout.data)
    assert {*epoch.packs.level_of_pack[epoch.rows(0)].ravel().tolist()} == {*range(len(plan.packing.degrees))}
    check(plan, job, four_ranks, WITHIN)


@pytest.mark.parametrize(
    "plan",
    parameters(
        {
            "packs shared, ZeRO 1": plan_of("4+2r1,1", data=2, zero=1, packing=TIGHT),
            "layers cut": plan_of("4+2", tensor=2, packing=replace(TIGHT, sequence=1)),
        },
        short=("packs shared, ZeRO 1",),
    ),
)
def test_a_rank_without_a_target_takes_part(plan: Plan, shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    """The answer, at the end of each pack, is in the part of one rank."""
    turns = [{"role": "user", "content": "What do you see? " * 16}, {"role": "assistant", "content": "A dog."}]
    (tmp_path / "data.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 8)
    data = {"sources": [{"path": tmp_path / "data.jsonl"}]}
    job = prepared_of(shallow, tmp_path, data=data, training={"global_batch_samples": 4})
    lengths = job.index.text_tokens
    assert (2 * lengths > TIGHT.qt).all()  # each has a pack of its own
    assert (job.index.target_tokens < lengths / 2).all()
    check(plan, job, pool, WITHIN)


@pytest.mark.long
def test_ranks_may_share_one_pack_of_a_row_and_not_another(shallow: Path, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 48}, hardware={"devices": 4})
    plan = levelled("4+2r1,1;1,1", sequences=(1, 2), data=4)
    request = job.request(plan, Certification(reference="transformers", follows=False))
    write_request(FolderChannel(tmp_path / "mixed"), request)
    assert on_ranks(serve_with_mixed_rows, tmp_path / "mixed", world_size=4) == [True] * 4
    answers = [read_report(FolderChannel(tmp_path / "mixed"), rank) for rank in range(4)]
    reports = [answer.report for answer in answers if answer and isinstance(answer.report, CertificationReport)]
    parts = compare("float32", reports).steps[0].parts
    assert len(reports) == 4
    assert [part.part for part in parts] == ["vision", "projector", "language"]
    assert all(0 < part.difference < WITHIN for part in parts)


@pytest.mark.long
@pytest.mark.parametrize("plans", CHANGES.values(), ids=CHANGES)
def test_adamw_has_the_same_losses_and_weights_while_degrees_change(
    plans: tuple[Plan, Plan], shallow: Path, pool: WarmPool, profile_store: Store, tmp_path: Path
) -> None:
    check_change(plans, shallow, pool, tmp_path)


def check_change(plans: tuple[Plan, Plan], example: Path, pool: WarmPool, folder: Path) -> None:
    """A training that changes from one plan to the other learns what one of two stages does.

    Each epoch is one step of all samples, so that its loss and update depend on no plan.
    """
    whole, changed = (
        prepared(example, folder / name, epochs=4, global_batch_samples=24) for name in ("whole", "changed")
    )
    assert train(pool, whole, plan_of("3+0", "1+2")).steps == 4
    train(pool, changed, plans[0], max_steps=2)
    change(changed, plans[1])
    assert train(pool, changed, plans[1]).steps == 4
    assert losses(changed) == pytest.approx(losses(whole), rel=WITHIN)
    one, other = (checkpointed(each.job.training.output / "checkpoint-4") for each in (whole, changed))
    assert one.keys() == other.keys()
    for name in (name for name in one if name.startswith("weight:")):
        assert torch.linalg.vector_norm(one[name] - other[name]) <= 1e-4 * torch.linalg.vector_norm(one[name]), name


@pytest.mark.parametrize("family", parameters({name: name for name in FAMILIES}, short=()))
def test_every_family_shares_its_packs(family: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    plugins.load(TINY, family).make(tmp_path / "model")
    job = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")})
    shape = job.workload.model
    units, tokens = (int(2.5 * column.max()) for column in (job.index.vision_units, job.index.text_tokens))
    packing = Packed(qv=units, qt=tokens, qv_min=0, qt_min=0, sequence=2)
    check(plan_of(f"{shape.vision_layers}+{shape.language_layers}r1,1", data=2, packing=packing), job, pool, WITHIN)


def compared(prepared: Prepared, plan: Plan, pool: WarmPool, reference: Reference = "transformers") -> StepComparison:
    """One step under the plan and under a reference."""
    answer = pool.ask(prepared.request(plan, Certification(reference=reference, follows=False)), 120)
    assert isinstance(answer, Answers), answer
    reports = [report for report in answer.reports if isinstance(report, CertificationReport)]
    return compare(prepared.job.model.dtype, reports).steps[0]


@pytest.mark.long
@pytest.mark.parametrize("kind", text.KINDS)
def test_models_for_text_alone_share_their_packs(kind: str, example: Path, pool: WarmPool, tmp_path: Path) -> None:
    """Sliding windows, rotary frequencies of their own, norms of heads, and experts."""
    text.make_kind(tmp_path / "model", kind)
    records = [json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()[:24]]
    for record in records:
        record.pop("image", None)
        record["conversations"][0]["value"] = record["conversations"][0]["value"].replace("<image>\n", "")
    (tmp_path / "train.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    sources = {"sources": [{"path": str(tmp_path / "train.jsonl")}]}
    job = prepared_of(example, tmp_path, model={"path": str(tmp_path / "model")}, data=sources)
    packing = Packed(qv=1, qt=int(2.5 * job.index.text_tokens.max()), qv_min=0, qt_min=0, sequence=2)
    found = compared(job, plan_of(f"0+{job.workload.model.language_layers}r0,1", data=2, packing=packing), pool)
    assert [part.part for part in found.parts] == ["language"]
    assert 0 < found.parts[0].difference < WITHIN


@pytest.mark.long
def test_shared_packs_are_as_exact_in_bfloat16_as_others(shallow: Path, pool: WarmPool, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, model={"dtype": "bfloat16"}, training={"global_batch_samples": 9})
    shared = levelled("4+2r1,0;3,2", sequences=(1, 2), data=2, zero=1)
    one, other = (compared(job, plan, pool) for plan in (plan_of("4+2r1,0", data=2, zero=1), shared))
    for alone, with_others in zip(one.parts, other.parts, strict=True):
        assert 0 < with_others.difference < 1.5 * alone.difference


@pytest.mark.long
def test_every_fault_in_the_sharing_of_packs_shows(shallow: Path, tmp_path: Path) -> None:
    job = prepared_of(shallow, tmp_path, training={"global_batch_samples": 9})
    request = job.request(
        plan_of("4+2", data=2, packing=SHARED), Certification(reference="transformers", follows=False)
    )
    for name in SHARING_FAULTS:
        write_request(FolderChannel(tmp_path / name), request)
    assert on_ranks(serve_with_sharing_faults, tmp_path) == [True, True]
    found = {name: faults_in(tmp_path / name) for name in SHARING_FAULTS}
    assert found.pop("none") == ()
    for name, faults in found.items():
        assert any(text.startswith("the gradient of") for text in faults), name
