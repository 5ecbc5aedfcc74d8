"""Which study a plan is shown of, its trainings, and who uses it."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.machine import agent as agents
from autotune.machine.hardware import probe_hardware, software
from storage.store import Store, open_store
from tests.programs.users import document
from tests.values.storage import WORKLOAD, best_of, changed, concluded, launch_result, packed_plan
from trials.workload import Workload

PLAN = packed_plan().id


@pytest.fixture
def store(home: Path) -> Store:
    """The user's own database, with a plan that won on two machines elsewhere."""
    store = open_store()
    for workload, name in ((WORKLOAD, "a100"), (changed("hardware.device_name", "NVIDIA H100"), "h100")):
        won(store, workload, name)
    return store


def won(store: Store, workload: Workload, name: str) -> None:
    study = store.create_study(store.add_workload(workload), {"name": name}, seed=0).id
    concluded(store, best_of(study, workload=workload))


def text(*arguments: str) -> str:
    answer = CliRunner().invoke(main, [*arguments, "-q"])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_a_plan_that_a_training_uses_is_listed_with_its_process(store: Store) -> None:
    ours = agents.process(os.getpid())
    assert ours is not None
    assert document("plans", "--in-use")["plans"] == []
    dead = store.add_agent(agents.machine(), "1 1").id
    store.start_launch(packed_plan(), WORKLOAD.fingerprint, None, dead)
    assert document("plans", "--in-use")["plans"] == []
    living = store.add_agent(agents.machine(), ours).id
    store.start_launch(packed_plan(), WORKLOAD.fingerprint, None, living)
    place = f"process {os.getpid()} on {agents.machine().partition(' ')[0]}"
    plans = document("plans", "--in-use", "--hardware", "a100")["plans"]
    assert [plan["used_by"] for plan in plans] == [[place]]
    assert f": running, {place}" in text("show", PLAN)
    assert f"In use: {place}" in text("show", f"{PLAN}@{plans[0]['study_id'][:8]}")
    assert f"{PLAN} is in use: {place}" in text("plans")


def test_of_a_plan_that_several_studies_tried_the_one_of_this_machine_is_shown_with_its_trainings(
    store: Store,
) -> None:
    here = changed("hardware", probe_hardware(), changed("software", software()))
    won(store, here, "here")
    won(store, WORKLOAD, "later and elsewhere")
    ours = agents.process(os.getpid())
    assert ours is not None
    living = store.add_agent(agents.machine(), ours).id
    store.start_launch(packed_plan(), here.fingerprint, None, living)
    store.finish_launch(launch_result(store.start_launch(packed_plan(), WORKLOAD.fingerprint, None).id))
    shown = document("show", PLAN)
    assert (shown["validity"]["verdict"], len(shown["used_by"])) == ("valid", 1)
    assert [bool(launch["changes"]) for launch in shown["launches"]] == [False, True]
    used = {bool(plan["used_by"]): plan["validity"]["verdict"] for plan in document("plans")["plans"]}
    assert used == {True: "valid", False: "invalid"}
    (other,) = {line for line in text("show", PLAN).splitlines() if "on another workload" in line}
    assert f"tiny-internvl on {WORKLOAD.hardware} (hardware.accelerator was cpu, now cuda" in other
    elsewhere = next(study for study in document("studies")["studies"] if study["settings"].get("name") == "a100")
    for name in (f"{PLAN}@{elsewhere['name']}", elsewhere["name"]):
        assert document("show", name)["study_id"] == elsewhere["id"]


def test_a_plan_of_trials_side_by_side_is_compared_with_a_group_of_ranks(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without accelerators groups share the cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    by_parallel = {}
    for parallel in (1, 2):
        group = replace(probe_hardware(2), cpu_cores=4 // parallel)
        here = changed("hardware", group, changed("software", software()))
        study = store.create_study(store.add_workload(here), {"parallel": parallel}, seed=0).id
        concluded(store, best_of(study, workload=here, parallel=parallel))
        by_parallel[parallel] = study
    valid = document("plans", "--verdict", "valid")["plans"]
    assert {plan["parallel"]: plan["study_id"] for plan in valid} == by_parallel
    # The only study of a plan that holds here comes before a newer one that does not.
    moved = changed("hardware.cpu_cores", 3, here)
    newer = store.create_study(store.add_workload(moved), {"parallel": 2}, seed=0).id
    concluded(store, best_of(newer, workload=moved, parallel=2))
    shown = document("show", PLAN)
    assert (shown["validity"]["verdict"], shown["study_id"]) == ("valid", by_parallel[2])
