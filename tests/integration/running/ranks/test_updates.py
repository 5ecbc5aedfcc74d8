"""The time of an update, as real ranks profile it."""

from pathlib import Path

import pytest

from autotune.search.execution.profiling import design
from tests.machines.own_ranks import on_ranks
from tests.machines.timed_updates import behind_a_slow_link
from tests.values.training import plan_of, prepared_of
from trials import wire
from trials.plan import Padded

pytestmark = pytest.mark.ranks


def test_an_update_takes_at_least_its_optimizer_step_however_slow_the_link(shallow: Path, tmp_path: Path) -> None:
    prepared = prepared_of(shallow, tmp_path, training={"global_batch_samples": 2})
    work = prepared.workload
    task = design(work.data, work.model, (0, 1), work.hardware.of_node, 300)
    file = tmp_path / "request.json"
    file.write_text(wire.encode(prepared.request(plan_of("4+2", data=2, packing=Padded(samples=1)), task)))
    for alone, whole, shared in on_ranks(behind_a_slow_link, file):
        assert whole.seconds_per_parameter == alone.seconds_per_parameter > 0
        assert shared.seconds_per_parameter == alone.seconds_per_parameter / 2
