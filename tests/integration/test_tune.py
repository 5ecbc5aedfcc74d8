"""The command line with real trials: tune, tune again, be killed, look up, and launch."""

import ipaddress
import json
import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner

from autotune import tune
from autotune.certification import certify
from autotune.certification.certificate import certificate_path, stored_certificates, write_certificate
from autotune.cli import main
from autotune.events import Event, TrialBegan, TrialEnded
from autotune.folders import certificates_folder, work_folder
from autotune.search.roles import CONFIRMATION, REPEATS
from tests.programs import postgres
from tests.programs.dashboards import ask, attributes, dashboard
from tests.programs.processes import children, have_ended, wait_for, wait_for_the_end
from tests.programs.tuning_user import User
from tests.values.training import plan_of
from trials import wire
from trials.plan import Plan

pytestmark = pytest.mark.ranks

FINISHED = """
    SELECT trial.id, trial.plan_id, trial.role, outcome.kind
    FROM autotune_trial AS trial JOIN autotune_outcome AS outcome ON outcome.trial_id = trial.id
"""


@pytest.fixture(scope="module")
def user(shallow: Path, tmp_path_factory: pytest.TempPathFactory, give_profile: Callable[..., None]) -> User:
    """A user who has tuned once; the tests below continue from there, in order."""
    user = User(shallow, tmp_path_factory.mktemp("user"))
    give_profile(user.url, example=shallow)
    user.first, _ = user.run("tune", str(user.job))
    return user


@pytest.mark.long
def test_the_dashboard_shows_the_winner_the_machine_and_the_times_and_causes_of_trials(user: User) -> None:
    stored = {row[0]: row[1:] for row in user.rows("SELECT id, role, started, finished FROM autotune_trial")}
    with dashboard(user.url) as address:
        (summary,) = ask(f"{address}/api/studies")["study_summaries"]
        study = ask(f"{address}/api/studies/{summary['study_id']}?after=0")
    described = attributes(study)
    assert study["objective_names"] == ["epoch seconds"]
    assert (described["winner"], described["model"]) == (user.first["id"], user.first["workload"]["model"]["name"])
    assert described["hardware"].startswith("2 CPU ranks")
    shown = {attributes(each)["trial_id"]: each for each in study["trials"]}
    assert shown.keys() == stored.keys()
    for identity, (role, started, finished) in stored.items():
        each = shown[identity]
        assert attributes(each)["role"] == role
        assert abs(local_time(each["datetime_complete"]) - utc_time(finished)) < timedelta(seconds=5)
        if role != "sampled":  # Optuna times its own suggestions
            assert (local_time(each["datetime_start"]), local_time(each["datetime_complete"])) == (
                utc_time(started),
                utc_time(finished),
            )
    failed = [attributes(each) for each in shown.values() if each["constraints"] != [0.0]]
    assert all(each["outcome"] in ("rejected", "out-of-memory") and each["cause"] for each in failed)


def local_time(text: str) -> datetime:
    """Return a time of Optuna, which stores no zone."""
    return datetime.fromisoformat(text).astimezone(UTC)


