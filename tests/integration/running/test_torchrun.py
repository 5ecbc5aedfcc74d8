"""Searches and trainings on two nodes that torchrun starts."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune import launch, tune
from tests.nodes import Cable, cable, ssh_over
from tests.processes import children, has_ended
from tests.training_values import job_of
from trials.job import Job
from trials.tasks.training.progress import PROGRESS_FILE, Progress, read_lines

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("home")]

SHORT = {"trials": 1, "time_limit": "30s", "timed_steps": 1, "confirm_rounds": 1, "final_steps": 0}


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
        hardware = {"devices": 2, "memory_limit": "2GiB", "start_timeout": 120, **hardware}
        source = {"path": str(shallow / "data" / "train.jsonl"), "sampling": "first:24"}
        return job_of(shallow, tmp_path / name, hardware=hardware, search=SHORT, data={"sources": [source]})

    return make


def losses(job: Job) -> list[float]:
    lines = read_lines(job.training.output / PROGRESS_FILE)
    return [line.loss for line in lines if isinstance(line, Progress)]


@pytest.mark.usefixtures("ssh")
def test_a_search_and_a_training_over_two_nodes_have_the_losses_of_one_machine(
    job: Callable[..., Job], joined: Cable
) -> None:
    over_nodes = job("over-nodes", launcher="torchrun", hosts=[joined.here, joined.there])
    best = tune(over_nodes)
    assert (best.workload.hardware.devices, best.workload.hardware.nodes) == (2, 2)
    launch(over_nodes, steps=3)
    here = job("here")
    launch(here, plan=best.plan, steps=3)
    assert losses(over_nodes) == losses(here)
    assert len(losses(here)) == 3
    assert all(map(has_ended, (each for each in children() if "torchrun" in " ".join(each.cmdline()))))
