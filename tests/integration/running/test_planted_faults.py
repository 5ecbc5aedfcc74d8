"""A certificate names each fault of a training: of what it learns, of its updates, and of what it writes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from autotune.certification.certificate import compare, faults
from autotune.workload import Prepared
from tests.machines.own_ranks import on_ranks
from tests.machines.planted.faults import DATA_FAULTS, RATE_FAULTS, UPDATE_FAULTS, serve_with_planted_faults
from tests.machines.planted.gradients import ADAPTER_FAULTS, KEY_FAULTS, STAGE_FAULTS
from tests.machines.planted.writing import SAVING_FAULTS
from tests.values.saved_models import saved_model
from tests.values.training import plan_of, prepared_of
from trials.certification import Mixed, Reference
from trials.channels.folder import FolderChannel
from trials.plan import Plan
from trials.tasks.answer import CertificationReport, read_report
from trials.tasks.request import Certification, write_request

pytestmark = [pytest.mark.ranks, pytest.mark.long]

# The embedding is on the first stage, and the head, with which it is tied, on the last.
PIPELINE, REPLICAS = plan_of("4+1r1,0", "0+1"), plan_of("4+2", data=2)
NAMED: Mapping[str, str] = {
    "weight decay of norms and biases": "the weight decay in step 1 is 0.01 instead of 0, 0.01",
    "no weight decay": "the weight decay in step 1 is 0 instead of 0, 0.01",
    "weight decay lost in the update": "the weights after step 2 differ from those of torch's AdamW",
    "schedule off by one step": "the schedule gives step 2 of 6 0 times the learning rate instead of 0.5",
    "warm-up ignored": "the learning rate in step 1 is 0.001 instead of 0",
    "learning rates not set": "the learning rate in step 2 is 0.001 instead of 0.0005",
    "momentum reset": "the gradient of language in step 6 differs",
    "second moment reset": "the weights after step 2 differ from those of torch's AdamW",
    "another epsilon": "the weights after step 2 differ from those of torch's AdamW",
    "a stale weight": "the weights after step 2 differ from those of torch's AdamW",
    "gradients kept": "the gradient of language in step 6 differs",
    "a part not trained": "model.multi_modal_projector.layer_norm.bias is not trained, although the job trains it",
    "copies of a tied weight apart": "that of model.language_model.embed_tokens.weight",
    "dropout on": "attention_dropout is 0.1 instead of 0",
    "labels shifted": "the label of token",
    "a layer written from another": "the saved model.vision_tower.encoder.layer.0.attention.q_proj.weight differs",
    "written before the last update": "the saved model.vision_tower.embeddings.cls_token differs",
    "a tied weight written twice": "the saved lm_head.weight differs",
    "a weight left out": "the saved weights lack model.",
    "another type": "the saved model.vision_tower.embeddings.cls_token differs",
    "gradients summed": "the gradient of language in step 1, before clipping, differs by 1",
    "clipped before the average": "the gradient of language in step 1 differs",
    "a frozen part updated": "model.vision_tower.embeddings.cls_token has changed, although the job does not train it",
    "gradients of keys lost": "and that of model.vision_tower.encoder.layer.",
    "gradients of A lost": "lora_A.default.weight by 1 (0.5)",
    "gradients of A negated": "lora_A.default.weight by 2 (0.5)",
    "another alpha written": "the saved adapter scales its output by 8 instead of 4, which is training.lora.alpha: 16",
    "another scale": "the loss in step 1 is ",
    "samples not weighted": "the loss in step 1 is ",
    "another weighting": "the loss in step 1 is ",
    "a frozen part trained": "model.vision_tower.embeddings.cls_token has changed, although the job does not train it",
}


@pytest.mark.parametrize("planted", [RATE_FAULTS, UPDATE_FAULTS, SAVING_FAULTS], ids=["rates", "updates", "written"])
def test_a_fault_in_a_pipeline_is_named(planted: Mapping[str, Any], shallow: Path, tmp_path: Path) -> None:
    saved_model(shallow, tmp_path / "saved", tied=True)
    prepared = prepared_of(
        shallow,
        tmp_path,
        training={"global_batch_samples": 9, "schedule": "cosine", "warmup": 2},
        model={"path": str(tmp_path / "saved"), "weights": "pretrained"},
    )
    check(prepared, PIPELINE, planted, tmp_path)


def test_a_fault_between_data_ranks_is_named(shallow: Path, tmp_path: Path) -> None:
    training = {"global_batch_samples": 12, "clip_norm": 0.1, "freeze": ["vision"]}
    check(prepared_of(shallow, tmp_path, training=training), REPLICAS, DATA_FAULTS, tmp_path)


@pytest.mark.parametrize(
    ("planted", "lora"),
    [(KEY_FAULTS, {}), (ADAPTER_FAULTS, {"rank": 4, "parts": ["vision", "language"]})],
    ids=["keys", "adapters"],
)
def test_a_lost_gradient_shows_in_bfloat16(
    planted: Mapping[str, Any], lora: dict[str, Any], shallow: Path, tmp_path: Path
) -> None:
    training = {"global_batch_samples": 16, "learning_rate": 1e-5, "lora": lora}
    prepared = prepared_of(shallow, tmp_path, training=training, model={"dtype": "bfloat16"})
    check(prepared, plan_of("3+0r1,0", "1+2", zero=1), planted, tmp_path)


def test_a_wrong_weight_of_the_loss_shows_also_next_to_the_plans_own_stages(shallow: Path, tmp_path: Path) -> None:
    training = {"global_batch_samples": 12, "loss_weighting": "square"}
    check(prepared_of(shallow, tmp_path, training=training), REPLICAS, STAGE_FAULTS, tmp_path, "stages")


def check(
    prepared: Prepared, plan: Plan, planted: Mapping[str, Any], folder: Path, reference: Reference = "transformers"
) -> None:
    scratch = folder / "scratch"
    task = Certification(reference=reference, scratch=scratch)
    for name in planted:
        write_request(FolderChannel(folder / name), prepared.request(plan, task))
    assert on_ranks(serve_with_planted_faults, folder) == [[], []]
    assert not scratch.exists()
    found = {name: faults_in(folder / name, prepared) for name in planted}
    assert found.pop("none", ()) == ()
    unnamed = {name: each for name, each in found.items() if not any(NAMED[name] in text for text in each)}
    assert unnamed == {}


def faults_in(folder: Path, prepared: Prepared) -> Sequence[str]:
    answers = [read_report(FolderChannel(folder), rank) for rank in (0, 1)]
    reports = [answer.report for answer in answers if answer and isinstance(answer.report, CertificationReport)]
    assert len(reports) == 2, answers
    return faults(compare(prepared.job.model.dtype, reports), Mixed.of_job(prepared.job.training), reports)
