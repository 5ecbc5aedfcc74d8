"""The machine is watched while layers are profiled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.forecast import profile_file
from autotune.machine.conditions import Conditions
from autotune.search.execution.profiling import layer_costs, profile_layers
from storage.store import open_store
from tests.machines.simulated import Undisturbed
from tests.values.reports import reports_of
from tests.values.search import COSTS, prepared_of
from trials import wire
from trials.run.pool import Answers


class Answering:
    """Ranks whose answer is known."""

    def ask(self, *_: Any, **__: Any) -> Answers:
        return Answers(reports=tuple(reports_of(COSTS, 0.0)))


class SlowedDown(Undisturbed):
    @property
    def conditions(self) -> Conditions:
        return replace(super().conditions, throttled=("power brake",))


@pytest.mark.parametrize(("watch", "warned"), [(Undisturbed, False), (SlowedDown, True)])
def test_what_disturbed_a_profile_is_named_with_the_remedy(
    watch: type[Undisturbed], warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepared_of(tmp_path)
    costs = profile_layers(prepared, Answering(), tmp_path, watch)
    with open_store(f"sqlite:///{tmp_path}/autotune.db") as store:
        work = prepared.workload
        store.add_workload(work)
        store.save_layer_profile(work.hardware.fingerprint, work.model.fingerprint, work.software, wire.encode(costs))
        assert layer_costs(prepared, store, Answering(), tmp_path) == costs
        (profile,) = store.layer_profiles()
    named = f"{profile_file.stored_costs(profile)}"
    assert named.endswith(", while the devices were slowed down: power brake" if warned else " UTC")
    # When it is measured, and when it is taken again.
    assert caplog.messages == 2 * warned * [
        "while the layers were timed, the devices were slowed down: power brake; predictions are less certain until "
        "trials correct them; `autotune profile JOB --fresh` measures again"
    ]
