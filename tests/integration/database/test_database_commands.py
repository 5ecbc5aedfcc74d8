"""What a user sees of the database: plans near and in use, histories, health, bundles."""

import json
import os
import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from autotune.cli import main
from autotune.folders import work_folder
from autotune.machine import agent as agents
from autotune.machine.hardware import probe_hardware, software
from storage.database.url import default_url
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.users import JobFile, document, refusal
from tests.values.data import record, write_records
from tests.values.parameters import parameters
from tests.values.storage import (
    OUTCOMES,
    WORKLOAD,
    best_of,
    changed,
    concluded,
    new_study,
    packed_plan,
    result_of,
)
from trials.workload import Workload

PLAN = packed_plan().id


@pytest.fixture
def store(home: Path) -> Store:
    """The user's own database, with the plans of two workloads that are not of this machine."""
    store = open_store()
    for workload, name in ((WORKLOAD, "a100"), (changed("hardware.device_name", "NVIDIA H100"), "h100")):
        study = store.create_study(store.add_workload(workload), {"name": name}, seed=0).id
        store.finish_trial(result_of(store.start_trial(study, packed_plan(), "default").id))
        store.abandon_trial(store.start_trial(study, packed_plan(3), "sampled").id)
        concluded(store, best_of(study, workload=workload))
    return store


def local(store: Store) -> Workload:
    """A workload of this machine, with a plan."""
    here = probe_hardware()
    workload = changed("hardware", here, changed("software", software()))
    study = store.create_study(store.add_workload(workload), {}, seed=0).id
    concluded(store, best_of(study, workload=workload))
    return workload


def text(*arguments: str | Path) -> str:
    answer = CliRunner().invoke(main, [*map(str, arguments), "-q"])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_where_no_plan_holds_here_the_nearest_are_listed_with_their_differences(store: Store) -> None:
    plans = document("plans", "--here")["plans"]
    assert [plan["validity"]["verdict"] for plan in plans] == ["invalid", "invalid"]
    assert [plan["distance"] for plan in plans] == sorted(plan["distance"] for plan in plans)
    first = [plans[0]["differences"][0][name] for name in ("field", "then", "now", "distance")]
    assert first == ["hardware.accelerator", "cuda", probe_hardware().accelerator, 200.0]
    assert "differs in hardware.accelerator cuda -> " in text("plans", "--here")


def test_a_plan_of_this_machine_hides_those_that_do_not_hold(store: Store) -> None:
    local(store)
    (plan,) = document("plans", "--here")["plans"]
    assert (plan["validity"]["verdict"], plan["distance"], plan["differences"]) == ("valid", 0.0, [])
    assert len(document("plans")["plans"]) == 3


def test_a_plan_of_more_devices_than_a_job_gets_here_is_not_called_valid(store: Store) -> None:
    here = probe_hardware(8)
    workload = changed("hardware", here, changed("software", software()))
    concluded(store, best_of(store.create_study(store.add_workload(workload), {}, seed=0).id, workload=workload))
    (plan,) = document("plans", "--here")["plans"]
    assert plan["validity"]["verdict"] == "re-measure"
    (change,), (difference,) = plan["validity"]["changes"], plan["differences"]
    assert (change["field"], change["then"], change["now"]) == ("hardware.devices", 8, difference["now"])


def test_plans_are_filtered_and_sorted(store: Store) -> None:
    local(store)
    assert len(document("plans", "--verdict", "invalid")["plans"]) == 2
    assert len(document("plans", "--hardware", "h100", "--sort", "gain")["plans"]) == 1
    by_time = [plan["created"] for plan in document("plans", "--sort", "found")["plans"]]
    assert by_time == sorted(by_time, reverse=True)
    assert len(document("plans", "--sort", "speed", "--top", "1")["plans"]) == 1
    assert len(document("plans", "--here", "--verdict", "invalid")["plans"]) == 2
    assert document("plans", "--model", "no-such")["plans"] == []
    answer = CliRunner().invoke(main, ["plans", "--sort", "distance"])
    assert (answer.exit_code, "needs --here, or --like JOB" in answer.stderr) == (2, True)


