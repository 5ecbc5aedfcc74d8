"""Searches and trainings on two nodes, by every tool that starts them."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner

from autotune import launch, tune
from autotune.cli import main
from autotune.errors import LaunchFailed
from autotune.events import Event, Note, TrialBegan, TrialEnded
from autotune.job_file import with_values
from autotune.workload import prepare
from storage.records import FinishedTrial
from storage.store import open_store
from tests.machines.nodes import OTHER, Cable, cable, ssh_over
from tests.machines.slurm import cluster
from tests.programs.processes import children, has_ended, ranks, wait_for
from tests.programs.users import refusal
from tests.values.storage import best_of, concluded
from tests.values.training import job_of, plan_of, train
from trials import wire
from trials.errors import NodesMissing
from trials.job import Job
from trials.outcome import Completed, Failed
from trials.plan import Plan
from trials.run.pool import WarmPool
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

SHORT = {"trials": 1, "time_limit": "30s", "timed_steps": 1, "confirm_rounds": 1, "final_steps": 0}
SHORT_TRAINING = {"max_steps": 3}


@pytest.fixture(scope="module")
def joined() -> Iterator[Cable]:
    with cable() as made:
        yield made


@pytest.fixture
def ssh(joined: Cable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ssh reach the other node."""
    monkeypatch.setenv("PATH", str(ssh_over(joined, tmp_path / "bin")), prepend=":")


@pytest.fixture
def job(shallow: Path, tmp_path: Path) -> Callable[..., Job]:
    """A job with two ranks, and further settings of its hardware."""

    def make(name: str, **hardware: Any) -> Job:
        hardware = {"devices": 2, "memory_limit": "2GiB", "start_timeout": "2min", **hardware}
        source = {"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}
        return job_of(shallow, tmp_path / name, hardware=hardware, search=SHORT, data={"sources": [source]})

    return make


LAUNCHERS = ("torchrun", "torchrun c10d", "deepspeed")


def hardware_of(launcher: str, joined: Cable, folder: Path) -> dict[str, Any]:
    """Return the settings of a job's hardware for both nodes."""
    name, _, rendezvous = launcher.partition(" ")
    if name == "torchrun":
        return {"launcher": name, "hosts": [joined.here, joined.there], "rendezvous": rendezvous or "static"}
    hostfile = folder / "hosts"
    hostfile.write_text(f"{joined.here} slots=1\n{joined.there} slots=1\n")
    return {"launcher": name, "hostfile": hostfile, "devices": None}


def losses(job: Job) -> list[float]:
    lines = read_lines(job.training.output / PROGRESS_FILE)
    return [line.loss for line in lines if isinstance(line, Progress)]


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_search_and_a_training_over_two_nodes_have_the_losses_of_one_machine(
    launcher: str, job: Callable[..., Job], joined: Cable, pool: WarmPool, tmp_path: Path
) -> None:
    over_nodes = with_values(job("over-nodes", **hardware_of(launcher, joined, tmp_path)), "training", SHORT_TRAINING)
    ran = CliRunner().invoke(main, ["run", written(over_nodes, tmp_path)])
    assert ran.exit_code == 0, ran.stderr
    check_losses(over_nodes, job("here"), pool, tmp_path)


def check_losses(over_nodes: Job, here: Job, pool: WarmPool, folder: Path) -> None:
    """Compare the training over nodes with one of the plan that was found for them, on the ranks of this machine."""
    with open_store() as store:
        (best,) = store.best_plans()
    assert (best.workload.hardware.devices, best.workload.hardware.nodes) == (2, 2)
    train(pool, prepare(here, folder), best.plan, **SHORT_TRAINING)
    assert losses(over_nodes) == losses(here)
    assert len(losses(here)) == SHORT_TRAINING["max_steps"]
    assert not programs("torchrun", "deepspeed.launcher.launch")


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_commands_of_a_dry_run_run_as_they_are_printed(
    launcher: str, job: Callable[..., Job], joined: Cable, pool: WarmPool, tmp_path: Path
) -> None:
    printed, here = job("printed", **hardware_of(launcher, joined, tmp_path)), job("here")
    plan = plan_of("4+2", data=2)
    run_as_printed(printed, plan, joined, tmp_path)
    train(pool, prepare(here, tmp_path), plan, max_steps=3)
    assert losses(printed)[:3] == losses(here)
    assert len(losses(here)) == 3
    assert not programs("torchrun", "deepspeed.launcher.launch")


def written(job: Job, folder: Path) -> str:
    """Write a job file and return its path."""
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job.model_dump(mode="json", exclude_none=True)))
    return str(path)


