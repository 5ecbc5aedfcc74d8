"""What the end of a launch says."""

import pytest

from autotune.cli.work import _launch_text
from autotune.known_plan import KnownPlan
from autotune.launch import Launched
from tests.storage_values import packed_plan
from trials.tasks.answer import TrainingReport


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (None, ""),
        (0.004, "Waited for data in 0.4% of the time"),
        (0.25, "Waited for data in 25.0% of the time; raise data.workers, now 3, to decode images ahead"),
    ],
)
def test_a_long_wait_for_data_comes_with_its_remedy(share: float | None, expected: str) -> None:
    report = TrainingReport(steps=8, finished=True, model=None, blank_samples=0)
    launched = Launched(report=report, training_samples_per_second=9.0, data_wait_share=share, steps=8, blank_samples=0)
    text = _launch_text(KnownPlan(plan=packed_plan(), speed=None), launched, 3)
    assert text.splitlines()[2:] == [expected] * bool(expected)
