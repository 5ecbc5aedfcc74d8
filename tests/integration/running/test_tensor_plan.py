"""A plan file whose language layers ranks hold together, from the command line to the trained model, and refusals."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from autotune import launch
from autotune.certification.certificate import CERTIFICATE_FILE, read_certificate
from autotune.errors import PlanNotValid
from autotune.plan_check import check_plan
from tests.programs.users import JobFile, refusal
from tests.tiny_models import glm4v, glm4v_moe, text
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of
from trials.errors import InvalidPlan
from trials.model.refusals.tensor import check_tensor, possible_tensor_degrees
from trials.model.skeleton import build_skeleton, load_config
from trials.plan import Plan

pytestmark = pytest.mark.usefixtures("home")

QK_NORM = {"use_qk_norm": True, "logit_scale": 1.0}
CUT = plan_of("4+2r2,1", tensor=2, zero=1)


@pytest.fixture
def job(shallow: Path, tmp_path: Path) -> JobFile:
    file = JobFile(shallow, tmp_path)
    file.spoil(training__global_batch_samples=9)
    return file


@pytest.mark.long
@pytest.mark.ranks
def test_a_plan_file_is_certified_and_launched(job: JobFile, plan_file: Callable[[Plan], Path]) -> None:
    launched = launch(job.path, plan=plan_file(CUT), steps=2, certify=True)
    assert launched.report.steps == 2
    certificate = read_certificate(job.output / CERTIFICATE_FILE)
    assert certificate is not None
    assert (certificate.verdict, certificate.subject.plan) == ("holds", CUT.id)


def test_a_plan_file_that_does_not_fit_is_refused(job: JobFile, plan_file: Callable[[Plan], Path]) -> None:
    _, message = refusal("launch", job.path, "--plan", plan_file(plan_of("4+2", data=2, tensor=2)))
    assert "needs 4 devices, the job has 2" in message
    job.spoil(hardware__devices=4)
    _, message = refusal("launch", job.path, "--plan", plan_file(plan_of("4+2", tensor=4)))
    assert "tensor degree 4 cannot cut the 2 key-value heads of the language model: 2 would be left over" in message
    assert "use tensor 1 or 2" in message
    shared = plan_of("4+2", data=4, tensor=2, packing=replace(PACKED, sequence=4))
    job.spoil(hardware__devices=8)
    _, message = refusal("launch", job.path, "--plan", plan_file(shared))
    assert "sequence degree 4 cannot share the 2 attention heads of the language model that tensor degree 2" in message
    path = plan_file(CUT)
    path.write_text(path.read_text().replace('"zero":1', '"zero":2'))
    _, message = refusal("launch", job.path, "--plan", path)
    assert "ZeRO 2 does not work with tensor degree 2; use ZeRO 0 or 1, or tensor 1" in message


def test_ranks_that_hold_layers_together_lie_on_one_node(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, hardware={"devices": 6})

    def over(nodes: int, plan: Plan) -> None:
        hardware = replace(prepared.workload.hardware, nodes=nodes)
        check_plan(replace(prepared, workload=replace(prepared.workload, hardware=hardware)), plan)

    over(1, plan_of("4+2", data=3, tensor=2))
    over(3, plan_of("4+2", data=3, tensor=2))
    for nodes, devices in ((2, 3), (6, 1)):
        with pytest.raises(PlanNotValid, match=f"has tensor degree 2, but a node has {devices} devices"):
            over(nodes, plan_of("4+2", data=3, tensor=2))


@pytest.mark.parametrize(
    ("kind", "settings", "degree", "message"),
    parameters(
        {
            "rows": ("llama", {"intermediate_size": 45}, 2, "cannot cut the 45 rows of mlp.gate_proj .* 1 would .* 1$"),
            "heads": ("llama", {}, 3, "cannot cut the 4 attention heads of the language model: 1 would .* 1 or 2$"),
            "experts": ("qwen3_moe", {}, 2, "layers of 'qwen3_moe': mlp.experts.gate_up_proj is in no part"),
            "joined weights": ("phi3", {}, 2, "layers of 'phi3': self_attn.o_proj.weight is in no part"),
            "wide norms": ("olmo2", {}, 2, "layers of 'olmo2': self_attn.q_proj.weight is in no part"),
            "norms of heads": ("cohere", QK_NORM, 2, "layers of 'cohere': self_attn.q_norm.weight is in no part"),
        },
        short=("rows", "heads", "experts", "norms of heads"),
    ),
)
def test_layers_that_cannot_be_cut_are_refused(
    kind: str, settings: dict[str, Any], degree: int, message: str, tmp_path: Path
) -> None:
    text.make_kind(tmp_path, kind, **settings)
    skeleton = build_skeleton(load_config(str(tmp_path)), torch.float32)
    layers = skeleton.modules(skeleton.chain.language_layers)
    check_tensor(skeleton.model.config, layers, 1, adapters=True)
    with pytest.raises(InvalidPlan, match=message):
        check_tensor(skeleton.model.config, layers, degree, adapters=False)
    with pytest.raises(InvalidPlan, match=r"does not work with LoRA adapters; use tensor 1, or remove training\.lora"):
        check_tensor(skeleton.model.config, layers, degree, adapters=True)


@pytest.mark.parametrize("family", parameters({"dense": glm4v, "experts": glm4v_moe}, short=("dense",)))
def test_layers_of_glm_are_not_cut(family: ModuleType, tmp_path: Path) -> None:
    family.make(tmp_path)
    skeleton = build_skeleton(load_config(str(tmp_path)), torch.float32)
    layers = skeleton.modules(skeleton.chain.language_layers)
    assert possible_tensor_degrees(skeleton.model.config, layers) == (1,)
    with pytest.raises(
        InvalidPlan, match=r"tensor degree 2 cannot cut the language layers of 'glm4v_\w+': .* in no part"
    ):
        check_tensor(skeleton.model.config, layers, 2, adapters=False)
