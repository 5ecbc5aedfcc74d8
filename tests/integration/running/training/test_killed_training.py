"""A training whose process is killed: the next launch records its end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune import launch
from autotune.cli import main
from storage.store import open_store
from tests.programs.processes import children, wait_for_the_end
from tests.programs.users import JobFile
from tests.values.parameters import parameters
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, prepared_of

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

PLAN = plan_of("3+0", "1+2")
TRAINING = {"epochs": 500, "global_batch_samples": 8, "learning_rate": 1e-3}


def unended_trainings() -> list[str]:
    """Return the trainings that the doctor names."""
    answer = CliRunner().invoke(main, ["doctor", "--json"])
    findings = [finding["what"] for finding in json.loads(answer.stdout)["findings"]]
    return [what for what in findings if "has no recorded end" in what]


def kill_after_a_step(job: JobFile) -> None:
    command = [sys.executable, "-m", "autotune", "launch", str(job.path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("  step " in line for line in process.stderr)
        started = children(process.pid)
        process.send_signal(signal.SIGKILL)
    wait_for_the_end(started)


@pytest.mark.parametrize("others", parameters({"at once": 0, "after another training": 1}, short=()))
def test_a_killed_launch_is_named_until_its_training_goes_on(others: int, shallow: Path, tmp_path: Path) -> None:
    workload = prepared_of(shallow, tmp_path / "work", training=TRAINING).workload
    with open_store() as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        concluded(store, best_of(study.id, plan=PLAN, workload=workload))
    job = JobFile(shallow, tmp_path)
    job.spoil(training={**TRAINING, "output": str(job.output)})
    kill_after_a_step(job)
    assert len(unended_trainings()) == 1
    for number in range(others):
        job.spoil(training={**TRAINING, "output": str(tmp_path / f"other-{number}")})
        launch(job.path, steps=1)
        assert len(unended_trainings()) == 1
    job.spoil(training={**TRAINING, "output": str(job.output)})
    launch(job.path, steps=1)
    assert unended_trainings() == []
    with open_store() as store:
        killed, *later = [each.result for each in store.launches(PLAN.id)]
    assert killed is not None
    assert killed.status == "interrupted"
    assert killed.steps >= 1
    assert [each.steps for each in later if each is not None] == [1] * (1 + others)
