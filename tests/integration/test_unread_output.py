"""Commands whose output is not read finish their work first."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.database.url import default_url
from storage.store import open_store
from tests.programs.users import JobFile
from tests.values.parameters import parameters
from tests.values.storage import best_of, concluded, searched
from tests.values.training import plan_of, prepared_of
from trials.launchers.local import LocalLauncher
from trials.run.pool import Answers, WarmPool
from trials.tasks.request import Trial

pytestmark = pytest.mark.usefixtures("home")

PLAN = plan_of("3+0", "1+2")


def autotune(*arguments: str, redirect: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", f'exec "$@" {redirect}', "bash", sys.executable, "-m", "autotune", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("command", [["plans"], ["db", "export", "--hardware", "a100"]])
def test_a_closed_stdout_is_reported(command: list[str]) -> None:
    with open_store() as store:
        searched(store)
    done = autotune(*command, redirect=">&-")
    assert done.stderr == "Error: the result cannot be written to stdout: it is closed; write it elsewhere\n"
    assert done.returncode == 1


@pytest.fixture
def user(shallow: Path, tmp_path: Path, give_profile: Callable[..., None]) -> JobFile:
    """Provide a user whose database holds a plan for the job."""
    job = JobFile(shallow, tmp_path)
    # A step of the plan has 9 samples on average in place of 8.
    job.spoil(
        search={"trials": 1, "time_limit": "20s", "timed_steps": 1, "warmup_steps": 0}, training__batch_tolerance=0.2
    )
    workload = prepared_of(shallow, tmp_path / "work").workload
    with open_store() as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        concluded(store, best_of(study.id, plan=PLAN, workload=workload))
    give_profile(default_url(), example=shallow)
    return job


@pytest.mark.ranks
@pytest.mark.parametrize("command", parameters({name: name for name in ("launch", "tune", "profile")}, short=()))
def test_work_continues_when_the_reader_of_its_progress_leaves(user: JobFile, command: str) -> None:
    extra = {"launch": ["--steps", "2"], "tune": ["--fresh"], "profile": ["--fresh"]}[command]
    done = autotune(command, str(user.path), "--json", *extra, redirect="2> >(head -1 >&2)")
    assert (done.returncode, done.stderr) == (0, "Inspecting the model, the data and the hardware\n")
    assert json.loads(done.stdout)


@pytest.mark.long
@pytest.mark.ranks
def test_run_trains_to_the_end_before_it_reports_a_closed_stdout(user: JobFile) -> None:
    done = autotune("run", str(user.path), redirect=">/dev/full")
    assert done.returncode == 1
    assert done.stderr.endswith(
        "Error: the result cannot be written to stdout: No space left on device; write it elsewhere\n"
    )
    assert (user.output / "model" / "config.json").is_file()
    with open_store() as store:
        (launch,) = store.launches(PLAN.id)
    assert launch.result is not None
    assert launch.result.status == "finished"


@pytest.mark.ranks
def test_ranks_work_with_their_logs_on_a_full_disk(shallow: Path, tmp_path: Path) -> None:
    logs = tmp_path / "ranks" / "logs"
    logs.mkdir(parents=True)
    for rank in range(2):
        (logs / f"rank-{rank}.log").symlink_to("/dev/full")
    prepared = prepared_of(shallow, tmp_path, data={"workers": 1})
    with WarmPool(LocalLauncher(logs.parent, 2, "cpu")) as pool:
        answer = pool.ask(prepared.request(PLAN, Trial(warmup_steps=(0,), timed_steps=(1,))), 120)
    assert isinstance(answer, Answers), answer
