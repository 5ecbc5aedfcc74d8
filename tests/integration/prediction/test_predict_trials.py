"""What trials teach `autotune predict`."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.machine.hardware import software
from autotune.prediction.features import COSTS as FACTORS
from autotune.prediction.features import scaled
from autotune.search.learning.calibrated import CalibratedPredictor
from tests.programs.users import JobFile, document
from tests.values.exchanges import averages, exchanging
from tests.values.forecast import OTHERS, PLAN, Trials, store_profile
from tests.values.training import PACKED, plan_of, prepared_of
from trials import wire
from trials.costs.layer_costs import LayerCosts, UpdateCost
from trials.plan import Padded, Plan

pytestmark = pytest.mark.usefixtures("home")


def predicted(*arguments: str | Path) -> dict[str, Any]:
    return document("predict", *arguments)


def test_trials_correct_what_is_predicted_and_narrow_its_error(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    truth = scaled(costs, [{"vision": 1.4, "language": 0.8}.get(name, 1.0) for name in FACTORS])
    store_profile(job, costs)
    before = predicted(job.path, "--plan", plan_file(PLAN))
    trials.keep(OTHERS, truth)
    after = predicted(job.path, "--plan", plan_file(PLAN))
    assert (before["corrected_by_trials"], after["corrected_by_trials"]) == (0, len(OTHERS))
    (alone,), (corrected,) = before["plans"], after["plans"]
    real = trials.seconds(PLAN, truth)
    assert abs(alone["epoch_seconds"] / real - 1) > 0.08
    assert corrected["epoch_seconds"] == pytest.approx(real, rel=0.03)
    assert corrected["epoch_seconds_error"] < alone["epoch_seconds_error"] / 2
    assert alone["parts"]["unexplained"] == pytest.approx(0, abs=1e-6)
    assert corrected["parts"]["unexplained"] != pytest.approx(0, abs=1e-6)
    assert sum(corrected["parts"].values()) == pytest.approx(corrected["epoch_seconds"])
    output = CliRunner().invoke(main, ["predict", str(job.path), "--plan", str(plan_file(PLAN))]).stdout
    assert f"Corrected by {len(OTHERS)} trials" in output
    assert re.search(r"epoch \d+\.\d \+- \d+\.\d s in", output)


def test_plans_of_a_kind_that_runs_faster_than_predicted_are_forecast_as_they_ran(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    padded, tried, wider = (replace(PLAN, packing=Padded(samples=samples)) for samples in (4, 2, 8))

    def factor_of(plan: Plan) -> float:
        return 0.9 if isinstance(plan.packing, Padded) else 1.0

    trials.keep((*OTHERS, tried, padded, tried), costs, factor_of=factor_of)
    for plan, error in ((PLAN, 0.03), (tried, 0.03), (padded, 0.03), (wider, 0.06)):
        (found,) = predicted(job.path, "--plan", plan_file(plan))["plans"]
        real = factor_of(plan) * trials.seconds(plan, costs)
        assert found["epoch_seconds"] == pytest.approx(real, rel=error), plan
        assert abs(found["epoch_seconds"] - real) < 2 * found["epoch_seconds_error"]
        assert sum(found["parts"].values()) == pytest.approx(found["epoch_seconds"])


def test_what_other_programs_slowed_is_not_predicted_of_other_plans(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    trials.keep(OTHERS[:2], costs)
    trials.keep(OTHERS[2:], costs, factor_of=lambda _: 1.5, disturbance="other processes used 1.2 of 2 cores")
    (found,) = predicted(job.path, "--plan", plan_file(PLAN))["plans"]
    assert found["epoch_seconds"] == pytest.approx(trials.seconds(PLAN, costs), rel=0.03)


def test_trials_with_other_software_or_a_profile_file_correct_nothing(
    job: JobFile, costs: LayerCosts, profile: Path, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs)
    trials.keep(OTHERS[:1], costs, software=replace(software(), torch="1.0"))
    assert predicted(job.path, "--plan", plan_file(PLAN))["corrected_by_trials"] == 0
    trials.keep(OTHERS[:1], costs)
    assert predicted(job.path, "--plan", plan_file(PLAN))["corrected_by_trials"] == 1
    file = predicted(job.path, "--plan", plan_file(PLAN), "--device-profile", profile)
    assert (file["corrected_by_trials"], file["plans"][0]["epoch_seconds_error"] > 0) == (0, True)


def test_trials_that_exchange_what_the_profile_has_not_timed_are_left_out_with_a_warning(
    job: JobFile,
    costs: LayerCosts,
    trials: Trials,
    plan_file: Callable[[Plan], Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    of_two = UpdateCost(zero=1, data_parallel=2, seconds_per_parameter=2e-9)
    store_profile(job, replace(costs, updates=(*costs.updates, of_two)))
    sharing = plan_of("12+8", data=2, packing=replace(PACKED, sequence=2))
    trials.keep((OTHERS[0], sharing), costs)
    done = CliRunner().invoke(main, ["predict", str(job.path), "--plan", str(plan_file(PLAN)), "--json"])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["corrected_by_trials"] == 1
    assert "1 trial of the store cannot correct the predictions" in caplog.text


def test_trials_on_other_nodes_and_a_later_profile_of_those_change_nothing(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    store_profile(job, costs, driver="an older one")
    slow = scaled(costs, [2.0 if name == "communication" else 1.0 for name in FACTORS])
    trials.keep((*OTHERS, PLAN), slow, hardware=replace(trials.prepared.workload.hardware, nodes=2))
    store_profile(job, slow, nodes=2)
    found = predicted(job.path, "--plan", plan_file(PLAN))
    assert (found["corrected_by_trials"], found["extrapolated"]) == (0, [])
    assert found["plans"][0]["epoch_seconds"] == pytest.approx(trials.seconds(PLAN, costs))


def test_cpu_ranks_with_fewer_cores_teach_nothing_and_their_profile_is_said_to_be_another(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    slow = scaled(costs, [2.0] * len(FACTORS))
    store_profile(job, slow, devices=4)
    (extrapolated,) = predicted(job.path, "--plan", plan_file(PLAN))["extrapolated"]
    assert extrapolated == "the time of 2 CPU ranks, as if each had as many cores as the 4 that were profiled"
    store_profile(job, costs, driver="an older one")
    store_profile(job, slow, devices=4)
    wide = [replace(plan, layout=replace(plan.layout, data=2 * plan.layout.data)) for plan in OTHERS[:2]]
    trials.keep(wide, slow, hardware=replace(trials.prepared.workload.hardware, devices=4))
    found = predicted(job.path, "--plan", plan_file(PLAN))
    assert (found["corrected_by_trials"], found["extrapolated"]) == (0, [])
    assert found["plans"][0]["epoch_seconds"] == pytest.approx(trials.seconds(PLAN, costs))
    more = predicted(job.path, "--plan", plan_file(wide[0]), "--devices", "4")
    assert (more["corrected_by_trials"], more["extrapolated"]) == (2, [])


def test_trials_that_loaded_otherwise_teach_nothing(job: JobFile, costs: LayerCosts, trials: Trials) -> None:
    store_profile(job, costs)
    trials.keep(OTHERS[:1], costs, settings={"loading_workers": 0})
    trials.keep(OTHERS[:2], costs, settings={"loading_workers": 2})
    for workers, expected in ((None, 1), (0, 1), (1, 2), (2, 2)):
        job.spoil(data__workers=workers)
        assert predicted(job.path, "--top", "1")["corrected_by_trials"] == expected


def test_trials_of_other_packs_or_steps_teach_nothing(job: JobFile, costs: LayerCosts, trials: Trials) -> None:
    store_profile(job, costs)
    trials.keep(OTHERS[:1], costs, seed=5)
    trials.keep(OTHERS[:2], costs, settings={"training": {"batch_tolerance": 0.3}})
    trials.keep(OTHERS[:3], costs, settings={"training": {"batch_tolerance": 0.3, "step_variance": 3.0}})
    for training, expected in (
        ({}, 0),
        ({"seed": 5}, 1),
        ({"seed": 0, "batch_tolerance": 0.3}, 2),
        ({"step_variance": 3.0}, 3),
    ):
        job.spoil(**{f"training__{name}": value for name, value in training.items()})
        assert predicted(job.path, "--top", "1")["corrected_by_trials"] == expected


def test_peaks_are_those_of_the_steps_that_the_search_ran(
    example: Path, job: JobFile, costs: LayerCosts, trials: Trials, tmp_path: Path
) -> None:
    store_profile(job, costs)
    steps = {"warmup_steps": 0, "timed_steps": 1}
    trials.prepared = prepared_of(example, tmp_path / "few", search=steps)
    (before,) = predicted(job.path, "--top", "1")["plans"]
    trials.keep(OTHERS, costs, settings=steps)
    (after,) = predicted(job.path, "--top", "1")["plans"]
    for then, now in zip(before["stages"], after["stages"], strict=True):
        assert now["expected"] == pytest.approx(then["expected"], rel=0.001)


def test_plans_that_trials_completed_are_among_the_best_unless_they_change_what_is_learned(
    job: JobFile, costs: LayerCosts, trials: Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_profile(job, costs)
    (fast,) = predicted(job.path, "--top", "1", "--memory", "1GiB")["plans"]
    plan = wire.decode(Plan, json.dumps(fast["plan"]))
    # The plan fits, but not with the memory that the solver leaves free.
    tight = ("--top", "2", "--memory", f"{max(stage['expected'] for stage in fast['stages']) // 1014}KiB")
    solved = predicted(job.path, *tight)["plans"]
    assert solved[0]["epoch_seconds"] > fast["epoch_seconds"]
    wide = replace(plan, layout=replace(plan.layout, data=2 * plan.layout.data))
    trials.keep([plan], costs)
    here = trials.prepared.workload.hardware
    trials.keep([wide], costs, hardware=replace(here, devices=4, cpu_cores=2 * here.cpu_cores))
    best = predicted(job.path, *tight)["plans"]
    assert (best[0]["id"], best[0]["fits"]) == (plan.id, True)
    assert best[1]["plan"]["layout"]["data"] * best[1]["plan"]["layout"]["pipeline"] == 2
    text = CliRunner().invoke(main, ["predict", str(job.path), *tight]).stdout
    monkeypatch.setattr(CalibratedPredictor, "_learning_faults", lambda *_: ("steps differ",))
    assert predicted(job.path, *tight)["plans"][0]["id"] == solved[0]["id"]
    assert "The solver leaves 3% of the memory free, since predictions err" in text


@pytest.mark.long
def test_trials_on_more_devices_confirm_what_was_extrapolated_to_them(
    job: JobFile, costs: LayerCosts, trials: Trials, plan_file: Callable[[Plan], Path]
) -> None:
    slow = exchanging(costs, averages(1e-7))
    wide = [plan_of("12+8", data=8, packing=PACKED), plan_of("9+0", "3+8", data=4, packing=PACKED)]
    two = plan_of("12+8", data=2, packing=PACKED)
    h100: dict[str, Any] = {"device_name": "NVIDIA H100 80GB HBM3", "accelerator": "cuda"}
    store_profile(job, slow, **h100)

    def communication(trials: int) -> list[float]:
        found = [
            predicted(job.path, "--plan", plan_file(wide[0]), "--device-profile", "h100", "--devices", "8"),
            predicted(job.path, "--plan", plan_file(two), "--device-profile", "h100"),
        ]
        assert [document["corrected_by_trials"] for document in found] == [trials, trials]
        return [document["plans"][0]["parts"]["communication"] for document in found]

    before = communication(0)
    trials.costs = slow
    ring = exchanging(slow, averages(1e-7 * (7 / 8) / (1 / 2), 8))
    trials.keep(wide * 3, ring, hardware=replace(trials.prepared.workload.hardware, devices=8, **h100))
    assert communication(6) == pytest.approx(before, rel=0.05)
