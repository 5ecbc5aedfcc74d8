"""Two plans side by side, from a database alone."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from autotune.cli import main
from storage.baseline import Baseline
from storage.store import Store, open_store
from tests.values.storage import (
    EXPLANATION,
    OUTCOMES,
    PADDED_PLAN,
    WORKLOAD,
    best_of,
    changed,
    concluded,
    new_study,
    packed_plan,
    result_of,
)
from trials.units import speed_text
from trials.workload import Workload

H100 = changed("hardware.device_name", "NVIDIA H100")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study here, one on other hardware that the same plan won twice as fast, and one on other data: only read it."""
    path = tmp_path_factory.mktemp("known") / "known.db"
    with open_store(f"sqlite:///{path}") as store:
        add(store, WORKLOAD, 100.0)
        add(store, H100, 50.0)
        add(store, changed("data.samples", 2000), 100.0, plan=packed_plan(3))
        study = store.studies()[0].id
        store.finish_trial(result_of(store.start_trial(study, packed_plan(40), "sampled").id, OUTCOMES["crash"]))
    return path


@pytest.fixture(scope="module")
def url(known: Path) -> str:
    return f"sqlite:///{known}"


@pytest.fixture
def own_url(known: Path, tmp_path: Path) -> str:
    """A copy, which a test may change."""
    return f"sqlite:///{shutil.copy(known, tmp_path)}"


def add(store: Store, workload: Workload, epoch_seconds: float, **fields: Any) -> None:
    study = new_study(store, workload)
    winner = fields.get("plan", packed_plan())
    for plan, seconds in ((winner, epoch_seconds), (PADDED_PLAN, 200.0)):
        trial = store.start_trial(study, plan, "default")
        store.finish_trial(replace(result_of(trial.id), epoch_seconds=seconds, epoch_seconds_error=seconds / 100))
    samples = workload.data.samples
    given = {
        "epoch_seconds": epoch_seconds,
        "estimated_samples_per_second": samples / epoch_seconds,
        "explanation": EXPLANATION,
    }
    concluded(store, best_of(study, workload=workload, estimated_samples_per_second_error=0.2, **given, **fields))


def name_of(url: str, workload: Workload) -> str:
    with open_store(url) as store:
        return next(study.name for study in store.studies() if study.workload_fingerprint == workload.fingerprint)


def asked(url: str, *plans: str) -> Result:
    return CliRunner().invoke(main, ["compare", *plans, "--db", url])


def text(url: str, *plans: str) -> str:
    answer = asked(url, *plans)
    assert answer.exit_code == 0, answer.stderr
    return answer.stdout