def test_a_plan_without_a_measured_baseline_has_no_gain_and_comes_last(store: Store) -> None:
    slower = replace(best_of("").baselines[0], gain=0.9)
    for name, baselines in (("V100", ()), ("P100", (slower,))):
        workload = changed("hardware.device_name", name)
        study = store.create_study(store.add_workload(workload), {}, seed=0).id
        concluded(store, best_of(study, workload=workload, baselines=baselines))
    found = [plan["headline"] for plan in document("plans", "--sort", "gain")["plans"]]
    assert [each and each["gain"] for each in found] == [1.25, 1.25, 0.9, None]


def test_plans_like_a_job_are_compared_with_all_of_it(store: Store, job: JobFile) -> None:
    plans = document("plans", "--like", job.path, "--top", "2")["plans"]
    fields = {difference["field"] for difference in plans[0]["differences"]}
    assert {"hardware.accelerator", "model.vision_layers", "data.histogram", "global_batch_samples"} <= fields
    assert not job.output.exists()


def test_studies_are_listed_and_one_is_shown_with_its_trials(store: Store) -> None:
    studies = document("studies")["studies"]
    assert [study["settings"]["name"] for study in studies] == ["h100", "a100"]
    assert {study["best"]["id"] for study in studies} == {PLAN}
    history = document("studies", studies[0]["name"])
    assert [trial["role"] for trial in history["trials"]] == ["default", "sampled"]
    output = text("studies", studies[0]["id"][:8])
    assert "given up" in output
    assert f"Plan {PLAN}" in output
    assert document("studies", "--top", "1")["studies"] == studies[:1]
    code, refused = refusal("studies", "no-such")
    assert (code, "autotune studies" in refused) == (2, True)


@pytest.mark.parametrize(
    "option", [["--model", "Intern"], ["--tag", "ok"], ["--archived"], ["--top", "1"]], ids=" ".join
)
def test_options_of_the_list_of_studies_are_refused_with_one_study(store: Store, option: list[str]) -> None:
    name = document("studies")["studies"][0]["settings"]["name"]
    assert refusal("studies", name, *option) == (
        2,
        f"STUDY names one study; remove it, or {option[0]}, which list several",
    )


def test_a_history_names_the_plan_of_each_trial_and_any_of_them_can_be_shown(store: Store) -> None:
    tie = packed_plan(5)
    study = store.create_study(WORKLOAD.fingerprint, {}, seed=0)
    for plan in (tie, packed_plan(), tie):
        store.finish_trial(result_of(store.start_trial(study.id, plan, "sampled").id))
    store.abandon_trial(store.start_trial(study.id, tie, "confirm").id)
    failed = packed_plan(7)
    store.finish_trial(result_of(store.start_trial(study.id, failed, "sampled").id, OUTCOMES["out of memory"]))
    concluded(store, best_of(study.id, ties=(tie.id,)))
    assert [line.split()[0] for line in text("studies", study.name).splitlines() if " pipeline 2" in line] == [
        *(plan.id for plan in (tie, packed_plan(), tie, tie, failed)),
        "pipeline",  # of the winner
    ]
    shown = document("show", tie.id)
    assert (shown["id"], shown["won"], len(shown["trials"])) == (tie.id, False, 3)
    output = text("show", tie.id[:8])
    assert (
        f"In study {study.name} plan {tie.id} may be as fast as the winner, {PLAN}; measured there in 2 runs" in output
    )
    assert output.count("epoch 1234.5 s") == 2
    assert re.search(r"trial 3 +confirm +given up", output)
    assert "no run of it was completed there: failed: out of memory on stage 1" in text("show", failed.id)
    assert document("show", PLAN)["won"]


