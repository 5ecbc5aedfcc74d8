"""A whole run at a real terminal and without one, and how it ends there."""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.events import Event, Phase, PhaseBegan, TrialBegan, TrialEnded
from benchmarks.output.recording import record, resize
from storage.database.url import default_url
from storage.records import FinishedTrial, RunningTrial
from storage.store import open_store
from tests.programs.terminals import terminal
from tests.programs.users import JobFile

ROOT = Path(__file__).parents[2]
SHOW_CURSOR = b"\x1b[?25h"

pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture
def job(shallow: Path, tmp_path: Path) -> JobFile:
    job = JobFile(shallow, tmp_path)
    job.spoil(
        data={"sources": [{"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}]},
        search={"trials": 3, "time_limit": "60s", "timed_steps": 2, "warmup_steps": 0, "confirm_rounds": 1},
    )
    return job


@pytest.fixture
def profiled(job: JobFile, shallow: Path, give_profile: Callable[..., None]) -> JobFile:
    """The job of a user whose database has the profile of the layers."""
    give_profile(default_url(), example=shallow)
    return job


def command(*arguments: str | Path) -> list[str | Path]:
    return [sys.executable, "-m", "autotune", *arguments]


@pytest.mark.long
@pytest.mark.ranks
def test_a_run_is_live_from_its_first_seconds_to_its_result(profiled: JobFile) -> None:
    seen = b""

    def narrow(_pid: int, descriptor: int, chunk: bytes) -> None:
        nonlocal seen
        if b"Training with plan" in seen:
            resize(descriptor, 80)
        seen = seen[-1000:] + chunk

    done = record(
        command("run", profiled.path), 120, folder=ROOT, environment={"TERM": "xterm-256color"}, on_output=narrow
    )
    text = "\n".join(done.screen())
    assert done.exit_code == 0, text
    lasting = text.splitlines()
    assert lasting[0] == "Inspecting the model, the data and the hardware"
    live = re.findall(rb"[-|/\\\\] (probe|lengths|search|repeats|certificate|training)", done.output)
    assert set(live) == {b"probe", b"search", b"repeats", b"certificate", b"training"} | (set(live) & {b"lengths"})
    assert b"starting the ranks" in done.output
    assert re.search(rb"3 of at most 3 trials, trial \d \(", done.output)
    # The result, on stdout, is below everything that came before it, and the display has gone.
    assert f"The model is in {profiled.output / 'model'}" in " ".join(" ".join(lasting[-3:]).split())
    assert not re.search(r"^[-|/\\] \w+ \d+ s", text, flags=re.MULTILINE)
    assert done.output.count(b"\x1b[?25l") == done.output.count(SHOW_CURSOR) >= 2
    assert_replayed(lasting)


def assert_replayed(lasting: list[str]) -> None:
    """Show the same trials at narrow terminals."""
    events = list(of_database())
    for columns in (80, 40):
        with terminal(columns) as (display, screen):
            for event in events:
                display(event)
            screen.wait_for("so far")
            assert max(map(len, screen.lines())) <= columns
            display.close()
            words = screen.words
        for line in lasting:
            if re.match(r" +trial \d", line):
                assert " ".join(line.split()) in words


def of_database() -> Iterator[Event]:
    """Yield the events of the only study, from its database."""
    with open_store() as store:
        (study,) = store.studies()
        samples = store.workload(study.workload_fingerprint).data.samples
        yield PhaseBegan(phase=Phase.SEARCH, text="Searching", epoch_samples=samples)
        for trial in store.trials(study.id):
            assert isinstance(trial, FinishedTrial)
            names = ("id", "study_id", "number", "plan", "role", "parameters", "started", "agent_id")
            yield TrialBegan(trial=RunningTrial(**{name: getattr(trial, name) for name in names}))
            yield TrialEnded(trial=trial, is_known=False)


@pytest.mark.long
@pytest.mark.ranks
def test_without_a_terminal_there_are_lines_and_with_q_the_result_alone(profiled: JobFile) -> None:
    tuned = record(command("tune", profiled.path), None, folder=ROOT, environment={"FORCE_COLOR": "1"})
    assert tuned.exit_code == 0, tuned.text
    assert "\x1b" not in tuned.text
    lines = tuned.text.splitlines()
    assert lines[0] == "Inspecting the model, the data and the hardware"
    assert sum(line.startswith("  trial ") for line in lines) >= 3
    assert "Searching with at most 3 trials in 1 min 00 s" in lines
    quiet = record(command("tune", profiled.path, "-q", "--json"), 80, folder=ROOT, environment={})
    assert quiet.exit_code == 0
    assert json.loads(quiet.text)["id"] in tuned.text


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGHUP))]
)
def test_a_command_that_is_ended_leaves_a_clean_terminal(
    number: signal.Signals, job: JobFile, heard_interrupts: None
) -> None:
    """It is ended while the libraries are imported: by Ctrl-C, a scheduler, or the end of its terminal."""
    is_sent = False

    def end(pid: int, descriptor: int, chunk: bytes) -> bool:
        nonlocal is_sent
        if not is_sent and (is_sent := b"probe" in chunk):
            if number == signal.SIGINT:
                os.write(descriptor, b"\x03")
            elif number == signal.SIGTERM:
                os.kill(pid, number)
        return is_sent and number == signal.SIGHUP

    done = record(command("tune", job.path), 80, folder=ROOT, environment={}, on_output=end)
    assert (is_sent, done.exit_code) == (True, 128 + number), done.text
    if number != signal.SIGHUP:
        assert done.screen() == [
            "Inspecting the model, the data and the hardware",
            "Interrupted; what was measured is kept, and the same command goes on.",
        ]
        assert SHOW_CURSOR in done.output.rpartition(b"\x1b[?25l")[2]


def test_a_database_that_does_not_answer_is_waited_for_with_a_sign_of_life(heard_interrupts: None) -> None:
    is_sent = False

    def end(_: int, descriptor: int, chunk: bytes) -> None:
        nonlocal is_sent
        if not is_sent and re.search(rb"plans +(\x1b\[\d*m *)*[3-9] s", chunk):
            is_sent = True
            os.write(descriptor, b"\x03")

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"postgresql://user@127.0.0.1:{server.getsockname()[1]}/none"
        done = record(command("plans", "--db", url), 80, folder=ROOT, environment={}, on_output=end)
    assert (done.exit_code, done.screen()) == (130, ["Interrupted."])
