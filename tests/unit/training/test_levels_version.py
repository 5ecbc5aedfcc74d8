"""Trainings with levels of packs that an earlier version began: their rows had other packs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.training.test_training_output import SETTINGS
from tests.values.training import PACKED, plan_of
from trials import wire
from trials.errors import OutputTaken
from trials.plan import Levelled, Plan, Recomputed
from trials.tasks.training.output import RECORD_FILE, PlanChange, open_output

LEVELS = Levelled(levels=(PACKED, replace(PACKED, qt=10 * PACKED.qt)))
AFTER = plan_of("4+2")
BEFORE = replace(
    AFTER, packing=LEVELS, stages=(replace(AFTER.stages[0], further_levels=(Recomputed(vision=0, language=0),)),)
)


@pytest.mark.parametrize(
    ("plans", "changes"),
    [((BEFORE, None), ()), ((AFTER, BEFORE), ()), ((BEFORE, AFTER), ()), ((AFTER, None), (BEFORE,))],
)
def test_a_training_with_levels_does_not_go_on_with_other_rows(
    plans: tuple[Plan, Plan | None], changes: tuple[Plan, ...], tmp_path: Path
) -> None:
    """An earlier version puts other samples into its steps, of any plan with levels that the training has had."""
    plan, instead_of = plans
    then = instead_of or plan
    opened = open_output(tmp_path, SETTINGS, then)
    record = replace(opened.record, changes=tuple(PlanChange(plan=each, steps=1) for each in changes))
    (tmp_path / RECORD_FILE).write_text(wire.encode(record))
    now = replace(SETTINGS, levels_version=2)
    with pytest.raises(OutputTaken, match=r"levels of packs that another version of autotune began.*continue it with"):
        open_output(tmp_path, now, plan, instead_of=instead_of)


def test_a_training_without_levels_goes_on_with_a_version_that_matches_levels_otherwise(tmp_path: Path) -> None:
    open_output(tmp_path, SETTINGS, AFTER)
    opened = open_output(tmp_path, replace(SETTINGS, levels_version=2), AFTER)
    assert opened.record.settings.levels_version == 2