def utc_time(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def test_the_baselines_are_tried_and_the_winner_is_compared_with_them(user: User) -> None:
    roles = [role for _, _, role, _ in user.rows(FINISHED + " ORDER BY trial.number")]
    assert [role for role in roles if role != "predicted"][:3] == ["packed", "default", "omnibal"]
    assert {"confirm", "final"} <= set(roles)
    baselines = {baseline["role"]: baseline for baseline in user.first["baselines"]}
    shortened = user.rows(FINISHED + " WHERE outcome.document LIKE '%\"shortened\":true%'")
    assert {"default", "omnibal"} <= {*baselines, *(role for _, _, role, _ in shortened)}
    speeds = {role: baseline["estimated_samples_per_second"] for role, baseline in baselines.items()}
    gains = {role: baseline["gain"] for role, baseline in baselines.items()}
    assert gains == pytest.approx(
        {role: user.first["estimated_samples_per_second"] / speed for role, speed in speeds.items()}
    )


def test_tuning_again_starts_no_trial_and_the_function_that_tunes_prints_nothing(
    user: User, capfd: pytest.CaptureFixture[str]
) -> None:
    before = user.rows(FINISHED)
    heard: list[Event] = []
    with user.environment():
        best = tune(user.job, listener=heard.append)
    assert capfd.readouterr() == ("", "")
    assert user.rows(FINISHED) == before
    assert best.plan.id == user.first["id"] in {plan for _, plan, _, _ in before}
    assert heard
    assert not any(isinstance(event, TrialBegan | TrialEnded) for event in heard)


@pytest.mark.long
def test_a_larger_budget_runs_only_what_is_not_answered_yet(user: User, capfd: pytest.CaptureFixture[str]) -> None:
    before = {plan for _, plan, role, kind in user.rows(FINISHED) if kind == "completed"}
    ids = {identity for identity, *_ in user.rows(FINISHED)}
    heard: list[Event] = []
    with user.environment():
        best = tune(user.job, trials=5, listener=heard.append)  # as the command does
    assert capfd.readouterr() == ("", "")
    assert best.plan.id in {plan for _, plan, _, _ in user.rows(FINISHED)}
    assert any(isinstance(event, TrialEnded) and not event.is_known for event in heard)
    new = [row for row in user.rows(FINISHED) if row[0] not in ids]
    assert not [plan for _, plan, role, _ in new if role not in REPEATS and plan in before]
    assert len(user.rows("SELECT id FROM autotune_study")) == 2


@pytest.mark.long
def test_fresh_measures_again_and_begins_with_what_is_queued(user: User) -> None:
    before = user.rows(FINISHED)
    (user.job.parent / "mine.json").write_text(json.dumps(user.run("show", user.first["id"])[0]))
    long = ("--set", "search.time_limit=10min")  # else other work decides how many baselines run
    user.run("tune", str(user.job), "--fresh", "--trials", "4", *long, "--set", "search.queue=[mine.json]")
    assert len(user.rows(FINISHED)) >= len(before) + 5
    study = user.rows("SELECT id FROM autotune_study ORDER BY started DESC")[0][0]
    tried = user.rows(f"SELECT role, plan_id FROM autotune_trial WHERE study_id = '{study}' ORDER BY number")
    assert tried[0] == ("queued", user.first["id"])
    # A baseline that is the queued plan is not tried twice; others may be other plans, by another profile.
    queued = {role for _, plan, role, _ in before if plan == user.first["id"]}
    assert {"default", "omnibal"} <= queued | {role for role, _ in tried}
    assert "confirm" in {role for role, _ in tried}


def test_plans_and_show_answer_from_the_database(user: User) -> None:
    plans, _ = user.run("plans", "--here")
    best = plans["plans"][0]
    assert best["validity"]["verdict"] == "valid"
    shown, _ = user.run("show", best["id"][:8])
    assert shown["id"] == best["id"]
    assert {"completed"} == {trial["result"]["outcome"]["kind"] for trial in shown["trials"]}
    assert shown["trials"][0]["result"]["outcome"]["measurement"]["stages"]


def test_every_plan_that_was_tried_is_found_by_its_id_with_how_well_it_is_known(user: User) -> None:
    kinds: set[str] = set()
    for (plan,) in user.rows("SELECT DISTINCT plan_id FROM autotune_trial"):
        shown, _ = user.run("show", plan[:8])
        assert shown["id"] == plan
        kind, *_ = re.findall("measured|no run of it was completed", shown["known"])
        if kind in kinds:
            continue
        kinds.add(kind)
        predicted, output = user.run("predict", str(user.job), "--plan", plan[:8])
        assert predicted["plans"][0]["id"] == plan
        assert shown["known"] in output


def test_a_tuning_explains_why_its_plan_won(user: User) -> None:
    why = user.first["explanation"]
    best, *others = why["plans"]
    assert (best["plan"], best["role"]) == (user.first["plan"], "best")
    assert why["usual"] == user.first["headline"]["over"] in {plan["role"] for plan in others}
    for plan in why["plans"]:
        assert sum(part["seconds"] for part in plan["parts"]) == pytest.approx(plan["epoch_seconds"])
    default = next(plan for plan in others if plan["role"] == "default")
    parts = {part["name"]: part["seconds"] for part in default["parts"]}
    assert min(parts["ideal"], parts["padding"], parts["recompute"]) > 0
    assert {change["change"] for change in why["changes"]} <= {"packing", "split", "recompute"}
    identity = wire.decode(Plan, json.dumps(default["plan"])).id
    with user.environment():
        shown = CliRunner().invoke(main, ["show", identity])
        compared = CliRunner().invoke(main, ["compare", identity[:8], user.first["id"][:8]])
    assert "of which" in shown.stdout.partition("an epoch takes")[2]
    assert "Where the time of an epoch goes" in compared.stdout


def test_the_optuna_study_holds_the_same_trials(user: User) -> None:
    names = {name for (name,) in user.rows("SELECT name FROM autotune_study")}
    assert {name for (name,) in user.rows("SELECT study_name FROM studies")} == names
    states = Counter(state for (state,) in user.rows("SELECT state FROM trials"))
    assert not states["RUNNING"]
    parameters = {name for (name,) in user.rows("SELECT DISTINCT param_name FROM trial_params")}
    assert {"layout", "packer", "qv", "qt", "qv_slack", "qt_slack", "boundary_0", "recompute_vision_0"} <= parameters


def test_a_tuning_ends_with_a_certificate(user: User) -> None:
    certificate = user.first["certificate"]
    assert (certificate["verdict"], certificate["subject"]["plan"]) == ("holds", user.first["id"])
    assert certificate["comparison"]["epoch"]["samples"] == 24
    shown, _ = user.run("show", user.first["id"])
    assert certificate in shown["certificates"]


def test_a_stored_certificate_that_does_not_hold_is_heeded(user: User, caplog: pytest.LogCaptureFixture) -> None:
    reasons = ("the gradient of vision differs by 0.5",)
    with user.environment():
        folder = certificates_folder(work_folder(None))
    (held,) = stored_certificates(folder, user.first["id"])
    subject = held.subject
    # A faster baseline may be trained in place of the winner.
    subjects = [replace(subject, plan=plan) for plan in {plan for _, plan, _, _ in user.rows(FINISHED)}]
    paths = [certificate_path(folder, each.plan, each.workload) for each in subjects]
    for path, each in zip(paths, subjects, strict=True):
        write_certificate(path, replace(held, subject=each, verdict="does not hold", reasons=reasons))
    try:
        with user.environment():
            refused = CliRunner().invoke(main, ["run", str(user.job)])
        user.run("launch", str(user.job), "--dry-run")
    finally:
        for path in paths:
            path.unlink()
        write_certificate(certificate_path(folder, subject.plan, subject.workload), held)
    assert refused.exit_code == 3
    assert f"does not hold, so nothing was trained: {reasons[0]}" in refused.stderr
    assert not user.output.exists()
    assert f"does not hold: {reasons[0]}; `autotune show" in caplog.text


@pytest.mark.long
def test_a_plan_whose_certificate_does_not_hold_is_not_trained(
    user: User, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(certify, "faults", lambda *_: ("the gradient of vision differs by 0.5",))
    with user.environment():
        answer = CliRunner().invoke(main, ["launch", str(user.job), "--certify"])
    assert answer.exit_code == 3
    assert "does not hold, so nothing was trained: the gradient of vision differs by 0.5" in answer.stderr
    assert not user.output.exists()
    (plan,) = re.findall("the certificate of plan ([0-9a-f]{16})", answer.stderr)
    with user.environment():
        stored = stored_certificates(certificates_folder(work_folder(None)), plan)
    assert stored[0].verdict == "does not hold"
    with user.environment():
        answer = CliRunner().invoke(main, ["run", str(user.job)])
    assert (answer.exit_code, user.output.exists()) == (3, False)
    # Another plan may win, whose own one holds.
    monkeypatch.setattr("autotune.library.tune.known_certificate", lambda *_: stored[0])
    again, _ = user.run("tune", str(user.job))
    assert again["certificate"]["verdict"] == "does not hold"
    assert "does not hold: the gradient of vision differs by 0.5" in caplog.text


def test_launch_trains_with_the_best_plan_and_compares_the_speed_and_another_plan_continues(
    user: User, shallow: Path, tmp_path: Path
) -> None:
    other = User(shallow, tmp_path)  # the same job with an output folder that is still empty
    other.homes = user.homes
    begun, output = other.run("launch", str(other.job), "--steps", "2", "--certify")
    assert not begun["finished"]
    assert "to be the fastest; measured" in output
    assert "disturbance" in begun  # whether other programs ran is not known here
    assert min(begun[f"{name}_samples_per_second"] for name in ("training", "promised")) > 0 < begun["data_wait_share"]
    certificate = json.loads((other.output / "certificate.json").read_text())
    assert (certificate["verdict"], certificate["subject"]["plan"]) == ("holds", begun["plan"])
    best = {begun["plan"], user.first["id"]}  # a faster baseline may be trained in place of the winner
    plan = next(plan for _, plan, _, kind in user.rows(FINISHED) if kind == "completed" and plan not in best)
    for options in ([], ["--dry-run"]):
        with user.environment():
            refused = CliRunner().invoke(main, ["launch", str(other.job), "--plan", plan, *options])
        assert refused.exit_code == 2
        remedies = f"as by `--plan {begun['plan']}`, or change its plan with `--resume-with {plan}`"
        assert f"go back to those settings, {remedies}" in refused.stderr
    done, output = other.run("launch", str(other.job), "--resume-with", plan[:10])
    assert (done["plan"], done["finished"]) == (plan, True)
    assert not (other.output / "certificate.json").exists()  # it was that of the plan before
    assert (other.output / "model" / "model.safetensors.index.json").is_file()
    assert f"step {done['steps']}/{done['steps']}" in output
    shown, _ = user.run("show", begun["plan"])
    assert shown["launches"][0]["result"]["status"] == "paused"
    shown, _ = user.run("show", plan)
    assert shown["launches"][0]["result"]["status"] == "finished"
    own, said = other.run("launch", str(other.job), "--dry-run")  # the winner is another plan, as after a later search
    assert f"The training goes on with its plan {plan}, not with " in said
    assert own["commands"]
    with user.environment():
        ran = CliRunner().invoke(main, ["run", str(other.job)])
    assert f"The training goes on with its plan {plan}, not with " in ran.stderr
    assert "gain of best" not in ran.stdout  # the table of a plan that is not trained with
    samples = [json.loads(line)["samples"] for line in (other.output / "progress.jsonl").read_text().splitlines()]
    assert sum(samples) == 24


@pytest.mark.long
def test_a_dry_run_prints_commands_that_run_as_they_are_on_the_loopback_alone(
    shallow: Path, tmp_path: Path, plan_file: Callable[[Plan], Path]
) -> None:
    user = User(shallow, tmp_path / "user")
    printed, _ = user.run("launch", str(user.job), "--plan", str(plan_file(plan_of("4+2", data=2))), "--dry-run")
    started = [
        subprocess.Popen(command["argv"], env={**os.environ, **command["environment"]})
        for command in printed["commands"]
    ]
    addresses: set[str] = set()
    wait_for(lambda: have_ended(started, addresses))
    assert [rank.returncode for rank in started] == [0, 0]
    assert (user.output / "model" / "config.json").is_file()
    assert addresses
    assert all(ipaddress.ip_address(each).is_loopback for each in addresses), addresses


@pytest.mark.long
def test_a_tuning_that_is_killed_at_any_moment_loses_nothing(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None]
) -> None:
    user = User(shallow, tmp_path, trials=3)
    give_profile(user.url, example=shallow)
    process = user.start("tune", str(user.job))
    output = read_until_first_trial(process)
    time.sleep(random.uniform(0, 2))
    ranks = children(process.pid)
    process.send_signal(signal.SIGKILL)
    output += process.communicate()[1]
    wait_for_the_end(ranks)
    user.run("tune", str(user.job))
    finished = user.rows(FINISHED)
    assert len(user.rows("SELECT id FROM autotune_study")) == 1
    searched = Counter(plan for _, plan, role, kind in finished if role not in CONFIRMATION and kind == "completed")
    assert set(searched.values()) == {1}
    acknowledged = {int(line.split()[1]) for line in output.splitlines() if line.strip().startswith("trial ")}
    kept = {number for (number,) in user.rows("SELECT number FROM autotune_trial WHERE status = 'finished'")}
    assert acknowledged
    assert acknowledged <= kept
    assert not user.rows("SELECT id FROM autotune_trial WHERE status = 'running'")


# --- several trials at the same time ---


@pytest.mark.long
def test_trials_run_side_by_side_each_on_a_device_of_its_own(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None]
) -> None:
    user = User(shallow, tmp_path, devices=1, parallel=2)
    give_profile(user.url, 1, shallow, groups=2)
    best, _ = user.run("tune", str(user.job))
    searched = "role NOT IN ('confirm', 'final')"
    times = user.rows(f"SELECT started, finished FROM autotune_trial WHERE {searched} ORDER BY number")
    assert any(later[0] < earlier[1] for earlier, later in pairwise(times))
    confirmed = user.rows("SELECT started, finished FROM autotune_trial WHERE role = 'confirm' ORDER BY number")
    assert len(confirmed) >= 2
    assert all(later[0] >= earlier[1] for earlier, later in pairwise(confirmed))
    assert best["id"] in {plan for _, plan, role, _ in user.rows(FINISHED) if role == "confirm"}


