"""A training that continues with another plan: on real ranks, from real checkpoints."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import launch
from autotune.errors import PlanNotValid
from autotune.training.plan_change import plan_to_replace
from autotune.workload import Prepared
from storage.errors import UnknownPlan
from tests.values.parameters import parameters
from tests.values.training import PACKED, plan_of, prepared_of, train, variant_of
from trials.arrays import Ints
from trials.data.epoch import Epoch
from trials.data.order import epoch_order
from trials.errors import OutputTaken
from trials.plan import Packed, Padded, Plan
from trials.run.pool import WarmPool
from trials.tasks.request import Training
from trials.tasks.training.course import curriculum_of, set_course
from trials.tasks.training.output import RECORD_FILE, open_output, read_record
from trials.tasks.training.progress import PROGRESS_FILE
from trials.tasks.training.settings import training_settings

pytestmark = pytest.mark.ranks

PIPELINE = plan_of("3+0r1,0", "1+2")
ZERO = plan_of("4+2r0,1", data=2, zero=1)
SAME_STEPS = {
    "split and recompute": (PIPELINE, plan_of("2+0", "2+2r2,1")),
    "packs shared": (PIPELINE, plan_of("4+2r0,1", data=2, zero=1, packing=replace(PACKED, sequence=2))),
    "ZeRO and recompute": (ZERO, plan_of("4+2r4,0", data=2, zero=3)),
}
# The word embedding and the output projection are on one stage and on two.
TOGETHER, APART = PIPELINE, plan_of("4+1", "0+1", zero=1)
TIGHT = plan_of("4+2", data=2, zero=1, packing=Packed(qv=6, qt=300, qv_min=6, qt_min=200, packer="best-fit"))
PADDED = plan_of("2+0", "2+2", packing=Padded(samples=3))


def prepared(example: Path, folder: Path, **training: Any) -> Prepared:
    data = {"sources": [{"path": str(example / "data" / "train.jsonl"), "sampling": "first:24"}]}
    settings = {"epochs": 2, "global_batch_samples": 8, "learning_rate": 5e-3, **training}
    return prepared_of(example, folder, data=data, training=settings)


def change(prepared: Prepared, plan: Plan) -> None:
    """Let the training continue with the plan, as `launch --resume-with` does before its ranks start."""
    output = prepared.job.training.output
    settings = training_settings(prepared.request(plan, Training(output=output)), prepared.index)
    open_output(output, settings, plan, instead_of=plan_to_replace(prepared, plan))


def lines(prepared: Prepared) -> list[dict[str, Any]]:
    return list(map(json.loads, (prepared.job.training.output / PROGRESS_FILE).read_text().splitlines()))


def losses(prepared: Prepared) -> list[float]:
    """Return the losses in order of steps; the progress file holds each step once."""
    records = lines(prepared)
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    return [record["loss"] for record in records]


@pytest.mark.parametrize("plans", parameters({name: (plans,) for name, plans in SAME_STEPS.items()}, short=()))
def test_a_plan_with_the_same_steps_continues_exactly(
    plans: tuple[Plan, Plan], shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    whole, parts = (prepared(shallow, tmp_path / name, schedule="cosine") for name in ("whole", "parts"))
    done = train(pool, whole, plans[0]).steps
    # Two steps before the end of an epoch: they would have other samples under a plan with other steps.
    train(pool, parts, plans[0], max_steps=1)
    change(parts, plans[1])
    assert train(pool, parts, plans[1]).steps == done
    # Moments that were lost or mixed up would show in the first step after the change.
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.parametrize(
    "plans", parameters({"apart": ((TOGETHER, APART),), "together": ((APART, TOGETHER),)}, short=["apart"])
)
def test_a_tied_weight_goes_on_to_plans_with_one_copy_and_with_two(
    plans: tuple[Plan, Plan], shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    def tie(config: dict[str, Any]) -> None:
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True

    tied = variant_of(shallow, tmp_path / "tied", tie)
    whole, parts = (prepared(tied, tmp_path / name) for name in ("whole", "parts"))
    train(pool, whole, plans[0])
    train(pool, parts, plans[0], max_steps=1)
    change(parts, plans[1])
    train(pool, parts, plans[1])
    assert losses(parts) == pytest.approx(losses(whole), rel=1e-4)


@pytest.mark.long
def test_each_sample_is_trained_on_once_in_an_epoch_whatever_the_plans(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    # With this learning rate no loss changes, so the loss of a step says which samples were in it.
    changed = prepared(shallow, tmp_path, learning_rate=1e-20)
    train(pool, changed, PIPELINE, max_steps=1)
    change(changed, TIGHT)
    train(pool, changed, TIGHT, max_steps=4)
    change(changed, PADDED)
    train(pool, changed, PADDED, max_steps=5)
    before = losses(changed)
    report = train(pool, changed, PADDED)
    assert report.finished
    assert losses(changed)[:5] == before
    record = read_record(changed.job.training.output / RECORD_FILE)
    assert record is not None
    assert [(each.plan, each.steps) for each in record.changes] == [(PIPELINE, 1), (TIGHT, 4)]
    assert record.plan == PADDED
    steps = steps_of(changed, record.changes, PADDED)
    assert len(steps) == report.steps
    for number in (0, 1):
        rows = np.concatenate([step for epoch, step in steps if epoch == number])
        assert sorted(rows) == list(range(24))
    assert losses(changed) == pytest.approx(mean_losses(changed, steps, shallow, pool, tmp_path), rel=1e-4)


@pytest.mark.long
def test_a_curriculum_has_short_samples_first_after_a_stop_and_a_change_too(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"learning_rate": 1e-20, "global_batch_samples": 4}
    most = int(np.median(prepared(shallow, tmp_path).index.text_tokens))
    begun = prepared(shallow, tmp_path, **settings, curriculum={"steps": 3, "max_tokens": most})
    train(pool, begun, PIPELINE, max_steps=1)
    with pytest.raises(OutputTaken, match=r"a training with curriculum {'steps': 3, .*, not None"):
        change(prepared(shallow, tmp_path, **settings), TIGHT)
    train(pool, begun, PIPELINE, max_steps=2)
    change(begun, TIGHT)
    report = train(pool, begun, TIGHT)
    record = read_record(begun.job.training.output / RECORD_FILE)
    assert record is not None
    steps = steps_of(begun, record.changes, TIGHT)
    assert (report.finished, report.steps) == (True, len(steps))
    tokens = begun.index.text_tokens
    assert [bool((tokens[rows] <= most).all()) for _, rows in steps[:4]] == [True, True, True, False]
    for number in (0, 1):
        assert sorted(np.concatenate([rows for epoch, rows in steps if epoch == number])) == list(range(24))
    assert losses(begun) == pytest.approx(mean_losses(begun, steps, shallow, pool, tmp_path), rel=1e-4)
    # The last resume wrote the lines of the steps that it ran.
    assert {line["of"] for line in lines(begun)[2:]} == {len(steps)}


class Source:
    """The epochs of a job."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared

    def order(self, number: int) -> Ints:
        return epoch_order(self._prepared.index, 0, number)

    def build(self, number: int, plan: Plan, order: Ints | None) -> Epoch:
        return self._prepared.epoch(plan.packing, plan.layout.data, number, order)


