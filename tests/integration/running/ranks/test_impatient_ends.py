"""A training whose ranks are stopped, and that is interrupted more than once."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

import pytest

from storage.store import open_store
from tests.programs.processes import children, has_ended, ranks, wait_for_the_end
from tests.programs.users import JobFile
from tests.values.parameters import parameters
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, prepared_of

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home", "heard_interrupts")]

PLAN = plan_of("3+0", "1+2")


@pytest.fixture
def training(shallow: Path, tmp_path: Path) -> JobFile:
    """Provide a job with a long training and a known plan."""
    job = JobFile(shallow, tmp_path)
    job.spoil(training__epochs=500)
    workload = prepared_of(shallow, tmp_path / "work", training={"epochs": 500}).workload
    with open_store() as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        concluded(store, best_of(study.id, plan=PLAN, workload=workload))
    return job


def read_until(stderr: IO[str] | None, text: str) -> list[str]:
    """Return the lines up to the one with `text`."""
    assert stderr is not None
    lines: list[str] = []
    for line in stderr:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError(f"{text!r} is not in {lines}")


@pytest.mark.parametrize(
    ("signals", "code"),
    parameters(
        {
            "Ctrl-C thrice": ((signal.SIGINT, signal.SIGINT, signal.SIGINT), 130),
            "Ctrl-C, then a scheduler": ((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), 130),
            "a scheduler, then Ctrl-C": ((signal.SIGTERM, signal.SIGINT, signal.SIGINT), 143),
        },
        short=(),
    ),
)
def test_more_signals_break_off_no_clean_up(training: JobFile, signals: tuple[signal.Signals, ...], code: int) -> None:
    command = [sys.executable, "-m", "autotune", "launch", str(training.path)]
    quiet, heard = subprocess.DEVNULL, subprocess.PIPE
    with subprocess.Popen(command, stdout=quiet, stderr=heard, text=True, start_new_session=True) as process:
        try:
            read_until(process.stderr, "  step 1/")
            started = children(process.pid)
            _, stopped = ranks(process.pid)
            stopped.suspend()
            warned = read_until(process.stderr, "has been stopped")
            assert warned[-1].startswith("WARNING: rank 1 has been stopped since ")
            assert warned[-1].endswith(f"; resume it with `kill -CONT {stopped.pid}`\n")
            stopped.resume()
            read_until(process.stderr, "WARNING: rank 1 continues; it was stopped for ")
            first, *others = signals
            process.send_signal(first)
            read_until(process.stderr, "Stopping: ")  # of signals that wait together, Python handles SIGINT first
            while process.poll() is None:
                for each in others:
                    time.sleep(0.05)
                    process.send_signal(each)
            assert process.stderr is not None
            after = process.stderr.read()
            wait_for_the_end(started)
        finally:
            process.kill()  # its ranks end with it
    assert process.returncode == code
    kept = "the training is kept to its last checkpoint"
    assert after.splitlines()[-1] == f"Interrupted; {kept}, and the same command goes on."
    assert "Traceback" not in after
    assert all(map(has_ended, started))
    with open_store() as store:
        (launch,) = store.launches(PLAN.id)
    assert launch.result is not None
    assert launch.result.status == "interrupted"
    assert launch.result.steps > 0
