"""Certificates on real ranks: a plan that is neutral to learning holds, and each fault in its computation shows."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from autotune.certification import certify
from autotune.certification.certificate import compare, faults, stored_certificates
from autotune.certification.certificate_report import updates_text
from autotune.folders import certificates_folder
from autotune.workload import Prepared
from tests.contracts.test_families import TINY
from tests.machines.faulty_ranks import FAULTS, serve_with_faults
from tests.machines.own_ranks import on_ranks
from tests.values.parameters import parameters
from tests.values.saved_models import saved_model
from tests.values.training import plan_of, prepared_of
from trials import plugins
from trials.certification import Mixed
from trials.channels.folder import FolderChannel, file_rendezvous
from trials.engine.group import process_group
from trials.plan import Plan
from trials.sites.local import LocalSite
from trials.tasks.answer import CertificationReport, read_report
from trials.tasks.certifying.under_plan import run_plan
from trials.tasks.request import Certification, write_request

pytestmark = pytest.mark.ranks

BATCH = {"global_batch_samples": 9}
LENIENT = {"batch_tolerance": 0.9, "step_variance": 9.0}
PIPELINE = plan_of("3+0r1,0", "1+2")
BFLOAT16 = plan_of("3+0r1,0", "1+2", zero=1)
SHARDED = plan_of("4+2r0,1", data=2, zero=3)


CASES: dict[str, tuple[Plan, dict[str, dict[str, Any]]]] = {
    "pipeline, clipped, tied, from files": (
        PIPELINE,
        {
            "training": {
                **BATCH,
                "clip_norm": 0.1,
                "betas": (0.8, 0.9),
                "curriculum": {"steps": 2, "max_tokens": 150},
                "warmup": 2,
            }
        },
    ),
    "bfloat16, samples weighted": (
        BFLOAT16,
        {
            "training": {**BATCH, "loss_weighting": "square", "schedule": "cosine", "warmup": 2},
            "model": {"dtype": "bfloat16"},
        },
    ),
    "adapters behind a frozen tower": (
        PIPELINE,
        {"training": {**BATCH, "lora": {"rank": 2, "train_projector": True}}},
    ),
    "too large for one device": (SHARDED, {"training": {"global_batch_samples": 12, "loss_weighting": "sample"}}),
}


@pytest.mark.parametrize(
    "case",
    parameters(
        {case: case for case in CASES},
        short=("pipeline, clipped, tied, from files",),
    ),
)
def test_a_plan_is_certified(case: str, shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, changes = CASES[case]
    reference = "transformers"
    if case == "too large for one device":
        reference = "stages"
        monkeypatch.setattr(certify, "_REFERENCE_BYTES", 1 << 20)
    if "from files" in case:
        behind_nothing(saved_model(shallow, tmp_path / "saved", tied=True), tmp_path / "saved")
        changes = {**changes, "model": {"path": str(tmp_path / "saved"), "weights": "pretrained"}}
    source = {"path": str(shallow / "data" / "train.jsonl"), "repeat": 1.25}
    prepared = prepared_of(shallow, tmp_path, data={"sources": [source]}, **changes)
    if "adapters" in case:  # they alone are saved, which is less than the whole model
        model = prepared.workload.model
        monkeypatch.setattr(certify, "_SAVED_BYTES", model.parameters * model.element_bytes // 2)
    certificate = certify.certify(prepared, plan, tmp_path, LocalSite("cpu"))
    assert (certificate.verdict, certificate.reasons) == ("holds", ())
    compared = certificate.comparison
    assert compared is not None
    assert compared.reference == reference
    trained = ["projector", "language"] if "adapters" in case else ["vision", "projector", "language"]
    first, last = compared.steps[0], compared.steps[-1]
    assert last.number == compared.steps[-2].number + 1  # so that the update before it has a rate like its own
    assert [part.part for step in (first, last) for part in step.parts] == 2 * trained
    # After an update the tower has gradients also where the projector began as zeros.
    assert [part.part for part in first.parts if part.is_empty] == (["vision"] if "from files" in case else [])
    parts = [part for part in (*first.parts, *last.parts) if part in last.parts or not part.is_empty]
    assert all(part.cosine > 0.999 for part in parts)
    # The differences of two computations, not of a gradient with itself.
    assert all(0 < part.difference < part.allowed_difference for part in parts)
    updates = [step.update.difference for step in compared.steps if step.update]
    assert 0 < max(updates) < 1
    assert (compared.inputs.labelled, compared.inputs.uncompared) == (compared.inputs.records, 0)
    assert compared.saved is not None
    assert compared.epoch.samples == 60
    asked = prepared.job.training.global_batch_samples
    assert f"instead of {asked}{updates_text(compared.epoch.mean_samples, asked)};" in certificate.changes_learning[0]
    told = [text for text in certificate.changes_learning if "the first 2 steps of the training have only" in text]
    assert len(told) == bool(prepared.job.training.curriculum.steps)
    assert certify.known_certificate(prepared, plan, tmp_path) == certificate
    for change in ({"loss_weighting": "token"}, {"loss_weighting": "sample"}, {"schedule": "linear"}, LENIENT):
        changed = with_training(prepared, **change)
        known = certify.known_certificate(changed, plan, tmp_path)
        assert (known == certificate) == (changed.job == prepared.job)
    own_code = prepared.job.model.model_copy(update={"trust_remote_code": True})
    trusting = replace(prepared, job=prepared.job.model_copy(update={"model": own_code}))
    assert certify.known_certificate(trusting, plan, tmp_path) is None
    assert stored_certificates(certificates_folder(tmp_path), plan.id) == (certificate,)


@pytest.mark.long
def test_a_gradient_that_the_one_before_hides_is_no_fault(shallow: Path, tmp_path: Path) -> None:
    plugins.load(TINY, "gemma3").make(tmp_path / "model")
    # Drawn as zeros in front of a norm, the projector has a first gradient of some millions.
    prepared = prepared_of(shallow, tmp_path, model={"path": str(tmp_path / "model")}, training=BATCH | LENIENT)
    certificate = certify.certify(prepared, plan_of("3+0r1,0", "0+4"), tmp_path, LocalSite("cpu"))
    assert (certificate.verdict, certificate.reasons) == ("holds", ())
    assert certificate.comparison is not None
    assert any("the gradient of projector in step 2" in text for text in certificate.comparison.left_out)


def behind_nothing(model: PreTrainedModel, folder: Path) -> None:
    """Save the model with zeros as the last weights of its projector."""
    with torch.no_grad():
        for each in model.model.multi_modal_projector.linear_2.parameters():
            each.zero_()
    model.save_pretrained(folder)


@pytest.mark.filterwarnings("ignore")  # DeepSpeed warns of what it does itself
def test_two_gradients_and_one_weight_are_kept_of_a_parameter_however_many_steps_run(
    shallow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    task = Certification(reference="stages")
    request = prepared_of(shallow, tmp_path, training={**BATCH, "warmup": 2}).request(plan_of("4+2"), task)
    with process_group(0, 0, 1, file_rendezvous(tmp_path / "rendezvous")) as device:
        run = run_plan(request, task, 0, device)
    assert (len(run.steps), run.compared) == (4, (0, 3))
    count = sum(weight.numel() for weight in run.final.values())
    held = {
        each.untyped_storage().data_ptr(): each.nbytes
        for step in run.steps
        for each in (*step.gradients.values.values(), *step.weights.values())
    }
    assert sum(held.values()) == 12 * count


@pytest.mark.long
def test_every_fault_in_the_computation_shows(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, training={**BATCH, "loss_weighting": "square"})
    request = prepared.request(PIPELINE, Certification(reference="transformers", follows=False))
    for name in FAULTS:
        write_request(FolderChannel(tmp_path / name), request)
    assert on_ranks(serve_with_faults, tmp_path) == [True, True]
    found = {name: faults_in(tmp_path / name) for name in FAULTS}
    assert found["none"] == ()
    for name in ("wrong-scale", "lost-sample", "lost-weights", "shifted-positions"):
        parts = [text.split()[3] for text in found[name] if text.startswith("the gradient of")]
        assert parts == ["vision", "projector", "language"], found[name]
    for name in ("wrong-scale", "lost-sample", "lost-weights"):
        assert any(text.startswith("the loss in step 1 is") for text in found[name])
    assert found["repeated-sample"] == ("2 samples are in the epoch more or less often than the data says",)


def with_training(prepared: Prepared, **changes: object) -> Prepared:
    training = prepared.job.training.model_copy(update=changes)
    return replace(prepared, job=prepared.job.model_copy(update={"training": training}))


def faults_in(folder: Path) -> Sequence[str]:
    answers = [read_report(FolderChannel(folder), rank) for rank in (0, 1)]
    reports = [answer.report for answer in answers if answer and isinstance(answer.report, CertificationReport)]
    assert len(reports) == 2, answers
    comparison = compare("float32", reports)
    return faults(comparison, Mixed(samples=BATCH["global_batch_samples"], tolerance=0.1, variance=2.0), reports)
