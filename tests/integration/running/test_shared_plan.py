"""A plan file whose packs ranks share, from the command line to the trained model."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import launch
from autotune.certification.certificate import CERTIFICATE_FILE, read_certificate
from autotune.errors import PackError, PlanNotValid
from autotune.loop.sampler import PackSampler
from autotune.loop.samples import SampleDataset
from tests.programs.users import JobFile, refusal
from tests.values.training import PACKED, plan_of
from trials.plan import Levelled, Plan
from trials.stage import Recomputed
from trials.tasks.training.output import RECORD_FILE

pytestmark = pytest.mark.usefixtures("home")

SHARED = plan_of("4+2r2,1", data=2, zero=1, packing=replace(PACKED, sequence=2))


def levels(*capacities: int) -> Levelled:
    """One level that ranks have for themselves, and one that they share."""
    every = enumerate(capacities, start=1)
    return Levelled(levels=tuple(replace(PACKED, qt=qt, qt_min=0, sequence=degree) for degree, qt in every))


LEVELS = replace(
    SHARED,
    stages=(replace(SHARED.stages[0], further_levels=(Recomputed(vision=0, language=1),)),),
    packing=levels(150, 600),
)


@pytest.fixture
def job(shallow: Path, tmp_path: Path) -> JobFile:
    file = JobFile(shallow, tmp_path)
    file.spoil(training__global_batch_samples=9)
    return file


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("plan", [SHARED, LEVELS], ids=["shared", "levels"])
def test_a_plan_file_is_certified_and_launched(job: JobFile, plan_file: Callable[[Plan], Path], plan: Plan) -> None:
    heard: list[object] = []
    launched = launch(job.path, plan=plan_file(plan), steps=2, certify=True, listener=heard.append)
    assert launched.report.steps == 2
    certificate = read_certificate(job.output / CERTIFICATE_FILE)
    assert certificate is not None
    assert (certificate.verdict, certificate.subject.plan) == ("holds", plan.id)
    assert any("was never tried" in str(event) for event in heard)


@pytest.mark.long
@pytest.mark.ranks
def test_a_training_with_levels_that_an_earlier_version_began_is_refused(
    job: JobFile, plan_file: Callable[[Plan], Path]
) -> None:
    """Its rows had other packs, so samples would be trained on twice, and others not at all."""
    launch(job.path, plan=plan_file(LEVELS), steps=1)
    record = json.loads((job.output / RECORD_FILE).read_text())
    del record["settings"]["arrangement_version"]
    (job.output / RECORD_FILE).write_text(json.dumps(record))
    code, message = refusal("launch", job.path, "--plan", plan_file(LEVELS))
    assert code == 2
    assert "which puts other samples into its steps; continue it with that version, or name another folder" in message


def test_a_plan_file_that_does_not_fit_is_refused(job: JobFile, plan_file: Callable[[Plan], Path]) -> None:
    wide = replace(SHARED, layout=replace(SHARED.layout, data=4), packing=replace(PACKED, sequence=4))
    _, message = refusal("launch", job.path, "--plan", plan_file(wide))
    assert "needs 4 devices, the job has 2" in message
    job.spoil(hardware__devices=3)
    by_three = replace(SHARED, layout=replace(SHARED.layout, data=3), packing=replace(PACKED, sequence=3))
    for arguments in ((), ("--dry-run",)):
        _, message = refusal("launch", job.path, "--plan", plan_file(by_three), *arguments)
        assert "sequence degree 3 cannot share the 4 attention heads" in message
    path = plan_file(SHARED)
    path.write_text(path.read_text().replace('"sequence":2', '"sequence":3'))
    with pytest.raises(PlanNotValid, match="2 data ranks leave 2 over; use a degree of 1 or 2, or data 3"):
        launch(job.path, plan=path)


def test_levels_that_do_not_fit_the_data_are_refused(job: JobFile, plan_file: Callable[[Plan], Path]) -> None:
    plan = replace(LEVELS, packing=levels(200, 300))
    _, message = refusal("launch", job.path, "--plan", plan_file(plan))
    assert re.search(r"samples are above the last level with qv=10 qt=300, .*jsonl:\d+ with \d vision units", message)
    _, message = refusal("launch", job.path, "--plan", plan_file(replace(plan, packing=levels(900, 1000))))
    assert re.search(r"level 2 with qv=10 qt=1000 holds no sample: .* which level 1 holds; remove the level", message)


def test_a_loop_of_ones_own_refuses_shared_packs(job: JobFile) -> None:
    with pytest.raises(PackError, match="shared by 2 ranks, which only `launch` can do; set its sequence to 1"):
        PackSampler(SampleDataset(job.path), SHARED, ranks=2)


def test_a_loop_of_ones_own_refuses_a_curriculum(job: JobFile) -> None:
    path = job.spoil(training__curriculum={"steps": 1, "max_tokens": 150})
    with pytest.raises(PackError, match=r"training.curriculum is followed by `launch` alone; remove it from the job"):
        PackSampler(SampleDataset(path), PACKED)
