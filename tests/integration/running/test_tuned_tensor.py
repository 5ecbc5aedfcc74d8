"""Searches among plans whose language layers ranks hold together, on two real ranks, and layouts that are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune import tune
from autotune.cli import main
from autotune.events import TrialEnded
from autotune.prediction.predictor import Predictor
from autotune.search.execution.runner import Runner
from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.roles import Role
from autotune.workload import Prepared
from storage.database.url import default_url
from tests.programs.users import JobFile, refusal
from tests.values.parameters import parameters
from tests.values.training import job_of, plan_of
from trials.costs.layer_costs import LayerCosts
from trials.outcome import Completed, Measurement
from trials.plan import Plan
from trials.run.pool import WarmPool

CUT = plan_of("4+2", tensor=2)


def ranks_of(measurement: Measurement) -> list[tuple[int, int, int]]:
    return [(rank.stage, rank.data_rank, rank.tensor_rank) for rank in measurement.stages]


@pytest.mark.long
@pytest.mark.ranks
def test_a_trial_of_cut_layers_is_measured_and_corrects_the_prediction(
    prepared: Prepared, pool: WarmPool, costs: LayerCosts
) -> None:
    plan = plan_of("12+8", tensor=2)
    predictor = CalibratedPredictor(Predictor(costs, prepared.epoch, prepared.workload.model.element_bytes))
    before = predictor.epoch_seconds(plan)
    outcome = Runner(prepared, predictor, pool).run(plan).outcome
    assert isinstance(outcome, Completed), outcome
    measured = outcome.measurement
    assert ranks_of(measured) == [(0, 0, 0), (0, 0, 1)]
    assert min(rank.peak_bytes - rank.static_bytes for rank in measured.stages) > 0
    for rank in measured.stages:
        assert 0 < rank.forward_seconds + rank.backward_seconds < sum(measured.step_seconds)
    predictor.observe(plan, measured, prepared.job.search.warmup_steps)
    assert predictor.trials == 1
    assert predictor.epoch_seconds(plan) != before
    steps = list(measured.steps)
    uncorrected, corrected = (
        abs(each.predict(plan).step_seconds[steps].mean() * len(steps) / sum(measured.step_seconds) - 1)
        for each in (predictor.base, predictor)
    )
    assert corrected <= uncorrected


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.usefixtures("home")
def test_a_search_runs_named_layouts_beside_a_current_plan_with_cut_layers(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None], plan_file: Callable[[Plan], Path]
) -> None:
    give_profile(default_url(), example=shallow)
    settings = {"warmup_steps": 0, "timed_steps": 1, "confirm_rounds": 1, "final_steps": 0}
    search = {"trials": 5, **settings, "space": {"layouts": ["p1-d1-t2-z0"]}, "current_plan": str(plan_file(CUT))}
    heard: list[object] = []
    job = job_of(shallow, tmp_path / "output", search=search, training={"global_batch_samples": 9})
    best = tune(job, listener=heard.append)
    done = [event.trial for event in heard if isinstance(event, TrialEnded)]
    cut = [trial for trial in done if trial.plan.layout.tensor == 2]
    assert {Role.CURRENT_PLAN, Role.PREDICTED} <= {trial.role for trial in cut}
    for trial in cut:
        assert isinstance(trial.result.outcome, Completed)
        assert ranks_of(trial.result.outcome.measurement) == [(0, 0, 0), (0, 0, 1)]
    assert best.plan.layout.tensor == 2
    shown = CliRunner().invoke(main, ["show", CUT.id])
    assert "pipeline 1 x data 1 x tensor 2, ZeRO 0" in shown.stdout
    assert {"0.0.0", "0.0.1"} <= set(shown.stdout.split())


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("name", "changes", "message"),
    parameters(
        {
            "heads": (
                "p1-d1-t3-z0",
                {"hardware__devices": 3},
                "cannot cut the 4 attention heads of the language model: 1 would be",
            ),
            "key-value heads": (
                "p1-d1-t4-z0",
                {"hardware__devices": 4},
                "cannot cut the 2 key-value heads of the language model: 2 would",
            ),
            "adapters": (
                "p1-d1-t2-z0",
                {"training__lora": {"rank": 2}},
                "tensor degree 2 does not work with LoRA adapters",
            ),
        },
        short=("heads",),
    ),
)
def test_a_named_layout_that_cannot_be_is_refused_with_the_arithmetic(
    name: str, changes: dict[str, Any], message: str, shallow: Path, tmp_path: Path
) -> None:
    job = JobFile(shallow, tmp_path)
    job.spoil(search__space={"layouts": [name]}, **changes)
    _, said = refusal("tune", job.path)
    assert f"search.space.layouts: '{name}' cannot be searched: " in said
    assert message in said
