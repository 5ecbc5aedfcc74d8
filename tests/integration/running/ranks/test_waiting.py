"""Ranks wait for one that writes to a slow disk, longer than a collective would."""

from pathlib import Path

import pytest

from tests.machines.own_ranks import on_ranks
from tests.machines.slow_ranks import PASSES, orders_of_passes
from trials.launchers.network import free_port

pytestmark = pytest.mark.ranks


def test_ranks_wait_for_the_last_one_however_late_it_comes(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    assert on_ranks(orders_of_passes, tmp_path, port) == [[True] * PASSES] * 2
