"""What is known of the trials of other studies: which of them count, and their summaries."""

from dataclasses import replace
from datetime import timedelta

import pytest
from sqlalchemy import Engine, text

from storage.records import FinishedTrial
from storage.store import Store
from tests.contracts.conftest import on_both_databases
from tests.values.storage import (
    NOON,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    changed,
    completed,
    new_study,
    packed_plan,
    result_of,
)
from trials.outcome import Crash, Failed


@on_both_databases
def test_summaries_are_those_of_the_whole_trials_oldest_first(store: Store) -> None:
    studies = [new_study(store) for _ in range(3)]
    text_of_a_rank = Failed(cause=Crash(rank=0, detail='{"shortened":true}'))
    for age, outcome in enumerate((*OUTCOMES.values(), replace(completed(), shortened=True), text_of_a_rank)):
        trial = store.start_trial(studies[age % 2], packed_plan(age + 1), "sampled")
        store.finish_trial(replace(result_of(trial.id, outcome), finished=NOON - timedelta(days=age)))
    store.finish_trial(result_of(store.start_trial(studies[2], packed_plan(), "sampled").id))
    store.start_trial(studies[0], packed_plan(), "sampled")
    trials = [trial for study in studies[:2] for trial in store.trials(study) if isinstance(trial, FinishedTrial)]
    found = store.summaries(*studies[:2])
    assert list(found) == sorted((trial.summary for trial in trials), key=lambda each: each.finished)
    assert sum(each.shortened for each in found) == 1


def test_unknown_studies_have_no_summaries(store: Store) -> None:
    assert store.summaries("0" * 32) == store.summaries() == ()


def test_a_summary_that_contradicts_itself_hides_no_other(
    store: Store, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    study = new_study(store)
    bad, good = (store.start_trial(study, packed_plan(qv), "sampled") for qv in (8, 9))
    for trial in (bad, good):
        store.finish_trial(result_of(trial.id))
    with engine.begin() as connection:
        connection.execute(text("UPDATE autotune_outcome SET kind = 'failed' WHERE trial_id = :id"), {"id": bad.id})
    assert [each.plan_id for each in store.summaries(study)] == [good.plan.id]
    assert f"left out autotune_trial {bad.id}, which cannot be read" in caplog.text


def test_answers_come_from_all_studies_of_exactly_this_workload(store: Store) -> None:
    other = changed("software.torch", "2.14.0")
    finished = []
    for workload in (WORKLOAD, WORKLOAD, other):
        trial = store.start_trial(new_study(store, workload), packed_plan(), "search")
        store.finish_trial(result_of(trial.id))
        finished.append(trial.id)
    store.start_trial(new_study(store), PADDED_PLAN, "search")
    assert {answer.id for answer in store.answers(WORKLOAD.fingerprint)} == set(finished[:2])
    assert [answer.id for answer in store.answers(other.fingerprint)] == finished[2:]
    oldest = store.studies()[-1]
    (answer,) = store.answers(oldest.workload_fingerprint, lambda study: study == oldest)
    assert (answer.id, answer.study_id) == (finished[0], oldest.id)


@on_both_databases
def test_trials_are_comparable_on_the_same_model_data_software_and_kind_of_devices(store: Store) -> None:
    same = (
        WORKLOAD,
        changed("model.name", "another folder"),
        changed("hardware.devices", 2),
        changed("hardware.driver", None),
        changed("memory_limit_bytes", 1 << 30),
        changed("hardware.link", "NV12", changed("hardware.devices", 1)),
    )
    others = (
        changed("model.dtype", "float32"),
        changed("model.token_flops", 0.3),
        changed("data.lengths_digest", "feed"),
        changed("hardware.device_name", "NVIDIA H100"),
        changed("hardware.compute_capability", None),
        changed("hardware.device_memory_bytes", 40 << 30),
        changed("hardware.nodes", 2),
        changed("hardware.link", "SYS"),
        changed("software.transformers", "5.24.0"),
        changed("oversize", "skip"),
        changed("global_batch_samples", 64),
    )
    times = [NOON - timedelta(hours=number) for number in range(len(same))]
    for workload, time in (*zip(same, times, strict=True), *((other, NOON) for other in others)):
        trial = store.start_trial(new_study(store, workload), packed_plan(), "search")
        store.finish_trial(replace(result_of(trial.id), finished=time))
    store.start_trial(new_study(store), PADDED_PLAN, "search")
    found = store.comparable_trials(WORKLOAD)
    assert [trial.result.finished for _, trial in found] == sorted(times)
    assert all(study == store.study(trial.study_id) for study, trial in found)
    on_a_cpu = changed("hardware.compute_capability", None)
    assert len(store.comparable_trials(on_a_cpu)) == 1


def test_cpu_ranks_learn_from_ranks_with_as_many_cores(store: Store) -> None:
    two = changed("hardware", replace(WORKLOAD.hardware, accelerator="cpu", devices=2, cpu_cores=8))
    four = replace(two, hardware=replace(two.hardware, devices=4))
    wider = replace(four, hardware=replace(four.hardware, cpu_cores=16))
    for workload in (two, four, wider):
        store.finish_trial(result_of(store.start_trial(new_study(store, workload), packed_plan(), "search").id))
    assert [len(store.comparable_trials(workload)) for workload in (two, four, wider)] == [2, 1, 2]
