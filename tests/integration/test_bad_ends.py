"""Closed outputs, interrupts, and errors that appear only when ranks run."""

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from autotune.cli import main
from autotune.folders import spool_folder, work_folder
from autotune.search.roles import BASELINES
from storage.database.url import default_url
from storage.errors import DatabaseUnavailable
from storage.spool import Spool
from storage.store import Store, open_store
from tests.programs.processes import children, wait_for, wait_for_the_end
from tests.programs.users import JobFile, document, refusal
from tests.values.data import record, write_records
from tests.values.storage import best_of, concluded
from tests.values.training import plan_of, prepared_of
from trials.plan import Plan

BAD_LINES = (b'{"id": 1, ', {"id": 2}, record("<image>What?", "A box.", image="gone.png"))

pytestmark = pytest.mark.usefixtures("home")


# --- output that is not read ---


def start(*arguments: str | Path, stdout: int = subprocess.PIPE) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
def test_a_reader_that_has_seen_enough_is_no_error_to_talk_about() -> None:
    read, write = os.pipe()
    os.close(read)
    process = start("plans", "--json", stdout=write)
    os.close(write)
    _, message = process.communicate(timeout=60)
    assert (process.returncode, message) == (1, "")


def test_a_full_disk_behind_stdout_is_reported() -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        process = start("plans", "--json", stdout=full.fileno())
        _, message = process.communicate(timeout=60)
    assert message == "Error: the result cannot be written to stdout: No space left on device; write it elsewhere\n"
    assert process.returncode == 1


# --- with real ranks ---


class Tunings:
    """One job that is tuned repeatedly in one data folder."""

    def __init__(self, example: Path, folder: Path) -> None:
        self.job = JobFile(example, folder)
        records = (json.loads(line) for line in (example / "data" / "train.jsonl").read_text().splitlines()[:40])
        mixed = write_records(folder / "mixed.jsonl", *BAD_LINES, *records)
        self.job.spoil(
            data__sources=[{"path": str(mixed), "images": str(example / "data")}],
            training__global_batch_samples=4,
            search={"trials": 1, "time_limit": "20s", "timed_steps": 1, "warmup_steps": 0},
        )
        self.data = folder / "data"


@pytest.fixture
def tunings(shallow: Path, tmp_path: Path, give_profile: Callable[..., None]) -> Tunings:
    tunings = Tunings(shallow, tmp_path)
    give_profile(f"sqlite:///{tunings.data / 'autotune' / 'autotune.db'}", example=shallow)
    return tunings


def stop(process: "subprocess.Popen[str]", number: int, *, awaited: str, group: bool) -> tuple[str, str]:
    """Send the signal after a line with `awaited`, when the ranks run; return (lines before, lines after)."""
    assert process.stderr is not None
    before = []
    try:
        for line in process.stderr:
            before.append(line)
            if awaited in line:
                break
        wait_for(lambda: len(children(process.pid)) >= 2)
        ranks = children(process.pid)
        (os.killpg if group else os.kill)(process.pid, number)
        _, after = process.communicate(timeout=60)
        wait_for_the_end(ranks)
    finally:
        process.kill()  # its ranks end with it
    return "".join(before), after


INTERRUPTS = (
    (signal.SIGINT, "  trial ", True, 130),
    (signal.SIGINT, "  trial ", False, 130),
    (signal.SIGTERM, "40 samples", False, 143),
)
"""(signal, text that is awaited, whether all processes get the signal, exit code) of one tuning after the other."""


