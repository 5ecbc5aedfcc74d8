"""Warnings about a training that stands still: stopped processes, and a clock that runs on."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from autotune.training import silence
from autotune.training.silence import Silence
from tests.programs.processes import wait_for

WAITING = "import time; time.sleep(600)"


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> Iterator[list[psutil.Process]]:
    """Provide two ranks that wait, or with the parameter "computes" one that waits and one that computes."""
    second = "while True: pass" if getattr(request, "param", None) == "computes" else WAITING
    processes = [subprocess.Popen([sys.executable, "-c", script]) for script in (WAITING, second)]
    yield [psutil.Process(process.pid) for process in processes]
    for process in processes:
        process.kill()
        process.wait()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("LOOK", 0.05), ("STOPPED", 0.5), ("START", 1.0), ("LEAST", 0.5)):
        monkeypatch.setattr(silence, f"_{name}_SECONDS", seconds)


def watch(quiet: Silence, ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture, text: str) -> str:
    """Look until a warning with that text appears, and return it."""

    def found() -> str | None:
        quiet.look([rank.pid for rank in ranks])
        return next((message for message in caplog.messages if text in message), None)

    wait_for(found)
    return str(found())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("ranks", ["computes"], indirect=True)
def test_a_silence_is_reported_with_what_each_rank_does_and_so_is_its_end(
    ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Silence()
    started = watch(quiet, ranks, caplog, "no step since")
    assert "usually" not in started
    quiet.step(0.01)
    assert "the training continues after" in caplog.messages[-1]
    caplog.clear()
    ranks[0].suspend()
    late = watch(quiet, ranks, caplog, "no step since")
    assert "; a step usually takes 0.0 s: rank 0 is stopped, rank 1 computes (" in late


@pytest.mark.usefixtures("impatient")
def test_a_stopped_rank_is_reported_once_and_so_is_its_return(
    ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Silence()
    ranks[1].suspend()
    assert f"resume it with `kill -CONT {ranks[1].pid}`" in watch(quiet, ranks, caplog, "rank 1 has been stopped since")
    ranks[1].resume()
    watch(quiet, ranks, caplog, "rank 1 continues; it was stopped for")
    assert len([message for message in caplog.messages if "has been stopped since" in message]) == 1


@pytest.mark.usefixtures("impatient")
def test_a_steady_training_causes_no_report(ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture) -> None:
    quiet = Silence()
    for _ in range(20):
        quiet.step(0.06)
        time.sleep(0.06)
        quiet.look([rank.pid for rank in ranks])
    assert not caplog.messages


@pytest.mark.usefixtures("impatient")
def test_ranks_on_other_machines_are_not_described(caplog: pytest.LogCaptureFixture) -> None:
    quiet = Silence()
    quiet.step(0.01)
    assert watch(quiet, [], caplog, "no step since").endswith("; a step usually takes 0.0 s")


@pytest.mark.usefixtures("impatient")
def test_what_is_usual_follows_from_the_last_steps_alone(
    ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Silence()
    for _ in range(5000):
        quiet.step(600.0)
    for _ in range(1000):
        quiet.step(0.01)
    assert "usually takes 0.0 s" in watch(quiet, ranks, caplog, "no step since")


def test_a_rank_that_has_ended_is_left_to_the_pool(caplog: pytest.LogCaptureFixture) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    quiet = Silence()
    time.sleep(1.1)
    quiet.look([process.pid])
    assert not caplog.messages


def test_an_evaluation_may_take_as_long_as_the_last_one(
    ranks: list[psutil.Process], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOOK", "LEAST"):
        monkeypatch.setattr(silence, f"_{name}_SECONDS", 0.0)
    quiet, pids = Silence(evaluates=True), [rank.pid for rank in ranks]
    quiet.step(0.0)
    quiet.look(pids)
    quiet.evaluation(1000)
    quiet.look(pids)
    assert not caplog.messages
    quiet.evaluation(0.0)
    quiet.look(pids)
    assert "no step since" in caplog.text
