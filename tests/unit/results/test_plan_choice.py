"""Which plan a training gets, and what is promised of it."""

from pathlib import Path
from typing import Any

import pytest

from autotune.events import Event
from autotune.plan_choice import choose_plan
from autotune.results.known_plan import of_winner
from storage.store import open_store
from tests.values.storage import WORKLOAD, best_of, changed, concluded, new_study


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("data.text_tokens", 1 << 20),
        ("global_batch_samples", 64),
        ("hardware.power_limit_watts", 300),
        ("software.torch", "2.14.0"),
    ],
)
def test_no_speed_is_promised_of_a_plan_that_was_measured_under_other_conditions(
    tmp_path: Path, field: str, value: Any
) -> None:
    heard: list[Event] = []
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        best = concluded(store, best_of(new_study(store)))
        assert choose_plan(store, WORKLOAD, best.plan, heard.append) == of_winner(best)
        assert "promised" not in "".join(map(str, heard))
        chosen = choose_plan(store, changed(field, value), best.plan.id, heard.append)
    assert (chosen.plan, chosen.speed) == (best.plan, None)
    assert f"under other conditions, so that no speed is promised: {field} was " in "".join(map(str, heard))
