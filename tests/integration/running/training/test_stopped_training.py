"""A training that a signal stops: it writes a checkpoint, and the same command goes on exactly."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from autotune import launch
from autotune.cli import main
from autotune.training.silence import Silence
from storage.store import open_store
from tests.programs.processes import children, wait_for_the_end
from tests.programs.users import JobFile
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, prepared_of, train
from trials.run.pool import WarmPool

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home", "heard_interrupts")]

PLAN = plan_of("3+0", "1+2")


def to_agent(process: psutil.Process) -> None:
    process.send_signal(signal.SIGINT)


def to_every_process(process: psutil.Process) -> None:
    """Send what a scheduler sends: also the ranks, their fork server and the loader's processes get it."""
    for each in (*children(process.pid), process):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(signal.SIGTERM)


def losses(output: Path) -> dict[int, float]:
    """Return the losses by step; the progress file holds each step once."""
    records = [json.loads(line) for line in (output / "progress.jsonl").read_text().splitlines()]
    found = {record["step"]: record["loss"] for record in records}
    assert len(found) == len(records)
    assert all(record["data_wait_seconds"] > 0 for record in records)
    return found


def stopped_launch(job: JobFile, send: Callable[[psutil.Process], None]) -> tuple[int, str]:
    """Return (exit code, stderr) of a launch that gets a signal after its first step."""
    command = [sys.executable, "-m", "autotune", "launch", str(job.path)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if "  step " in line:
                    started = children(process.pid)
                    send(psutil.Process(process.pid))
                    lines += process.stderr
                    wait_for_the_end(started)
        finally:
            process.kill()  # its ranks end with it
    return process.returncode, "".join(lines)


def launch_stopped_here(job: JobFile) -> tuple[int, str]:
    """Return (exit code, stderr) of a launch in this process, which gets a Ctrl-C when it hears of its first step."""
    step = Silence.step

    def interrupted(silence: Silence, seconds: float) -> None:
        step(silence, seconds)
        patch.undo()
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Silence, "step", interrupted)
        answer = CliRunner().invoke(main, ["launch", str(job.path)])
    return answer.exit_code, answer.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("stopped", "code"),
    [
        (launch_stopped_here, 130),
        (partial(stopped_launch, send=to_agent), 130),
        (partial(stopped_launch, send=to_every_process), 143),
    ],
    ids=["Ctrl-C in this process", "Ctrl-C", "scheduler"],
)
def test_a_stopped_training_goes_on_exactly(
    stopped: Callable[[JobFile], tuple[int, str]], code: int, shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    training = {"epochs": 4, "global_batch_samples": 8, "learning_rate": 5e-3}
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}], "workers": 1}
    workload = prepared_of(shallow, tmp_path / "work", data=data, training=training).workload
    with open_store() as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        concluded(store, best_of(study.id, plan=PLAN, workload=workload))
    parts, whole = JobFile(shallow, tmp_path), prepared_of(shallow, tmp_path / "whole", data=data, training=training)
    parts.spoil(data=data, training={**training, "output": str(parts.output)})
    ended, text = stopped(parts)
    assert ended == code, text
    last = text.splitlines()[-1]
    found = re.fullmatch(r"Stopped after step (\d+) with a checkpoint; .* goes on with step (\d+)", last)
    assert found is not None, text
    assert "Interrupted" not in text
    step = int(found[1])
    assert (int(found[2]), max(losses(parts.output))) == (step + 1, step)
    assert (parts.output / f"checkpoint-{step}" / "state.json").exists()
    with open_store() as store:
        (first,) = store.launches(PLAN.id)
    assert first.result is not None
    assert (first.result.status, first.result.steps) == ("interrupted", step)
    assert launch(parts.path).report.finished
    assert train(pool, whole, PLAN).finished
    assert losses(parts.output) == pytest.approx(losses(whole.job.training.output), rel=1e-5)
