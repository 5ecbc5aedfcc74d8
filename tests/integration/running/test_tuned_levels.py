"""A search on samples of which some need several ranks: from the data to the trained model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from autotune import launch, tune
from autotune.cli import main
from autotune.events import Note, TrialEnded
from autotune.prediction.predictor import Predictor
from autotune.search.roles import Role
from autotune.search.solver.limits import HEADROOM, Limits
from autotune.search.solver.solver import Solver
from autotune.workload import prepare
from storage.database.url import default_url
from tests.values.data import record, write_records
from tests.values.training import job_of
from trials.costs.layer_costs import LayerCosts
from trials.job import Job
from trials.outcome import Completed, Failed, OutOfMemory, Rejected
from trials.plan import Layout, Packed

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

SHORT, LONG, SAMPLES = 12, 160, 60
"""Words of samples; every tenth is long."""
LAYOUT = Layout(pipeline=1, data=2, zero=0)


@pytest.fixture
def job(shallow: Path, tmp_path: Path, costs: LayerCosts) -> Job:
    """A job whose memory holds the longest sample on two ranks together, and on one not even with recomputation."""
    words = [LONG if number % 10 == 0 else SHORT + number % 5 for number in range(SAMPLES)]
    data = write_records(tmp_path / "mixed.jsonl", *(record("Count.", "red " * count) for count in words))
    ample = job_of(
        shallow,
        tmp_path / "output",
        data={"sources": [{"path": str(data)}]},
        training={"global_batch_samples": 12},
        search={
            "trials": 4,
            "time_limit": "90s",
            "warmup_steps": 0,
            "timed_steps": 1,
            "confirm_rounds": 1,
            "final_steps": 0,
            "space": {"layouts": ["p1-d2-z0"]},
        },
    )
    prepared = prepare(ample, tmp_path / "work")
    model = prepared.workload.model
    predictor = Predictor(costs, prepared.epoch, model.element_bytes)
    solver = Solver(predictor, Limits.of(prepared.workload))
    qt = prepared.workload.data.longest_text_tokens
    alone, shared = (
        solver.least_bytes(Packed(qv=1, qt=qt, qv_min=1, qt_min=0, packer="best-fit", sequence=degree), LAYOUT)
        for degree in (1, 2)
    )
    limit = round((0.4 * alone + 0.6 * shared) / HEADROOM)
    assert limit < alone
    return ample.model_copy(update={"hardware": ample.hardware.model_copy(update={"memory_limit": limit})})


@pytest.mark.long
def test_a_search_finds_levels_for_samples_that_fit_on_no_single_rank_and_they_train(
    job: Job, shallow: Path, give_profile: Callable[..., None]
) -> None:
    give_profile(default_url(), example=shallow)
    heard: list[object] = []
    best = tune(job, listener=heard.append)
    assert max(best.plan.packing.degrees) == 2
    assert any(isinstance(event, Note) and "are searched with p1-d2-z0" in event.text for event in heard)
    trials = [event.trial for event in heard if isinstance(event, TrialEnded)]
    for trial in trials:
        outcome = trial.result.outcome
        # The baseline of packs without levels takes the ZeRO stage with which it fits.
        if max(trial.plan.packing.degrees) == 1 and trial.plan.layout.zero == 0:
            is_short_of_memory = isinstance(outcome, Failed) and isinstance(outcome.cause, OutOfMemory)
            assert is_short_of_memory or isinstance(outcome, Rejected)
    assert isinstance(next(trial for trial in trials if trial.role == Role.PREDICTED).result.outcome, Completed)
    launched = launch(job, steps=2)
    assert launched.report.steps == 2
    shown = CliRunner().invoke(main, ["show", best.plan.id])
    assert "shared by 2 ranks" in shown.stdout
    file = job.training.output.parent / "job.yaml"
    file.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    predicted = CliRunner().invoke(main, ["predict", str(file), "--plan", best.plan.id])
    assert predicted.exit_code == 0, predicted.stderr
    assert "DOES NOT FIT" not in predicted.stdout
    several = CliRunner().invoke(main, ["predict", str(file), "--json"])
    assert several.exit_code == 0, several.stderr
    assert {"levelled", "packed"} & {each["plan"]["packing"]["kind"] for each in json.loads(several.stdout)["plans"]}