def columns(shown: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the entries of both plans by their rows, each in one line."""
    header, _, *lines = shown.strip("\n").splitlines()
    first, second = (match.start() for match in re.finditer(r"\S+", header))
    entries: tuple[dict[str, str], dict[str, str]] = {}, {}
    name = ""
    for line in lines:
        name = line[:first].strip() or name
        for column, part in zip(entries, (line[first:second], line[second:]), strict=True):
            column[name] = f"{column.get(name, '')} {part.strip()}".strip()
    return entries


def test_the_winner_and_the_usual_settings_are_compared_by_all_that_is_known(url: str) -> None:
    here = name_of(url, WORKLOAD)
    shown = text(url, f"{PADDED_PLAN.id[:6]}@{here}", here)
    plans, _, times = shown.partition("Where the time of an epoch goes:")
    usual, best = columns(plans)
    assert max(map(len, plans.splitlines())) <= 120
    assert "2 samples, padded" in usual["packing"]
    assert "Qv 9" in best["packing"]
    assert "pipeline 1 x data 8, ZeRO 3" in usual["layout"]
    assert "pipeline 2 x data 4, ZeRO 1" in best["layout"]
    assert best["recompute"] == "1v+0l | 0v+0l"
    (padding,) = (line for line in times.splitlines() if line.startswith("padding"))
    assert padding.split() == ["padding", "30.0%", "+-", "3.0%", "0.0%", "+-", "0.0%"]
    assert "may be as fast as the winner" in usual["known"]
    assert f"found plan {packed_plan().id} to be the fastest" in best["known"]
    assert shown.count("in a mean step:") == 2
    assert f"{packed_plan().id} is 2.00 +- 0.0" in shown
    assert "different workloads" not in shown


def test_the_gain_over_a_baseline_is_the_one_that_the_study_states(own_url: str) -> None:
    workload = changed("data.samples", 2500)
    baseline = Baseline(
        role="default",
        estimated_samples_per_second=12.5,
        estimated_samples_per_second_error=0.5,
        gain=2.0,
        gain_error=0.03,
        plan_id=PADDED_PLAN.id,
    )
    with open_store(own_url) as store:
        add(store, workload, 100.0, baselines=(baseline,))
    study = name_of(own_url, workload)
    pair = f"{PADDED_PLAN.id}@{study}", study
    assert f"{packed_plan().id} is 2.00 +- 0.03 times as fast as {PADDED_PLAN.id}" in text(own_url, *pair)
    assert f"{PADDED_PLAN.id} is 0.50 +- 0.01 times as fast as {packed_plan().id}" in text(own_url, *reversed(pair))


def test_a_baseline_has_the_speed_with_which_the_winner_was_compared(own_url: str) -> None:
    with open_store(own_url) as store:
        study = next(study for study in store.studies() if study.workload_fingerprint == WORKLOAD.fingerprint).id
        slow = store.start_trial(study, PADDED_PLAN, "confirm")
        store.finish_trial(replace(result_of(slow.id), epoch_seconds=400.0))
    here = name_of(own_url, WORKLOAD)
    shown = text(own_url, f"{PADDED_PLAN.id[:6]}@{here}", here)
    (epochs,) = (line for line in shown.splitlines() if line.startswith("epoch s"))
    assert epochs.split() == ["epoch", "s", "200.0", "100.0"]  # 300.0 is the mean of its runs
    assert f"{packed_plan().id} is 2.00 +- " in shown


def test_a_speed_that_the_study_did_not_correct_for_drift_says_so(own_url: str) -> None:
    sampled, here = packed_plan(50), name_of(own_url, WORKLOAD)
    with open_store(own_url) as store:
        study = next(study for study in store.studies() if study.workload_fingerprint == WORKLOAD.fingerprint).id
        store.finish_trial(result_of(store.start_trial(study, sampled, "sampled").id))
    shown = text(own_url, here, sampled.id)
    assert f"\nNot corrected for drift of the machine, which the +- leaves out: {sampled.id}\n" in shown
    best, other = columns(shown.partition("Where the time")[0])
    assert other["known"].endswith(
        "measured there in one run only; its speed is not corrected for drift of the machine"
    )
    assert "drift" not in best["known"]


@pytest.mark.parametrize(
    ("field", "value"), [("data.lengths_digest", "of another order"), ("data.target_tokens", 5_000_000)]
)
def test_speeds_on_the_same_samples_are_compared(field: str, value: object, own_url: str) -> None:
    other = changed(field, value)
    with open_store(own_url) as store:
        add(store, other, 50.0)
    shown = text(own_url, name_of(own_url, WORKLOAD), name_of(own_url, other))
    assert f"{packed_plan().id}@{name_of(own_url, other)} is 2.00 +- " in shown


def test_one_plan_on_other_hardware_is_compared_and_the_difference_named(url: str) -> None:
    here, there = name_of(url, WORKLOAD), name_of(url, H100)
    shown = text(url, here, f"{packed_plan().id[:8]}@{there}")
    (verdict,) = (line for line in shown.splitlines() if "times as fast" in line)
    assert verdict.startswith(f"{packed_plan().id}@{there} is 2.00 +- 0.0")
    assert verdict.endswith(f" times as fast as {packed_plan().id}@{here}")
    assert "Measured on different workloads: hardware.device_name" in shown


def test_compiled_layers_are_compared_with_layers_as_they_are(own_url: str) -> None:
    compiled = changed("model.compiler", "inductor")
    with open_store(own_url) as store:
        add(store, compiled, 80.0)
    shown = text(own_url, name_of(own_url, WORKLOAD), name_of(own_url, compiled))
    assert f"{packed_plan().id}@{name_of(own_url, compiled)} is 1.25 +- 0.0" in shown
    assert "Measured on different workloads: model.compiler" in shown


def test_speeds_on_other_data_are_not_compared(url: str) -> None:
    shown = text(url, name_of(url, WORKLOAD), packed_plan(3).id)
    assert "Their samples/s are not comparable" in shown
    assert "times as fast" not in shown


def test_a_plan_without_a_measurement_is_shown_as_such(url: str) -> None:
    shown = text(url, packed_plan(40).id, name_of(url, WORKLOAD))
    failed, _ = columns(shown.partition("Where the time")[0])
    assert "no run of it was completed there: failed: rank 3 failed" in failed["known"]
    assert "One of the plans has no measured speed" in shown
    assert re.search(r"^useful work +unknown +[\d.]+% \+- ", shown, re.MULTILINE)
    assert "\npadding " not in shown


def test_plans_that_one_study_tried_are_compared_in_it(url: str) -> None:
    """The padded plan was also tried elsewhere, later."""
    (study,) = {
        plan["study"] for plan in json.loads(asked(url, PADDED_PLAN.id, packed_plan(3).id, "--json").stdout)["plans"]
    }
    assert study == name_of(url, changed("data.samples", 2000))


def test_a_program_gets_the_same(url: str) -> None:
    answer = asked(url, PADDED_PLAN.id, packed_plan().id, "--json")
    document = json.loads(answer.stdout)
    one, other = document["plans"]
    assert (one["id"], one["won"], other["won"]) == (PADDED_PLAN.id, False, True)
    assert one["time"]["role"] == "default"
    assert [stage["peak_bytes"] for stage in other["stages"]] == [60 << 30, 61 << 30]
    speeds = [plan["estimated_samples_per_second"] for plan in (one, other)]
    assert speeds[1] / speeds[0] == pytest.approx(document["speed_ratio"]["mean"])
    assert all(plan["estimated_samples_per_second_error"] > 0 for plan in (one, other))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("feed", "no plan begins with 'feed'"),
        (f"{packed_plan(40).id}@tiny-internvl", "several studies begin with"),
        (f"{PADDED_PLAN.id}@nowhere", "no study has a name or id that begins with 'nowhere'"),
        (packed_plan().id[:6], f"are one plan, {packed_plan().id}@"),
    ],
)
def test_a_second_plan_that_cannot_be_compared_is_refused(url: str, plan: str, message: str) -> None:
    answer = asked(url, packed_plan().id, plan)
    assert answer.exit_code == 2
    assert message in answer.stderr


def test_a_study_that_did_not_try_the_plan_is_named(url: str) -> None:
    answer = asked(url, packed_plan().id, f"{packed_plan(40).id}@{name_of(url, WORKLOAD)}")
    assert answer.exit_code == 2
    assert "did not try plan" in answer.stderr


def test_a_later_search_that_a_plan_won_is_named(tmp_path: Path) -> None:
    """The first search tried both plans, the second one only its winner."""
    url, later = f"sqlite:///{tmp_path / 'own.db'}", packed_plan(3)
    with open_store(url) as store:
        add(store, WORKLOAD, 100.0)
        first = store.studies()[0]
        store.finish_trial(result_of(store.start_trial(first.id, later, "sampled").id))
        add(store, WORKLOAD, 90.0, plan=later)
        second = next(study for study in store.studies() if study.id != first.id)
        speed = speed_text(WORKLOAD.data.samples / 90.0, 0.2)
    shown = text(url, packed_plan().id, later.id)
    assert (
        f"{later.id} also won study {second.name}, with {speed} samples/s; name it {later.id}@{second.name} to" in shown
    )
    document = json.loads(asked(url, packed_plan().id, later.id, "--json").stdout)
    assert [each["study"] for each in document["plans"]] == [first.name, first.name]
    assert document["won_elsewhere"] == [f"{later.id}@{second.name}"]
    assert "also won" not in text(url, packed_plan().id, f"{later.id}@{second.name}")