@pytest.mark.usefixtures("devices_in_use")
def test_the_doctor_reports_problems_and_the_data_of_a_job(store: Store, job: JobFile) -> None:
    assert document("doctor")["findings"] == []
    assert document("doctor")["database"]["name"] == str(default_url())
    dead = store.add_agent(agents.machine(), "1 1").id
    study = store.create_study(WORKLOAD.fingerprint, {}, seed=0)
    store.start_trial(study.id, packed_plan(), "default", agent_id=dead)
    store.start_launch(packed_plan(), WORKLOAD.fingerprint, None, dead)
    found = document("doctor", job.path)
    assert found["data"]["samples"] > 0
    output = " ".join(finding["what"] for finding in found["findings"])
    assert all(
        part in output for part in ("died without ending its work", f"trial 0 of {study.name}", "has no recorded end")
    )
    assert "problem  " in text("doctor")


def test_the_doctor_names_the_model_of_a_trial_that_another_folder_of_its_architecture_came_before(
    store: Store,
) -> None:
    dead = store.add_agent(agents.machine(), "1 1").id
    settings = {"model": "/models/mine"}
    study = store.create_study(WORKLOAD.fingerprint, settings, seed=0, model_name="mine")
    store.start_trial(study.id, packed_plan(), "default", agent_id=dead)
    (found,) = (each for each in document("doctor")["findings"] if "trial 0" in each["what"])
    assert f"trial 0 of mine-{study.id[:8]}, begun" in found["what"]
    assert found["remedy"].startswith(
        "nothing to do: the next `autotune tune JOB` gives it up, and with its job with model.path /models/mine cont"
    )
    (listed,) = (each for each in document("studies")["studies"] if each["id"] == study.id)
    assert listed["workload"]["model"]["name"] == "mine"
    assert "\nmine-" in text("studies", study.name)


def test_the_doctor_names_a_work_folder_that_has_become_large(store: Store) -> None:
    folder = work_folder(default_url())
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "index-0123456789abcdef.npz").open("wb") as file:
        file.truncate(1 << 29)
    assert document("doctor")["findings"] == []
    with (folder / "index-fedcba9876543210.npz").open("wb") as file:
        file.truncate(1 << 30)
    (finding,) = document("doctor")["findings"]
    assert finding["what"] == f"indexes of data and files of ranks in {folder}: 1.5 GiB"
    assert "delete all but `spool` and `certificates` there" in finding["remedy"]


def test_the_doctor_counts_what_is_stored(home: Path) -> None:
    with open_store() as store:
        store.create_study(store.add_workload(WORKLOAD), {}, seed=0)
    assert ": 1 study (1 unfinished, 0 imported, 0 archived), 0 best plans" in text("doctor")
    assert "An unfinished search goes on with its `autotune tune JOB`" in text("studies")
    with open_store() as store:
        best = concluded(store, best_of(new_study(store)))
        store.archive_studies([best.study_id])
    assert ": 2 studies (1 unfinished, 0 imported, 1 archived), 1 best plan" in text("doctor")


@pytest.mark.usefixtures("devices_in_use")
def test_the_doctor_names_lines_that_cannot_be_used_even_where_only_results_are_shown(
    job: JobFile, tmp_path: Path
) -> None:
    Image.new("RGB", (28, 28)).save(tmp_path / "here.png")
    shown = record("What?", "A box.", image="here.png")
    path = write_records(tmp_path / "train.jsonl", shown, record("Who?", "Ada.", image="gone.jpg"))
    job.spoil(data__sources=[{"path": str(path)}], training__global_batch_samples=1)
    found = document("doctor", job.path, "-q")
    assert (found["data"]["samples"], found["data"]["skipped_lines"]) == (1, 1)
    finding, _ = found["findings"]
    gone = f"{path}:2: image {tmp_path / 'gone.jpg'} does not exist"
    assert finding["what"] == f"1 of 2 dataset lines cannot be used, the first is {gone}"
    assert "`images`" in finding["remedy"]


