"""A simulation from stored lengths alone agrees with that of the data."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.prediction.fit.profiled_sizes import largest_sizes
from autotune.report.charts.causes import causes
from autotune.report.charts.gantt import gantt
from autotune.report.charts.quantities import seconds_text
from autotune.report.importance import importances
from autotune.report.sides import sides
from autotune.report.simulation import PackedEpoch, Simulated, Simulator
from autotune.report.source import StudySource, read_source
from autotune.search.learning.calibrated import CalibratedPredictor
from storage.explanation import BEST
from storage.store import open_store
from tests.machines.search_bench import PREDICTOR
from tests.values.report_studies import save_profile
from tests.values.search import COSTS, NO_LOADING, completed, padded_plan
from tests.values.storage import WORKLOAD, best_of, concluded, plan_time
from trials import wire
from trials.costs.layer_costs import LoadCost
from trials.outcome import Completed


@pytest.fixture(scope="module")
def source(study_url: str) -> StudySource:
    with open_store(study_url) as store:
        (study,) = store.studies()
        return read_source(store, study)


def test_the_epochs_of_all_tried_plans_are_near_those_of_the_data(source: StudySource) -> None:
    simulator = Simulator(source)
    for plan in dict.fromkeys(trial.plan for trial in source.trials):
        found = simulator.simulate(plan)
        assert isinstance(found, Simulated), found
        seconds = found.prediction.epoch_seconds * found.epoch_factor
        assert seconds == pytest.approx(PREDICTOR.epoch_seconds(plan), rel=0.08)
        assert len(found.memory) == plan.layout.pipeline


def test_packs_are_matched_by_the_cost_of_what_trains(source: StudySource) -> None:
    model = replace(source.workload.model, trained="projector; language")
    frozen = replace(source, workload=replace(source.workload, model=model))
    packs = Simulator(frozen).packs(source.trials[0].plan)
    assert isinstance(packs, PackedEpoch)
    weights = packs.epoch.settings.weights
    assert (weights.unit, weights.token) == pytest.approx((model.unit_flops / 3, model.token_flops))


def test_the_usual_settings_are_the_fastest_baseline_and_the_best_plan_is_the_winner(source: StudySource) -> None:
    assert source.winner is not None
    assert source.best == source.winner.plan
    assert source.usual is not None
    fastest = max(source.winner.baselines, key=lambda each: each.estimated_samples_per_second)
    assert fastest.role == "packed"
    assert fastest.role in source.roles(source.usual)
    speed = source.speed(source.usual)
    assert speed is not None
    assert speed.mean == fastest.estimated_samples_per_second


def test_the_time_of_plans_without_an_explanation_is_predicted(source: StudySource) -> None:
    before, after = sides(source, Simulator(source))
    chart = causes([before, after])
    assert (chart.basis, "not explained" in str(chart.legend)) == ("predicted", False)
    assert {line[5] for line in chart.table.rows} == {"predicted"}
    assert isinstance(after.simulated, Simulated)
    assert before.epoch_seconds is not None
    seconds = [row["seconds"] for row in chart.spec["data"]["values"] if row["plan"] == "before"]
    assert sum(seconds) == pytest.approx(before.epoch_seconds, rel=0.1)
    mixed = causes([before, replace(after, time=plan_time(after.plan, BEST))])
    assert mixed.basis == "measured and predicted"


def test_the_table_of_a_step_has_the_gaps_of_the_step_that_is_drawn(source: StudySource) -> None:
    simulator = Simulator(source)
    side, plans = sides(source, simulator)[0], dict.fromkeys(trial.plan for trial in source.trials)
    plan = next(plan for plan in plans if plan.layout.pipeline > 1)
    simulated = simulator.simulate(plan)
    assert isinstance(simulated, Simulated)
    chart, seconds = gantt(replace(side, plan=plan, simulated=simulated), 1.0), simulated.timeline.seconds
    assert len(chart.table.rows) == plan.layout.pipeline
    for stage, _, waits in chart.table.rows:
        passes = (row for row in chart.spec["data"]["values"] if row["stage"] == stage)
        busy = sum(row["end"] - row["begin"] for row in passes)
        assert 0 < float(waits.removesuffix("%")) == pytest.approx(100 * (1 - busy / seconds), abs=0.06)


@pytest.mark.parametrize("factor", [1 / 1.4, 1.0, 1.2, 1.4])
def test_a_step_that_was_measured_far_from_its_prediction_says_so(factor: float, source: StudySource) -> None:
    _, after = sides(source, Simulator(source))
    assert isinstance(after.simulated, Simulated)
    assert after.run is not None
    assert after.measurement is not None
    seconds = factor * after.simulated.timeline.seconds
    measured = Completed(measurement=replace(after.measurement, step_seconds=(0.9 * seconds, 1.1 * seconds)))
    ran = replace(after, run=replace(after.run, result=replace(after.run.result, outcome=measured)))
    # Of a plan that ended early only the explanation has a time.
    shortened = replace(after, run=None, time=replace(plan_time(after.plan, BEST), epoch_seconds=32 * seconds))
    predicted, mean = seconds_text(after.simulated.timeline.seconds), seconds_text(seconds)
    said = f"{predicted} long (measured: {mean}; read its proportions, not its length), with"
    assert [said in gantt(side, 1.0).text for side in (ran, shortened)] == [not 1 / 1.3 < factor < 1.3] * 2
    assert "not its length" not in gantt(replace(after, run=None), 1.0).text


@pytest.mark.parametrize(
    ("workers", "accelerator", "loading"), [(0, "cuda", COSTS.loading), (2, "cpu", NO_LOADING)], ids=["none", "some"]
)
def test_packs_are_loaded_as_in_the_search(
    workers: int, accelerator: str, loading: LoadCost, source: StudySource
) -> None:
    work = source.workload
    machine = replace(work, hardware=replace(work.hardware, accelerator=accelerator))
    study = replace(source.study, settings={**source.study.settings, "loading_workers": workers})
    costs = Simulator(replace(source, workload=machine, study=study)).costs
    assert costs is not None
    assert costs.loading == loading


def test_predicted_parts_sum_to_the_predicted_epoch(source: StudySource) -> None:
    before, *_ = sides(source, Simulator(source))
    assert isinstance(before.simulated, Simulated)
    predicted = before.simulated.prediction
    longer = replace(predicted, step_seconds=1.25 * predicted.step_seconds)
    chart = causes([replace(before, simulated=replace(before.simulated, prediction=longer))])
    shares = {line[1]: line[4] for line in chart.table.rows}
    assert shares["not explained"] == "20.0%"
    seconds = sum(row["seconds"] for row in chart.spec["data"]["values"])
    assert seconds == pytest.approx(longer.epoch_seconds * before.simulated.epoch_factor, rel=1e-3)


def test_importances_are_shares_of_the_parameters_that_varied(source: StudySource) -> None:
    shares = importances(source.finished)
    assert sum(shares.values()) == pytest.approx(1)
    points = [trial.parameters for trial in source.finished if trial.parameters]
    assert all(len({point[name] for point in points}) > 1 for name in shares)


def test_few_trials_have_no_importances() -> None:
    assert importances([completed(padded_plan(number), 100.0) for number in range(1, 9)]) == {}


def test_a_profile_of_after_the_search_is_not_corrected_by_its_trials(tmp_path: Path) -> None:
    state = CalibratedPredictor(PREDICTOR).state
    with open_store(f"sqlite:///{tmp_path / 'new.db'}") as store:
        study = store.create_study(store.add_workload(WORKLOAD), {}, seed=0).id
        save_profile(store, WORKLOAD)
        concluded(store, best_of(study), wire.encode(state))
        assert read_source(store, store.study(study)).calibration == state
        save_profile(store, WORKLOAD)
        assert read_source(store, store.study(study)).calibration is None


def test_a_study_is_not_simulated_with_the_profile_of_other_data(source: StudySource, tmp_path: Path) -> None:
    work, plan = source.workload, source.trials[0].plan
    own = largest_sizes(work.data, work.model)
    with open_store(f"sqlite:///{tmp_path / 'new.db'}") as store:
        study = store.study(store.create_study(store.add_workload(work), {}, seed=0).id)
        for tokens, is_known in (own.tokens, True), (own.tokens // 16, False):
            costs = replace(COSTS, sizes=replace(own, tokens=tokens))
            store.save_layer_profile(
                work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(costs)
            )
            found = Simulator(read_source(store, study)).simulate(plan)
            assert isinstance(found, Simulated) is is_known
    assert str(found).startswith(f"the profile is of packs of up to {own.tokens // 16} tokens, but these data have ")