@pytest.mark.long
@pytest.mark.ranks
def test_an_interrupted_tuning_leaves_no_process_and_goes_on_next_time(
    tunings: Tunings,
    monkeypatch: pytest.MonkeyPatch,
    heard_interrupts: None,
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tunings.data))
    output = ""
    for number, awaited, group, code in INTERRUPTS:
        process = start("tune", tunings.job.path, "--json")
        before, after = stop(process, number, awaited=awaited, group=group)
        assert process.returncode == code, before + after
        output += before
        assert "WARNING: 3 of 43 dataset lines are skipped" in before
        assert after.splitlines()[-1] == "Interrupted; what was measured is kept, and the same command goes on."
        assert "Traceback" not in after
    done = CliRunner().invoke(main, ["tune", str(tunings.job.path), "--json"])
    assert done.exit_code == 0, done.stderr
    output += done.stderr
    assert re.search(r"^ *Study \S+ goes on: \d+ trials? (is|are) done, after \d+ s$", output, flags=re.MULTILINE)
    reported_trials = re.findall(r"^ +trial (\d+)  (\S+)", output, flags=re.MULTILINE)
    numbers = [int(number) for number, _ in reported_trials]
    assert numbers[0] == 0
    assert numbers == sorted(set(numbers))
    assert reported_trials[0][1] in {"predicted", *BASELINES}


@pytest.mark.ranks
def test_a_limit_below_the_leanest_plan_exits_with_3(tunings: Tunings, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tunings.job.spoil(hardware__memory_limit="1MiB")
    monkeypatch.setenv("XDG_DATA_HOME", str(tunings.data / "without a profile"))
    before = document("doctor", path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tunings.data))
    assert any(each["what"].startswith("a rank may use 1MiB") for each in before["findings"])
    code, message = refusal("tune", path)
    assert code == 3
    assert " fits 1 MiB per rank: layouts " in message
    assert "; the leanest, p" in message
    known = document("doctor", path)["least_memory"]
    needed = re.search(r" with qv .* needs about (\d+) MiB", message)
    assert needed
    assert int(needed[1]) == math.ceil(known["bytes"] / 2**20)
    # Without a profile, ZeRO 3 and tensor parallelism are left out.
    assert (before["least_memory"]["origin"], known["origin"]) == ("analytic", "measured")
    assert before["least_memory"]["layout"] == "p2-d1-z0"
    assert 1 <= before["least_memory"]["bytes"] / known["bytes"] < 1.1
    assert "raise hardware.memory_limit" in message
    with open_store() as store:
        assert not [study for study in store.studies() if study.finished is None]


@pytest.fixture
def job(shallow: Path, tmp_path: Path) -> JobFile:
    return JobFile(shallow, tmp_path)


@pytest.fixture
def plan(shallow: Path, tmp_path: Path) -> Plan:
    """The known winner of the job."""
    prepared = prepared_of(shallow, tmp_path / "work")
    plan = plan_of("3+0", "1+2")
    with open_store() as store:
        study = store.create_study(store.add_workload(prepared.workload), {}, seed=0)
        concluded(store, best_of(study.id, plan=plan, workload=prepared.workload))
    return plan


def test_a_launch_onto_results_of_something_else_is_refused_and_leaves_them(job: JobFile, plan: Plan) -> None:
    checkpoint = job.output / "checkpoint-3"
    checkpoint.mkdir(parents=True)
    code, message = refusal("launch", job.path, "--steps", "2")
    assert (code, list(job.output.iterdir())) == (2, [checkpoint])
    assert (
        "holds checkpoint-3, which no training of this version of autotune wrote; name an empty or a new folder"
        in message
    )
    with open_store() as store:
        assert not store.launches(plan.id)


@pytest.mark.ranks
def test_the_end_of_a_launch_waits_for_the_database(job: JobFile, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(*_: object) -> None:
        raise DatabaseUnavailable("it is away")

    job.spoil(training__learning_rate=1e30)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "finish_launch", unavailable)
        code, message = refusal("launch", job.path, "--steps", "4")
    assert code == 1
    assert "the loss of a step is nan; lower training.learning_rate" in message
    with open_store() as store:
        (running,) = store.launches(plan.id)
        assert running.result is None
    spool = spool_folder(work_folder(default_url()))
    assert len(Spool(spool).pending()) == 1
    with open_store() as store:
        assert Spool(spool).replay(store) == 1  # as the next command does
        results = [launch.result for launch in store.launches(plan.id)]
    assert [(result.status, result.steps) for result in results if result] == [("failed", 1)]
    assert not list(spool.iterdir())
