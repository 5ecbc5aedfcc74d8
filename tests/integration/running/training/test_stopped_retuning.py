"""Signals at each moment of a training that is tuned again: the same command goes on, with every sample once."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from storage.store import open_store
from tests.programs.processes import children, wait_for_the_end
from tests.programs.users import JobFile
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, prepared_of

pytestmark = [pytest.mark.ranks, pytest.mark.long, pytest.mark.usefixtures("home", "heard_interrupts")]

PLAN = plan_of("4+2", data=2, zero=1)
EPOCHS, SAMPLES = 31, 24
MOMENTS = ("it is tuned again at its next checkpoint", "Searching with at most")
"""While the training goes on to its checkpoint, and in the search."""


def launched(job: JobFile, awaited: str | None = None) -> tuple[int, str]:
    """Return (exit code, stderr) of a launch that gets a SIGTERM after a line with the `awaited` text."""
    command = [sys.executable, "-m", "autotune", "launch", str(job.path), "--retune-on-drift"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            lines: list[str] = []
            for line in process.stderr:
                lines.append(line)
                if awaited is not None and awaited in line:
                    started = children(process.pid)
                    process.send_signal(signal.SIGTERM)
                    lines += process.stderr
                    wait_for_the_end(started)
        finally:
            process.kill()  # its ranks end with it
    return process.returncode, "".join(lines)


def steps(job: JobFile) -> list[dict[str, int]]:
    return [json.loads(line) for line in (job.output / "progress.jsonl").read_text().splitlines()]


@pytest.mark.timeout(900)
def test_the_same_command_goes_on_after_a_signal_at_any_moment(shallow: Path, tmp_path: Path) -> None:
    training = {"epochs": EPOCHS, "global_batch_samples": 4, "checkpoint_every": 20}
    data = {"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": f"first:{SAMPLES}"}]}
    workload = prepared_of(shallow, tmp_path / "work", data=data, training=training).workload
    with open_store() as store:
        study = store.create_study(store.add_workload(workload), {}, seed=0)
        # With this promise every training is too slow.
        concluded(store, best_of(study.id, plan=PLAN, workload=workload, estimated_samples_per_second=1e6))
    job = JobFile(shallow, tmp_path)
    search = {"trials": 1, "time_limit": "0.1s", "timed_steps": 1, "warmup_steps": 0}
    job.spoil(data=data, training={**training, "output": str(job.output)}, search=search)
    done = 0
    for moment in MOMENTS:
        code, text = launched(job, moment)
        assert (code, "Traceback" in text) == (143, False), text
        last = steps(job)[-1]["step"]
        assert (
            text.splitlines()[-1]
            == {
                MOMENTS[
                    0
                ]: f"Stopped after step {last} with a checkpoint; the same command goes on with step {last + 1}",
                MOMENTS[1]: "Interrupted; what was measured is kept, and the same command goes on.",
            }[moment]
        )
        assert last > done
        assert (job.output / f"checkpoint-{last}" / "state.json").exists(), text
        done = last
    code, text = launched(job)  # too few steps are left for a drift
    assert code == 0, text
    records = steps(job)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert sum(record["samples"] for record in records) == EPOCHS * SAMPLES
