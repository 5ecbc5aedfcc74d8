"""Ranks wait for one that uses a slow disk, longer than a collective would."""

from datetime import timedelta
from pathlib import Path

import pytest

from tests.machines.own_ranks import on_ranks
from tests.machines.slow_ranks import PASSES, faults_of_slow_loading, orders_of_passes, resumed_steps, timeouts
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.engine.group import COLLECTIVE_TIMEOUT
from trials.launchers.network import free_port
from trials.tasks.request import Training

pytestmark = pytest.mark.ranks


def test_ranks_wait_for_the_last_one_however_late_it_comes(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    assert on_ranks(orders_of_passes, tmp_path, port) == [[True] * PASSES] * 2


def test_a_training_resumes_however_long_a_rank_reads_its_checkpoint(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path)
    task = Training(output=tmp_path / "output", max_steps=2)
    file = tmp_path / "request.json"
    file.write_text(wire.encode(prepared.request(plan_of("4+2", data=2), task)))
    assert on_ranks(resumed_steps, file) == [2, 2]


def test_a_certificate_waits_for_the_rank_that_loads_the_saved_weights(tmp_path: Path) -> None:
    fault = "the saved weights cannot be loaded: OSError: no such file"
    assert on_ranks(faults_of_slow_loading, tmp_path) == [[fault], []]


def test_all_groups_of_ranks_wait_as_long_as_the_page_says(tmp_path: Path) -> None:
    assert on_ranks(timeouts, tmp_path) == [[COLLECTIVE_TIMEOUT] * 3] * 2
    page = (Path(__file__).parents[4] / "docs" / "engine.md").read_text()
    assert f"a collective fails after {COLLECTIVE_TIMEOUT // timedelta(minutes=1)} minutes" in page