@pytest.mark.usefixtures("devices_in_use")
def test_the_doctor_warns_once_of_a_job_with_more_ranks_than_cores(
    job: JobFile, caplog: pytest.LogCaptureFixture
) -> None:
    cores = len(os.sched_getaffinity(0))
    job.spoil(hardware={"devices": cores + 1})
    answer = CliRunner().invoke(main, ["doctor", str(job.path)])
    assert f"{cores + 1} CPU ranks (" in answer.stdout
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        f"{cores + 1} ranks share {cores} CPU cores"
    ]


def test_databases_are_named_by_their_urls_and_copies_by_what_they_are(store: Store) -> None:
    assert text("db", "upgrade") == f"{store.masked_url} has the tables of revision {store.revision}.\n"
    repaired = text("db", "repair")
    assert re.fullmatch(r"Repaired\. Copy from before the repair: \S+\.before-repair-\w+, .*\n", repaired)


def test_the_doctor_reports_agents_that_have_been_silent_for_long(store: Store) -> None:
    agent = store.add_agent("far-away boot", "12 3").id
    store.start_launch(packed_plan(), WORKLOAD.fingerprint, None, agent)
    assert document("doctor")["findings"] == []
    with sqlite3.connect(default_url().removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE autotune_agent SET heard = '2026-01-01 00:00:00'")
    (finding,) = document("doctor")["findings"]
    assert re.fullmatch(
        r"process 12 on far-away, silent for \d+ min: this host cannot check whether it still runs",
        finding["what"],
    )
    assert "process 12 on far-away, silent for" in text("plans", "--in-use")


def test_the_doctor_looks_at_the_rest_where_the_database_cannot_be_used(home: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_text("remember the milk\n" * 1000)
    answer = CliRunner().invoke(main, ["doctor", "--json", "--db", f"sqlite:///{tmp_path}/notes.db"])
    assert answer.exit_code == 4
    found = json.loads(answer.stdout)
    assert (found["hardware"]["devices"] >= 1, found["database"]) == (True, None)
    assert "not a database" in answer.stderr


SPOILED = {
    "no plans": "DELETE FROM autotune_plan",
    "no samples": "UPDATE autotune_data_profile SET samples = 0",
    "too many devices": "UPDATE autotune_hardware SET devices = 1e300",
    "settings of nonsense": "UPDATE autotune_study SET settings = 'x'",
    "no table": "DROP TABLE autotune_best_plan",
    "no column": "ALTER TABLE autotune_trial RENAME COLUMN role TO part",
}


@pytest.mark.parametrize("spoil", parameters(SPOILED, short=("no plans", "too many devices", "no table")))
def test_every_command_reports_invalid_rows_in_one_message(store: Store, spoil: str) -> None:
    study = store.studies()[0].id
    store.close()
    with sqlite3.connect(default_url().removeprefix("sqlite:///")) as connection:
        connection.execute(spoil)
    for command in (["plans"], ["plans", "--here"], ["studies"], ["studies", study], ["show", PLAN], ["doctor"]):
        answer = CliRunner().invoke(main, command)
        assert answer.exception is None or isinstance(answer.exception, SystemExit), (command, answer.exception)
        assert answer.exit_code in (0, 2, 4), (command, answer.output)
        assert "Traceback" not in answer.output
    for command, codes in ((["db", "check"], (1, 4)), (["db", "repair"], (0, 4)), (["db", "check"], (0, 4))):
        answer = CliRunner().invoke(main, command)
        assert answer.exit_code in codes, (command, answer.output, answer.exception)


@pytest.mark.parametrize(
    "arguments", [["studies", "\udcff"], ["show", "\udcff"], ["db", "export", "--study", "\udcff"]], ids=" ".join
)
def test_a_name_that_is_no_text_is_unknown(store: Store, arguments: list[str]) -> None:
    code, output = refusal(*arguments)
    assert (code, "is no text" in output) == (2, True), output


def test_a_name_that_no_file_can_have_is_refused(store: Store, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    for arguments in (
        ["db", "import", f"{long}.jsonl"],
        ["db", "repair", "--db", f"sqlite:///{long}.db"],
        ["db", "export", "--hardware", "a100", "--out", f"{long}.jsonl"],
    ):
        code, output = refusal(*arguments)
        assert code in (1, 2, 4)
        assert "name too long" in output.lower()


def test_numbers_beyond_the_database_are_refused(store: Store) -> None:
    for command in ("plans", "studies"):
        answer = CliRunner().invoke(main, [command, "--top", "9" * 20])
        assert answer.exit_code == 2
        assert "--top" in answer.output


def test_the_doctor_reports_results_that_wait_in_the_spool(store: Store, home: Path) -> None:
    folder = work_folder(default_url()) / "spool"
    Spool(folder).put(result_of("0" * 32))
    (folder / "x.bad").touch()
    (folder / ".y.partial").touch()
    assert len(document("doctor")["findings"]) == 3


def test_a_bundle_goes_from_one_database_to_another(store: Store, tmp_path: Path) -> None:
    bundle, there = tmp_path / "bundle.jsonl", f"sqlite:///{tmp_path / 'there.db'}"
    done = document("db", "export", "--hardware", "a100", "--out", bundle)
    assert done["studies"] == [study.id for study in store.studies() if study.settings["name"] == "a100"]
    assert document("db", "import", bundle, "--db", there)["new"] > 0
    assert document("db", "import", bundle, "--db", there)["new"] == 0
    (plan,) = document("plans", "--db", there)["plans"]
    assert plan["imported_from"].endswith(": autotune.db")
    assert document("db", "check", "--db", there)["problems"] == []
    printed = CliRunner().invoke(main, ["db", "export", "--study", done["studies"][0]]).stdout
    header, *rows = printed.splitlines()
    assert json.loads(header)["format"] == "autotune-bundle"
    assert rows[:-1] == bundle.read_text().splitlines()[1:-1]


def test_exports_and_imports_that_cannot_be_done_are_refused(store: Store, tmp_path: Path) -> None:
    for arguments, expected, output in (
        (["db", "export", "--hardware", "no-such"], 2, "no finished study ran on 'no-such'"),
        (["db", "export", "--study", "no-such"], 2, "begins with 'no-such'"),
        (["db", "export", "--study", "tiny"], 2, "several studies begin with 'tiny'"),
        (["db", "import", str(tmp_path)], 2, "autotune db export"),
        (["db", "repair", "--db", f"sqlite:///{tmp_path / 'none.db'}"], 4, "no database"),
    ):
        code, refused = refusal(*arguments)
        assert (code, output in refused) == (expected, True), refused
    assert refusal("db", "export") == (2, "name what to export: --study STUDY, --hardware NAME, or --all")


def test_a_check_that_finds_something_exits_with_1_after_its_result(store: Store) -> None:
    with sqlite3.connect(default_url().removeprefix("sqlite:///")) as connection:
        connection.execute("DELETE FROM autotune_best_plan WHERE rowid = 1")
    answer = CliRunner().invoke(main, ["db", "check", "--json"])
    assert answer.exit_code == 1
    assert len(json.loads(answer.stdout)["problems"]) == 1
    assert "autotune db repair" in answer.stderr
    store.close()
    document("db", "repair")
    assert document("db", "check")["problems"] == []


def test_a_database_that_a_process_works_with_is_not_repaired(store: Store) -> None:
    ours = agents.process(os.getpid())
    assert ours is not None
    agent = store.add_agent(agents.machine(), ours).id
    code, refused = refusal("db", "repair")
    assert (code, f"process {os.getpid()} on " in refused) == (6, True)
    store.end_agent(agent)
    document("db", "repair")


def test_the_tables_are_made_or_found(home: Path) -> None:
    assert document("db", "upgrade") == document("db", "upgrade")