def steps_of(prepared: Prepared, changes: Sequence[Any], last: Plan, epochs: int = 2) -> list[tuple[int, Ints]]:
    """Return (epoch, samples) of each step of the training."""
    source = Source(prepared)
    steps = []
    curriculum = curriculum_of(prepared.job.training, prepared.index)
    for stretch in set_course(changes, last, epochs, source, curriculum).stretches:
        epoch = source.build(stretch.epoch, stretch.plan, stretch.order)
        for number in range(stretch.steps):
            packs = [pack for of_rank in epoch.step(number).packs for pack in of_rank]
            steps.append((stretch.epoch, np.concatenate(packs)))
    return steps


def mean_losses(
    prepared: Prepared, steps: Sequence[tuple[int, Ints]], example: Path, pool: WarmPool, folder: Path
) -> list[float]:
    """Return the mean loss over the targets of each step's samples, with the weights that a training begins with."""
    targets, of_sample = prepared.index.target_tokens, sample_losses(example, pool, folder / "single")
    return [float(np.average(of_sample[rows], weights=targets[rows])) for _, rows in steps]


def sample_losses(example: Path, pool: WarmPool, folder: Path) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the loss of each sample alone, with the weights that a training begins with."""
    single = prepared(example, folder, learning_rate=1e-20, global_batch_samples=1, epochs=1)
    plan = replace(PADDED, packing=Padded(samples=1))
    train(pool, single, plan)
    found = np.zeros(24)
    epoch = single.epoch(plan.packing, 1)
    for number, loss in enumerate(losses(single)):
        (row,) = epoch.step(number).packs[0][0]
        found[row] = loss
    return found


def test_a_change_that_cannot_be_made_is_refused_and_changes_nothing(shallow: Path, tmp_path: Path) -> None:
    begun = prepared(shallow, tmp_path)
    with pytest.raises(PlanNotValid, match=r"holds no training that plan [0-9a-f]{16} could continue; start one with"):
        change(begun, ZERO)
    output = begun.job.training.output
    open_output(output, training_settings(begun.request(PIPELINE, Training(output=output)), begun.index), PIPELINE)
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(PlanNotValid, match=r"cannot continue the training in .*: stages hold 3 vision layers"):
        change(begun, plan_of("3+2"))
    other = replace(
        begun, job=begun.job.model_copy(update={"training": begun.job.training.model_copy(update={"seed": 1})})
    )
    with pytest.raises(OutputTaken, match="belongs to a training with seed 0, not 1"):
        change(other, ZERO)
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}


@pytest.mark.long
@pytest.mark.usefixtures("home")
def test_a_training_goes_on_with_a_plan_that_only_its_folder_knows(
    shallow: Path, pool: WarmPool, tmp_path: Path
) -> None:
    begun = prepared(shallow, tmp_path)
    train(pool, begun, PIPELINE, max_steps=1)
    change(begun, ZERO)
    train(pool, begun, ZERO, max_steps=2)
    empty = f"sqlite:///{tmp_path / 'empty.db'}"
    launched = launch(begun.job, plan=ZERO.id[:8], steps=3, database=empty)
    assert (launched.steps, launched.report.steps) == (1, 3)
    back = launch(begun.job, resume_with=PIPELINE.id, steps=4, database=empty)
    assert (back.steps, back.report.steps) == (1, 4)
    assert len(losses(begun)) == 4
    with pytest.raises(UnknownPlan, match="no plan begins with 'f"):
        launch(begun.job, plan="f" * 16, database=empty)
