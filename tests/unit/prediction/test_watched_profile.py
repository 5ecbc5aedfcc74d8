"""The machine is watched while layers are profiled."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.machine.conditions import Conditions
from autotune.search.execution.profiling import profile_layers
from tests.machines.simulated import Undisturbed
from tests.values.reports import reports_of
from tests.values.search import COSTS, prepared_of
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
    assert profile_layers(prepared_of(tmp_path), Answering(), tmp_path, watch).layers
    assert caplog.messages == warned * [
        "while the layers were timed, the devices were slowed down: power brake; predictions are less certain until "
        "trials correct them; `autotune profile JOB --fresh` measures again"
    ]
