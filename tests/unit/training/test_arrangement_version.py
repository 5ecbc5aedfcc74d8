"""Trainings that an earlier version began: their steps had other samples."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.test_training_output import SETTINGS
from tests.values.training import plan_of
from trials import wire
from trials.errors import OutputTaken
from trials.plan import Padded, Plan
from trials.tasks.training.output import RECORD_FILE, PlanChange, open_output

PADDED = replace(plan_of("4+2"), packing=Padded(samples=2))
OF_PACKS = plan_of("4+2")


@pytest.mark.parametrize(
    ("plans", "changes"),
    [((OF_PACKS, None), ()), ((PADDED, None), ()), ((PADDED, OF_PACKS), ()), ((PADDED, None), (OF_PACKS,))],
)
def test_a_training_does_not_go_on_with_other_steps(
    plans: tuple[Plan, Plan | None], changes: tuple[Plan, ...], tmp_path: Path
) -> None:
    """An earlier version puts other samples into the steps of any plan that the training has had."""
    plan, instead_of = plans
    then = instead_of or plan
    opened = open_output(tmp_path, SETTINGS, then)
    record = replace(opened.record, changes=tuple(PlanChange(plan=each, steps=1) for each in changes))
    (tmp_path / RECORD_FILE).write_text(wire.encode(record))
    now = replace(SETTINGS, arrangement_version=2)
    with pytest.raises(OutputTaken, match=r"that another version of autotune began.*continue it with"):
        open_output(tmp_path, now, plan, instead_of=instead_of)
