"""Families that are tuned and then trained with the winner on real ranks."""

import math
from pathlib import Path
from statistics import median

import pytest

from autotune import launch, tune
from autotune.certification.certificate import stored_certificates
from autotune.folders import certificates_folder, work_folder
from tests.contracts.test_families import TINY
from tests.values.parameters import parameters
from tests.values.training import job_of
from trials import plugins
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]
FAMILIES = (
    "aya-vision",
    "cohere2-vision",
    "lighton-ocr",
    "vipllava",
    "glm4v",
    "got-ocr2",
    "ovis2",
    "paddleocr-vl",
    "paligemma",
)


@pytest.mark.parametrize("name", parameters({name: name for name in FAMILIES}, short=()))
def test_the_winner_is_certified_and_trains(name: str, shallow: Path, tmp_path: Path) -> None:
    plugins.load(TINY, name).make(tmp_path / "model")
    job = job_of(
        shallow,
        tmp_path / "output",
        model={"path": str(tmp_path / "model")},
        search={"trials": 6, "time_limit": "200s"},
        training={"learning_rate": 5e-3, "epochs": 4},
    )
    best = tune(job)
    assert best.baselines
    assert [each.holds for each in stored_certificates(certificates_folder(work_folder(None)), best.plan.id)] == [True]
    found = launch(job, steps=6)
    assert found.report.steps == 6
    losses = [line.loss for line in read_lines(job.training.output / PROGRESS_FILE) if isinstance(line, Progress)]
    assert len(losses) == 6
    assert all(map(math.isfinite, losses))
    # Not the last alone: at this rate AdamW overshoots in single steps, of transformers' own model as well.
    assert median(losses[-3:]) < losses[0]