def run_as_printed(job: Job, plan: Plan, joined: Cable, folder: Path) -> None:
    """Run the commands of `launch --dry-run`, one on each node."""
    (folder / "plan.json").write_text(wire.encode(plan))
    command = ["launch", written(job, folder), "--plan", str(folder / "plan.json"), "--dry-run", "--json"]
    printed = CliRunner().invoke(main, command)
    assert printed.exit_code == 0, printed.stderr
    started = []
    for node, each in enumerate(json.loads(printed.stdout)["commands"]):
        argv = joined.on_other(each["argv"]) if node else each["argv"]
        started.append(subprocess.Popen(argv, env={**os.environ, **each["environment"]}))
    assert len(started) == 2
    try:
        assert [process.wait(200) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()


def programs(*names: str) -> list[psutil.Process]:
    """Return the processes of this test whose commands have one of the names in them."""
    running = [each for each in children() if not has_ended(each)]
    return [each for each in running if any(name in " ".join(each.cmdline()) for name in names)]


@pytest.mark.long
def test_a_training_whose_node_is_lost_fails_with_its_name_and_goes_on_with_what_is_left(
    job: Callable[..., Job], joined: Cable, tmp_path: Path
) -> None:
    """The user starts the other node, by the command that is shown; one rank of this machine is left."""
    others: list[subprocess.Popen[bytes]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Note) and "Start this on node 1" in event.text:
            others.append(subprocess.Popen(joined.on_other(shlex.split(event.text.splitlines()[1]))))
        if isinstance(event, Progress) and event.step == 2:
            joined.set("down")

    settings = job("lost", launcher="torchrun", nodes=2, rendezvous="c10d", address=joined.here)
    settings = with_values(settings, "training", {"checkpoint_every": 1, "epochs": 50})
    try:
        with pytest.raises(LaunchFailed, match=rf"rank 1 failed: node {OTHER} is lost: it gave no sign of life"):
            launch(settings, plan=plan_of("4+2", data=2), listener=listen)
        wait_for(lambda: not programs("torchrun"))
    finally:
        joined.set("up")
        for process in others:
            process.kill()
            process.wait()
    assert list(settings.training.output.glob("checkpoint-*"))

    left = with_values(job("lost", devices=1), "training", {"checkpoint_every": 1, "epochs": 50})
    alone, done = plan_of("4+2"), len(losses(settings))
    with open_store() as store:  # of a search with another limit
        work = prepare(left, tmp_path / "left").workload
        other = replace(work, memory_limit_bytes=2 * work.memory_limit_bytes)
        study = store.create_study(store.add_workload(other), {}, seed=0)
        concluded(store, best_of(study.id, plan=alone, workload=other))
    code, reported = refusal("run", written(left, tmp_path))
    assert code == 2
    remedy = f"by `autotune launch JOB --resume-with {alone.id}`, which was not measured here: hardware.memory_limit"
    assert remedy in reported
    launched = launch(left, resume_with=alone.id, steps=done + 2)
    assert (launched.report.steps, launched.report.stopped) == (done + 2, None)
    assert len(losses(left)) == done + 2


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
def test_a_search_whose_node_is_lost_in_a_trial_starts_it_anew_and_keeps_all_results(
    job: Callable[..., Job], joined: Cable
) -> None:
    done: list[FinishedTrial] = []
    lost: list[psutil.Process] = []

    def listen(event: Event) -> None:
        if isinstance(event, TrialEnded):
            done.append(event.trial)
        if isinstance(event, TrialBegan) and done and not lost:
            lost.extend(programs("--number=1"))
            for process in lost:
                process.kill()

    settings = job("lost", launcher="torchrun", hosts=[joined.here, joined.there])
    best = tune(with_values(settings, "search", {"trials": 6, "time_limit": "10min"}), listener=listen)
    assert lost
    # A disturbed run is repeated, and the failure is stored with the second result.
    of_trials = [[each.result.outcome, *(run.outcome for run in each.result.disturbed)] for each in done]
    (failed,) = (outcome for outcomes in of_trials for outcome in outcomes if isinstance(outcome, Failed))
    assert f"node {OTHER} is lost: it gave no sign of life" in str(failed)
    assert isinstance(done[0].result.outcome, Completed)
    assert isinstance(done[-1].result.outcome, Completed)
    with open_store() as store:
        stored = store.trials(best.study_id)
        assert {each.id for each in done} == {each.id for each in stored}
    assert not programs("torchrun")


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
def test_no_process_is_left_on_any_node_when_the_agent_is_killed(
    job: Callable[..., Job], joined: Cable, tmp_path: Path
) -> None:
    settings = job("killed", launcher="torchrun", hosts=[joined.here, joined.there])
    (tmp_path / "plan.json").write_text(wire.encode(plan_of("4+2", data=2)))
    command = ["launch", written(settings, tmp_path), "--plan", str(tmp_path / "plan.json")]
    agent = subprocess.Popen([sys.executable, "-P", "-m", "autotune", *command, "--set", "training.epochs=50"])
    try:
        wait_for(lambda: losses(settings))
        there = children(agent.pid)
        assert len(ranks(agent.pid)) == 2
    finally:
        agent.kill()
        agent.wait()
    psutil.wait_procs(there, timeout=30)
    assert not [each for each in there if not has_ended(each)]


@pytest.mark.long
@pytest.mark.usefixtures("ssh")
def test_a_host_that_is_not_there_is_named(job: Callable[..., Job], joined: Cable) -> None:
    missing = joined.there + "9"
    with pytest.raises(NodesMissing, match=rf"node 1 \({missing}\) has ended with exit code 255 .*: no route to host"):
        launch(job("missing", launcher="torchrun", hosts=[joined.here, missing]), plan=plan_of("4+2", data=2))
    assert not programs("torchrun")


def test_a_host_to_which_no_route_leads_is_named(joined: Cable) -> None:
    """The other node has the route to this one alone."""
    code = "from trials.launchers.network import address_towards; address_towards('198.51.100.7')"
    ended = subprocess.run(
        joined.on_other([sys.executable, "-P", "-c", code]), capture_output=True, text=True, check=False
    )
    assert "SiteError: no route leads to 198.51.100.7 (Network is unreachable); check the network" in ended.stderr


@pytest.mark.long
def test_a_host_to_which_no_route_leads_is_named_before_anything_starts(
    job: Callable[..., Job], joined: Cable, tmp_path: Path
) -> None:
    """The other node has the route to this one alone."""
    file = written(job("routeless", launcher="torchrun", hosts=[joined.there, "198.51.100.7"]), tmp_path)
    command = joined.on_other([sys.executable, "-P", "-m", "autotune", "tune", file])
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "Error: no route leads to 198.51.100.7 (Network is unreachable); check the network" in ended.stderr
    assert not list((tmp_path / "home").rglob("node-*.log"))


@pytest.mark.long
def test_a_search_and_a_training_that_are_submitted_to_slurm_run_on_its_nodes(
    job: Callable[..., Job], joined: Cable, pool: WarmPool, tmp_path: Path
) -> None:
    # The name of the other node has no address here.
    over_nodes = with_values(job("over-nodes", nodes=2, address=joined.here), "training", SHORT_TRAINING)
    command = ["run", written(over_nodes, tmp_path), "--launcher", "slurm", "--submit", "--json"]
    with cluster(joined) as configuration:
        environment = {**os.environ, "SLURM_CONF": str(configuration)}
        autotune = [sys.executable, "-P", "-m", "autotune", *command]
        submitted = json.loads(subprocess.check_output(autotune, env=environment))
        states = ("squeue", "--noheader", "--format=%T", f"--jobs={submitted['job']}", "--states=all")
        wait_for(lambda: subprocess.check_output(states, env=environment, text=True).strip() in ("COMPLETED", "FAILED"))
    output = Path(submitted["output"]).read_text()
    assert '"steps": 3' in output, output
    check_losses(over_nodes, job("here"), pool, tmp_path)
