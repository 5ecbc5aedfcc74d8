"""Requests that the commands of `launch --dry-run` read."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.job_file import load_job
from autotune.machine.devices import locked
from autotune.workload import look_at, read_data
from storage.store import open_store
from tests.programs.users import JobFile, databases, refusal
from tests.values.storage import peaking_at, result_of
from tests.values.training import plan_of
from trials import channels
from trials.channels.folder import FolderChannel
from trials.plan import Plan
from trials.tasks.request import REQUEST, Request, Training

pytestmark = pytest.mark.usefixtures("home")


def printed(*arguments: str | Path) -> Path:
    """The folder of the request in the printed commands."""
    answer = CliRunner().invoke(main, ["launch", *map(str, arguments), "--dry-run", "--json"])
    assert answer.exit_code == 0, answer.stderr
    folders = {each["argv"][each["argv"].index("--request") + 1] for each in json.loads(answer.stdout)["commands"]}
    (folder,) = folders
    return Path(folder)


def request_in(folder: Path) -> Request:
    found = channels.receive(Request, FolderChannel(folder), REQUEST)
    assert found is not None
    return found


def test_printed_commands_run_what_was_asked_for_after_other_dry_runs_too(
    job: JobFile, plan_file: Callable[[Plan], Path]
) -> None:
    plan = plan_file(plan_of("12+8", data=2))
    first = printed(job.path, "--plan", plan)
    short = printed(job.path, "--plan", plan, "--steps", "3")
    other = printed(job.spoil(training__epochs=7), "--plan", plan)
    assert [request_in(each).job.training.epochs for each in (first, short, other)] == [1, 1, 7]
    tasks = [request_in(each).task for each in (first, short)]
    assert [task.max_steps for task in tasks if isinstance(task, Training)] == [None, 3]


def test_a_plan_that_needed_more_memory_is_refused_where_its_packs_are_the_same_and_ranks_keep_a_limit(
    job: JobFile, tmp_path: Path
) -> None:
    job.spoil(hardware={"devices": 2, "memory_limit": "200MiB"})
    read, plan = load_job(job.path), plan_of("12+4", "0+4")
    here = read_data(read, look_at(read), tmp_path).workload
    with open_store() as store:
        study = store.create_study(store.add_workload(replace(here, memory_limit_bytes=1 << 40)), {}, seed=0)
        trial = store.start_trial(study.id, plan, "sampled")
        store.finish_trial(result_of(trial.id, peaking_at(1 << 50)))
    command = "launch", job.path, "--plan", plan.id, "--dry-run"
    code, message = refusal(*command)
    assert (code, message.startswith(f"plan {plan.id} does not fit here: ")) == (3, True)
    # Other packs may need less; without a limit of the job, ranks on a CPU keep none.
    for changes, is_noted in ({"training__seed": 1}, True), ({"training__seed": 0, "hardware": {"devices": 2}}, False):
        job.spoil(**changes)
        answer = CliRunner().invoke(main, [*map(str, command)])
        assert (answer.exit_code, "so that it may run out of memory" in answer.stderr) == (0, is_noted)


def test_commands_are_printed_while_another_process_uses_the_devices(
    job: JobFile, plan_file: Callable[[Plan], Path]
) -> None:
    plan = plan_file(plan_of("12+8", data=2))
    with locked(("cpu",)):
        during = printed(job.path, "--plan", plan)
        code, message = refusal("launch", job.path, "--plan", plan)
    assert (code, during) == (6, printed(job.path, "--plan", plan))
    assert "another autotune process uses the devices of this machine" in message


def test_a_dry_run_creates_no_database(
    job: JobFile, plan_file: Callable[[Plan], Path], home: Path, tmp_path: Path
) -> None:
    printed(job.path, "--plan", plan_file(plan_of("12+8", data=2)))
    code, message = refusal("launch", job.path, "--dry-run", "--db", f"sqlite:///{tmp_path}/wrong/results.db")
    assert (code, "results.db does not exist; check --db" in message) == (4, True)
    assert not databases(home)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize("option", ["--certify", "--retune-on-drift", "--submit"])
def test_what_printed_commands_cannot_do_is_refused(job: JobFile, option: str) -> None:
    code, message = refusal("launch", job.path, "--dry-run", option)
    assert code == 2
    assert "prints commands that neither certify nor tune again, and submits nothing; remove --certify" in message
