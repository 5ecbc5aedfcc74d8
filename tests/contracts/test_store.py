"""What the store promises, on every database that it supports."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta, tzinfo

import pytest
from sqlalchemy import Engine, text

from storage.errors import AlreadyFinished, UnknownRecord
from storage.queries import studies
from storage.records import AbandonedTrial, FinishedTrial, RunningTrial
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    EXPLANATION,
    NOON,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    changed,
    completed,
    concluded,
    launch_result,
    new_study,
    packed_plan,
    result_of,
)
from trials.outcome import Outcome
from trials.plan import Layout, Plan

NOBODY = "0" * 32
DISTURBED = "other processes used 1.3 of 2 cores"


def is_recent(time: datetime) -> bool:
    return time.utcoffset() == timedelta(0) and abs(datetime.now(UTC) - time) < timedelta(minutes=5)


def test_a_workload_comes_back_equal_and_is_stored_once(store: Store) -> None:
    fingerprint = store.add_workload(WORKLOAD)
    assert fingerprint == WORKLOAD.fingerprint
    assert store.add_workload(WORKLOAD) == fingerprint
    assert store.workload(fingerprint) == WORKLOAD


def test_a_workload_on_a_cpu_without_driver_comes_back_equal(store: Store) -> None:
    workload = changed("hardware.driver", None, changed("hardware.compute_capability", None))
    assert store.workload(store.add_workload(workload)) == workload


def test_an_unknown_workload_is_named_in_the_error(store: Store) -> None:
    with pytest.raises(UnknownRecord, match="no workload 'feed'"):
        store.workload("feed")


@on_both_databases
def test_a_study_keeps_its_settings_and_its_time(store: Store) -> None:
    settings = {"trials": 24, "sampler": "tpe", "limits": [1.5, None, True], "nested": {"a": "'"}}
    created = store.create_study(store.add_workload(WORKLOAD), settings, seed=2**31 - 1)
    assert store.studies() == (created,)
    assert created.settings == settings
    assert created.seed == 2**31 - 1
    assert created.name.startswith("tiny-internvl-")
    assert is_recent(created.started)
    assert created.finished is None


def test_a_study_with_a_winner_has_ended(store: Store) -> None:
    best = concluded(store, best_of(new_study(store)))
    finished = store.study(best.study_id).finished
    assert finished is not None
    assert is_recent(finished)


@pytest.mark.parametrize("plan", [packed_plan(), PADDED_PLAN], ids=["packed", "padded"])
def test_a_started_trial_is_running_with_its_plan(store: Store, plan: Plan) -> None:
    study = new_study(store)
    trial = store.start_trial(study, plan, "baseline-a")
    assert trial == RunningTrial(
        id=trial.id, study_id=study, number=0, plan=plan, role="baseline-a", parameters={}, started=trial.started
    )
    assert is_recent(trial.started)
    assert store.running_trials() == store.trials(study) == (trial,)


def test_a_trial_comes_back_with_its_parameters(store: Store) -> None:
    study = new_study(store)
    parameters = {"qv": 9, "fill": 0.5, "layout": "2x4", "shift": None}
    trial = store.start_trial(study, packed_plan(), "sampled", parameters)
    assert trial.parameters == parameters
    assert store.running_trials() == (trial,)
    store.finish_trial(result_of(trial.id))
    assert store.trials(study)[0].parameters == parameters


def test_trials_are_numbered_within_their_study(store: Store) -> None:
    first, second = new_study(store), new_study(store)
    numbers = [store.start_trial(study, PADDED_PLAN, "search").number for study in (first, first, second, first)]
    assert numbers == [0, 1, 0, 2]


@on_both_databases
def test_threads_that_start_trials_never_share_a_number(store: Store) -> None:
    study = new_study(store)
    with ThreadPoolExecutor(4) as threads:
        trials = list(threads.map(lambda qv: store.start_trial(study, packed_plan(qv % 3), "search"), range(16)))
    assert sorted(trial.number for trial in trials) == list(range(16))


@pytest.mark.parametrize("outcome", OUTCOMES.values(), ids=OUTCOMES)
def test_a_result_comes_back_equal(store: Store, outcome: Outcome) -> None:
    study = new_study(store)
    trial = store.start_trial(study, packed_plan(), "search")
    result = result_of(trial.id, outcome)
    store.finish_trial(result)
    (stored,) = store.trials(study)
    assert isinstance(stored, FinishedTrial)
    assert stored.result == result
    assert stored.result.finished.utcoffset() == timedelta(0)
    assert store.running_trials() == ()


@on_both_databases
def test_what_queries_ask_for_stands_in_columns(store: Store, engine: Engine) -> None:
    study = new_study(store)
    plans = dict(zip(OUTCOMES, (packed_plan(9), PADDED_PLAN, *map(packed_plan, (1, 2, 3))), strict=True))
    for name, outcome in OUTCOMES.items():
        store.finish_trial(result_of(store.start_trial(study, plans[name], name).id, outcome))
    with engine.connect() as connection:
        trials = connection.execute(
            text(
                "SELECT role, qv, pipeline, data, zero, kind, measured_samples_per_second, epoch_seconds, peak_bytes,"
                " failure_kind, failure_stage, disturbance, energy_joules FROM autotune_trial"
                " JOIN autotune_plan ON autotune_plan.id = plan_id"
                " JOIN autotune_outcome ON trial_id = autotune_trial.id"
                " ORDER BY number"
            )
        ).all()
        stages = connection.execute(
            text("SELECT rank, stage, backward_seconds, static_bytes FROM autotune_stage_measurement ORDER BY rank")
        ).all()
    assert trials == [
        ("completed", 9, 2, 4, 1, "completed", 64 / 1.1, 1234.5, 61 << 30, None, None, None, 4567.8),
        ("rejected", None, 1, 8, 3, "rejected", None, None, None, None, None, None, None),
        ("out of memory", 1, 2, 4, 1, "failed", None, None, None, "out-of-memory", 1, DISTURBED, None),
        ("crash", 2, 2, 4, 1, "failed", None, None, None, "crash", None, DISTURBED, None),
        ("timeout", 3, 2, 4, 1, "failed", None, None, None, "timeout", None, DISTURBED, None),
    ]
    assert stages == [(0, 0, 0.2, 40 << 30), (1, 1, 1.2, 40 << 30)]


def test_each_tensor_rank_has_its_row(store: Store, engine: Engine) -> None:
    plan = replace(packed_plan(), layout=Layout(pipeline=2, data=1, zero=1, tensor=2))
    once = completed()
    stages = tuple(replace(each, tensor_rank=rank) for each in once.measurement.stages for rank in range(2))
    outcome = replace(once, measurement=replace(once.measurement, stages=stages))
    study = new_study(store)
    trial = store.start_trial(study, plan, "sampled")
    store.finish_trial(result_of(trial.id, outcome))
    (stored,) = store.trials(study)
    assert isinstance(stored, FinishedTrial)
    assert (stored.plan, stored.result.outcome) == (plan, outcome)
    with engine.connect() as connection:
        asked = "SELECT rank, stage, data_rank, tensor_rank FROM autotune_stage_measurement ORDER BY rank"
        assert connection.execute(text(asked)).all() == [(0, 0, 0, 0), (1, 0, 0, 1), (2, 1, 0, 0), (3, 1, 0, 1)]
        assert connection.scalar(text("SELECT tensor FROM autotune_plan")) == 2
    assert not list(store.problems())


def test_a_plan_with_averages_on_each_node_first_comes_back_as_it_was(store: Store) -> None:
    plan = replace(packed_plan(), layout=Layout(pipeline=2, data=4, zero=1, reduce_within=2))
    study = new_study(store)
    store.start_trial(study, plan, "sampled")
    (stored,) = store.trials(study)
    assert stored.plan == plan
    assert not list(store.problems())


def test_the_same_result_may_be_given_twice_and_another_never(store: Store) -> None:
    trial = store.start_trial(new_study(store), packed_plan(), "search")
    result = result_of(trial.id)
    store.finish_trial(result)
    store.finish_trial(result)
    others = (
        replace(result, outcome=completed(0.4)),
        replace(result, epoch_seconds=1.0),
        replace(result, finished=NOON + timedelta(seconds=1)),
    )
    for other in others:
        with pytest.raises(AlreadyFinished, match=trial.id):
            store.finish_trial(other)
    (answer,) = store.answers(WORKLOAD.fingerprint)
    assert answer.result == result


@on_both_databases
def test_threads_that_give_the_same_result_at_once_all_succeed(store: Store) -> None:
    study = new_study(store)
    trials = [store.start_trial(study, packed_plan(), "search") for _ in range(6)]
    with ThreadPoolExecutor(4) as threads:
        for trial in trials:
            list(threads.map(store.finish_trial, [result_of(trial.id)] * 4))
    assert len(store.answers(WORKLOAD.fingerprint)) == 6


def test_an_abandoned_trial_is_not_running_but_keeps_a_late_result(store: Store) -> None:
    study = new_study(store)
    trial = store.start_trial(study, packed_plan(), "search")
    store.abandon_trial(trial.id)
    (abandoned,) = store.trials(study)
    assert isinstance(abandoned, AbandonedTrial)
    assert is_recent(abandoned.abandoned)
    assert store.running_trials() == ()
    assert store.answers(WORKLOAD.fingerprint) == ()
    store.finish_trial(result_of(trial.id))
    assert [answer.id for answer in store.answers(WORKLOAD.fingerprint)] == [trial.id]


def test_a_finished_trial_cannot_be_abandoned(store: Store) -> None:
    trial = store.start_trial(new_study(store), packed_plan(), "search")
    store.finish_trial(result_of(trial.id))
    store.abandon_trial(trial.id)
    assert len(store.answers(WORKLOAD.fingerprint)) == 1


@on_both_databases
def test_what_refers_to_nothing_is_refused(store: Store) -> None:
    store.add_workload(WORKLOAD)
    calls = (
        lambda: store.create_study(NOBODY, {}, 0),
        lambda: store.conclude_study(best_of(NOBODY), "{}", NOBODY),
        lambda: store.start_trial(NOBODY, PADDED_PLAN, "search"),
        lambda: store.finish_trial(result_of(NOBODY)),
        lambda: store.abandon_trial(NOBODY),
        lambda: store.start_launch(PADDED_PLAN, NOBODY, None),
        lambda: store.finish_launch(launch_result(NOBODY)),
        lambda: store.save_layer_profile(NOBODY, WORKLOAD.model.fingerprint, WORKLOAD.software, "{}"),
    )
    for call in calls:
        with pytest.raises(UnknownRecord, match=NOBODY):
            call()


@on_both_databases
def test_a_winner_comes_back_equal(store: Store) -> None:
    bare = concluded(store, best_of(new_study(store), baselines=(), confidence=None, ties=(), pareto=()))
    assert store.best_plans() == (bare,)
    rich = concluded(store, best_of(new_study(store), explanation=EXPLANATION))
    assert set(store.best_plans()) == {bare, rich}


def test_where_the_time_of_a_compared_plan_goes_is_found_with_it(store: Store) -> None:
    study = new_study(store)
    for plan in (packed_plan(), PADDED_PLAN, packed_plan(40)):
        store.finish_trial(result_of(store.start_trial(study, plan, "sampled").id))
    concluded(store, best_of(study, explanation=EXPLANATION))
    assert store.find_plan(PADDED_PLAN.id).time == EXPLANATION.plans[1]
    assert store.find_plan(packed_plan(40).id).time is None


@on_both_databases
def test_winners_are_the_fastest_first_within_the_workload_searched_last(store: Store) -> None:
    """What the clock said when a plan won does not count: it may have been set."""
    old = changed("hardware.devices", 4)
    elsewhere = best_of(new_study(store, old), workload=old, epoch_seconds=1.0, created=NOON + timedelta(hours=9))
    slow = best_of(new_study(store), plan=PADDED_PLAN, epoch_seconds=200.0, created=NOON + timedelta(hours=1))
    fast = best_of(new_study(store), created=NOON - timedelta(hours=2))
    for best in (elsewhere, slow, fast):
        concluded(store, best)
    assert store.best_plans() == (fast, slow, elsewhere)
    assert store.best_plans(limit=1) == (fast,)
    assert store.last_winner(WORKLOAD.fingerprint) == fast
    later = concluded(store, best_of(new_study(store, old), workload=old, epoch_seconds=2.0))
    assert store.best_plans() == (elsewhere, later, fast, slow)
    assert store.last_winner(old.fingerprint) == later


def test_a_study_begins_after_those_before_it_though_the_clock_was_set_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = new_study(store)

    class SetBack(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) - timedelta(hours=1)

    monkeypatch.setattr(studies, "datetime", SetBack)
    second = new_study(store)
    assert store.study(second).started > store.study(first).started
    assert store.studies()[0].id == second


@on_both_databases
def test_winners_and_studies_of_other_hardware_models_and_workloads_are_left_out(store: Store) -> None:
    qwen = changed("model.config_digest", "beef", changed("model.name", "qwen2.5-vl_7b"))
    other = changed("hardware.device_name", "NVIDIA H100 50%", qwen)
    ours, theirs = best_of(new_study(store)), best_of(new_study(store, other), workload=other)
    concluded(store, ours)
    concluded(store, theirs)
    assert store.best_plans(hardware_fingerprint=WORKLOAD.hardware.fingerprint) == (ours,)
    assert store.best_plans(workload_fingerprint=other.fingerprint) == (theirs,)
    assert store.best_plans(hardware_name="a100") == (ours,)
    assert store.best_plans(hardware_name="50%") == (theirs,)
    assert store.best_plans(hardware_name="%") == (theirs,)
    assert store.best_plans(model_name="VL_7") == (theirs,)
    assert [study.id for study in store.studies(model_name="VL_7")] == [theirs.study_id]
    assert store.best_plans(hardware_name="a100", model_name="qwen") == ()


def test_a_layer_profile_is_found_only_for_the_same_hardware_model_and_software(store: Store) -> None:
    store.add_workload(WORKLOAD)
    hardware, model, software = WORKLOAD.hardware.fingerprint, WORKLOAD.model.fingerprint, WORKLOAD.software
    store.save_layer_profile(hardware, model, software, '{"old": 1}')
    store.save_layer_profile(hardware, model, software, '{"layers": [0.1]}')
    found = store.layer_profile(hardware, model, software)
    assert found is not None
    assert found.document == '{"layers": [0.1]}'
    assert (found.hardware, found.model, found.software) == (WORKLOAD.hardware, WORKLOAD.model, software)
    assert is_recent(found.created)
    assert store.layer_profile(hardware, model, replace(software, torch="2.14.0")) is None
    assert store.layer_profile("feed", model, software) is None


@on_both_databases
def test_layer_profiles_are_listed_with_what_they_were_taken_on_the_newest_first(store: Store) -> None:
    other = changed("hardware.device_name", "AMD EPYC_100% 9754", changed("hardware.driver", None))
    for workload, document in ((WORKLOAD, "{}"), (other, "[1]"), (WORKLOAD, '{"layers": [0.1]}')):
        store.add_workload(workload)
        store.save_layer_profile(workload.hardware.fingerprint, workload.model.fingerprint, workload.software, document)
    first, second = store.layer_profiles()
    assert (first.hardware, first.model, first.software) == (WORKLOAD.hardware, WORKLOAD.model, WORKLOAD.software)
    assert (first.document, second.document, second.hardware) == ('{"layers": [0.1]}', "[1]", other.hardware)
    assert is_recent(first.created)
    assert store.layer_profiles(hardware_name="a100") == (first,)
    assert store.layer_profiles(hardware_name="c_100%") == (second,)
    assert store.layer_profiles(hardware_name="%") == (second,)
    assert store.layer_profiles(hardware_name="H100") == ()


@on_both_databases
def test_a_launch_runs_until_its_end_is_known_and_then_never_changes(store: Store) -> None:
    plan, workload = packed_plan(), store.add_workload(WORKLOAD)
    launch = store.start_launch(plan, workload, 12.5)
    assert store.launches(plan.id) == (launch,)
    assert launch.result is None
    assert launch.promised_samples_per_second == 12.5
    result = launch_result(launch.id, status="interrupted")
    store.finish_launch(result)
    store.finish_launch(result)
    assert store.launches(plan.id) == (replace(launch, result=result),)
    with pytest.raises(AlreadyFinished, match="interrupted"):
        store.finish_launch(replace(result, status="finished"))
    assert store.launches(PADDED_PLAN.id) == ()
