"""Plans that a job may name as its current plan."""

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.errors import JobError
from autotune.search.space.given_plans import current_plan, warn_of_batch
from autotune.workload import Prepared
from tests.values.search import prepared_of
from trials import wire
from trials.plan import Layout, Levelled, Packed, Plan
from trials.stage import Recomputed, Stage

PACKED = Packed(qv=9, qt=480, qv_min=9, qt_min=416, packer="isf")
PLAN = Plan(
    packing=PACKED,
    layout=Layout(pipeline=2, data=1, zero=0),
    stages=(Stage(vision=4, language=0), Stage(vision=1, language=4)),
)
EMPTY_LEVEL = replace(
    PLAN,
    packing=Levelled(levels=(replace(PACKED, qv=6, qv_min=0, qt=2, qt_min=0), PACKED)),
    stages=tuple(replace(stage, further_levels=(Recomputed(vision=0, language=0),)) for stage in PLAN.stages),
)


def naming(folder: Path, plan: Plan, oversize: str = "own-pack") -> Prepared:
    path = folder / "plan.json"
    path.write_text(wire.encode(plan))
    prepared = prepared_of(folder, current_plan=str(path))
    return replace(prepared, workload=replace(prepared.workload, oversize=oversize))


def test_a_job_that_names_none_has_none(tmp_path: Path) -> None:
    assert current_plan(prepared_of(tmp_path)) is None


def test_the_plan_of_the_file_is_the_current_plan(tmp_path: Path) -> None:
    assert current_plan(naming(tmp_path, PLAN)) == PLAN


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        (replace(PLAN, packing=replace(PACKED, packer="tetris")), r"'tetris' .*best-fit"),
        (replace(PLAN, stages=(Stage(vision=4, language=0), Stage(vision=1, language=5))), "5 language layers"),
        (replace(PLAN, layout=Layout(pipeline=2, data=2, zero=0)), "for 4 devices, not 2"),
        (EMPTY_LEVEL, "level 1 with qv=6 qt=2 holds no sample"),
    ],
    ids=["packer", "layers", "devices", "level"],
)
def test_a_plan_that_is_not_one_of_this_job_is_refused(tmp_path: Path, plan: Plan, reason: str) -> None:
    with pytest.raises(JobError, match=rf"search\.current_plan: .*{reason}"):
        current_plan(naming(tmp_path, plan))


@pytest.mark.parametrize("oversize", ["skip", "fail"])
def test_a_plan_that_would_train_on_fewer_samples_is_refused(tmp_path: Path, oversize: str) -> None:
    small = replace(PLAN, packing=Packed(qv=2, qt=100, qv_min=2, qt_min=50, packer="isf"))
    assert current_plan(naming(tmp_path, small)) == small
    prepared = naming(tmp_path, small, oversize)
    lost = sum(
        units > 2 or tokens > 100
        for units, tokens in zip(prepared.index.vision_units, prepared.index.text_tokens, strict=True)
    )
    with pytest.raises(JobError, match=f"too small for {lost} samples, which data.oversize: {oversize} does not"):
        current_plan(prepared)


def test_a_plan_whose_steps_have_other_samples_is_named_with_their_number(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    warn_of_batch(prepared_of(tmp_path), PLAN)
    assert not caplog.records
    large = replace(PLAN, packing=replace(PACKED, qv=90, qt=4800, qv_min=90, qt_min=4800))
    prepared = prepared_of(tmp_path)
    samples = prepared.epoch(large.packing, 1).batch_samples
    warn_of_batch(prepared, large)
    assert (
        f"has {samples:.0f} samples on average, a short last one included, where training.global_batch_samples is 16"
        in caplog.text
    )