@pytest.mark.long
def test_agents_on_two_machines_share_a_search_and_outlive_each_other(
    shallow: Path, tmp_path: Path, give_profile: Callable[..., None], postgres_server: str
) -> None:
    """Three agents on one PostgreSQL database, with separate data folders like hosts; one is killed."""
    with postgres.database(postgres_server) as url:
        give_profile(url, 1, shallow)
        names = ("one", "other", "killed")
        users = [User(shallow, tmp_path / name, devices=1, host=name, trials=6) for name in names]
        *others, killed = (user.start("tune", str(user.job), "--db", url, "--json") for user in users)
        read_until_first_trial(killed)
        killed.send_signal(signal.SIGKILL)
        killed.communicate()
        documents = [json.loads(process.communicate(timeout=200)[0]) for process in others]
        assert len({document["id"] for document in documents}) == 1
        with psycopg.connect(url) as connection:
            statuses = connection.execute("SELECT agent_id, plan_id, role, status FROM autotune_trial").fetchall()
            assert connection.execute("SELECT count(*) FROM autotune_study").fetchone() == (1,)
    assert "running" not in {status for *_, status in statuses}
    finished = [(agent, plan, role) for agent, plan, role, status in statuses if status == "finished"]
    assert len({agent for agent, _, role in finished if role not in CONFIRMATION}) >= 2
    assert len({agent for agent, _, role in finished if role in CONFIRMATION}) == 1
    plans = Counter(plan for _, plan, role in finished if role not in REPEATS)
    assert set(plans.values()) == {1}


def read_until_first_trial(process: "subprocess.Popen[str]") -> str:
    """Return stderr up to and including the first trial of this run."""
    assert process.stderr is not None
    output = ""
    for line in process.stderr:
        output += line
        if line.strip().startswith("trial "):
            return output
    raise AssertionError(f"the tuning ended by itself:\n{output}")
