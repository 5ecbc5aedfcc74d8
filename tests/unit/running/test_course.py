"""A training whose plan changes: every sample of each epoch once, and equal steps where nothing is packed anew."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.values.data import index_of
from tests.values.parameters import examples
from trials.arrays import Ints
from trials.data.epoch import CostWeights, Epoch, EpochSettings, build_epoch
from trials.data.index import DatasetIndex
from trials.data.order import epoch_order
from trials.data.packs import Oversize
from trials.plan import Layout, Levelled, Packed, Packing, Padded, Plan, ZeroStage
from trials.stage import Recomputed, Stage
from trials.tasks.training.course import Curriculum, Stretch, follow_pace, set_course
from trials.tasks.training.output import PlanChange
from trials.tasks.training.schedule import Schedule


def plan(packing: Packing, data: int = 1, zero: ZeroStage = 0) -> Plan:
    return Plan(packing=packing, layout=Layout(pipeline=1, data=data, zero=zero), stages=(Stage(vision=4, language=2),))


TWO, THREE = plan(Padded(samples=2), 2), plan(Padded(samples=3))
PACKS = plan(Packed(qv=20, qt=400, qv_min=16, qt_min=350), 2)
LEVELS = Levelled(
    levels=(Packed(qv=10, qt=120, qv_min=0, qt_min=0), Packed(qv=20, qt=400, qv_min=0, qt_min=0, sequence=2))
)
CURRICULUM_PLANS = {
    "padded": TWO,
    "packed": PACKS,
    "shared": plan(Packed(qv=20, qt=400, qv_min=16, qt_min=350, sequence=2), 4),
    "levels": replace(
        plan(PACKS.packing, 2),
        packing=LEVELS,
        stages=(Stage(vision=4, language=2, further_levels=(Recomputed(vision=0, language=0),)),),
    ),
}
PLANS = (TWO, THREE, PACKS, replace(PACKS, layout=Layout(pipeline=1, data=2, zero=1)))


@dataclass(frozen=True)
class Source:
    """Epochs of an index in steps of about 4 samples."""

    index: DatasetIndex
    oversize: Oversize = "own-pack"

    def order(self, number: int) -> Ints:
        return epoch_order(self.index, 0, number)

    def build(self, number: int, plan: Plan, order: Ints | None) -> Epoch:
        return build_epoch(
            self.index,
            plan.packing,
            EpochSettings(
                global_batch_samples=4,
                weights=CostWeights(unit=100.0, token=1.0, square=0.01),
                oversize=self.oversize,
            ),
            data_parallel=plan.layout.data,
            order=order,
            number=number,
        )


def rows_of(data: Source, stretches: Sequence[Stretch]) -> list[int]:
    """Return the samples in the steps of the stretches."""
    rows: list[int] = []
    for stretch in stretches:
        epoch = data.build(stretch.epoch, stretch.plan, stretch.order)
        steps = map(epoch.step, range(stretch.steps))
        rows += [int(row) for step in steps for packs in step.packs for pack in packs for row in pack]
    return rows


def source(samples: int, *repeats: float) -> Source:
    random = np.random.default_rng(samples)
    sizes = zip(random.integers(0, 6, samples).tolist(), random.integers(5, 300, samples).tolist(), strict=True)
    return Source(index_of(list(sizes), repeats or (1.0,)))


@settings(max_examples=examples(60))
@given(
    st.integers(2, 30),
    st.sampled_from([(1.0,), (1.5, 1.0)]),
    st.lists(st.tuples(st.sampled_from(PLANS), st.integers(1, 12)), max_size=3),
    st.sampled_from(PLANS),
    st.tuples(st.integers(0, 9), st.integers(0, 300)),
)
def test_every_epoch_has_each_sample_once_and_short_ones_first_whatever_the_plans(
    samples: int,
    repeats: tuple[float, ...],
    parts: list[tuple[Plan, int]],
    last: Plan,
    beginning: tuple[int, int],
) -> None:
    data = source(samples, *repeats)
    ends = np.cumsum([steps for _, steps in parts]).tolist()
    changes = [PlanChange(plan=each, steps=end) for (each, _), end in zip(parts, ends, strict=True)]
    steps, most = beginning
    is_short = data.index.text_tokens <= most
    course = set_course(changes, last, 2, data, Curriculum(steps=steps, samples=is_short))
    short = Counter(row for row in data.order(0).tolist() if is_short[row])
    shown = [Counter[int](), Counter[int]()]
    step = 0
    for stretch in course.stretches:
        assert stretch.before == step
        epoch = data.build(stretch.epoch, stretch.plan, stretch.order)
        for number in range(stretch.steps):
            running = next((change.plan for change in changes if step < change.steps), last)
            assert (running.packing, running.layout.data) == (stretch.plan.packing, stretch.plan.layout.data)
            rows = [int(row) for packs in epoch.step(number).packs for pack in packs for row in pack]
            if step < steps and stretch.epoch == 0 and short - shown[0]:
                assert is_short[rows].all()
            shown[stretch.epoch].update(rows)
            step += 1
    assert course.steps == step
    assert shown == [Counter(data.order(0).tolist()), Counter(data.order(1).tolist())]
    assert [stretch.epoch for stretch in course.stretches if stretch.ends_epoch] == [0, 1]


@pytest.mark.parametrize("skipped", ["the rest", "short ones"])
def test_an_epoch_ends_when_all_that_is_left_is_skipped(skipped: str) -> None:
    """What is above the plan's Qt of 400, or its Qv of 20, is left out."""
    over = (0, 500) if skipped == "the rest" else (50, 90)
    sizes = [(1, 100)] * 12 + [over] * 3 + [(1, 300)] * (0 if skipped == "the rest" else 6)
    data = Source(index_of(sizes), "skip")
    course = set_course([], PACKS, 2, data, Curriculum(steps=9, samples=data.index.text_tokens <= 150))
    assert [stretch.epoch for stretch in course.stretches if stretch.ends_epoch] == [0, 1]
    of_first = [each for each in course.stretches if each.epoch == 0]
    assert len(of_first) == (1 if skipped == "the rest" else 2)
    assert not set(rows_of(data, of_first)) & {12, 13, 14}
    assert sorted(rows_of(data, of_first)) == sorted(rows_of(data, [course.stretches[-1]]))


@pytest.mark.parametrize("plan", CURRICULUM_PLANS.values(), ids=CURRICULUM_PLANS)
def test_a_curriculum_ends_after_its_steps_under_every_plan(plan: Plan) -> None:
    data = source(60)
    is_short = data.index.text_tokens <= 150
    course = set_course([], plan, 2, data, Curriculum(steps=3, samples=is_short))
    first, rest, later = course.stretches
    assert [(each.epoch, each.before, each.ends_epoch) for each in course.stretches] == [
        (0, 0, False),
        (0, 3, True),
        (1, 3 + rest.steps, True),
    ]
    assert (first.steps, later.order) == (3, None)
    assert course.epoch_ends == {3 + rest.steps, course.steps}
    assert rest.order is not None
    # Some short ones are left for the usual mixture.
    assert 0 < np.count_nonzero(is_short[rest.order]) < np.count_nonzero(is_short)
    assert np.count_nonzero(~is_short[rest.order]) == np.count_nonzero(~is_short)


@pytest.mark.parametrize(("steps", "most"), [(0, 150), (5, 0), (5, 300)])
def test_a_curriculum_of_no_steps_or_of_no_or_all_samples_changes_nothing(steps: int, most: int) -> None:
    data = source(30)
    curriculum = Curriculum(steps=steps, samples=data.index.text_tokens <= most)
    found, plain = (set_course([], PACKS, 2, data, each) for each in (curriculum, None))
    assert [(each.order, each.steps, each.ends_epoch) for each in found.stretches] == [
        (None, each.steps, True) for each in plain.stretches
    ]


def test_plans_that_pack_equally_have_the_same_course() -> None:
    data = source(30)
    changed = set_course([PlanChange(plan=PLANS[2], steps=2)], PLANS[3], 2, data)
    plain = set_course([], PLANS[2], 2, data)
    assert [(each.epoch, each.steps, each.order) for each in changed.stretches] == [
        (each.epoch, each.steps, each.order) for each in plain.stretches
    ]


def test_a_schedule_ends_with_the_training_and_has_no_leap_at_a_change() -> None:
    data = source(40)
    changes = [PlanChange(plan=plan(Padded(samples=4)), steps=4), PlanChange(plan=THREE, steps=7)]
    plans = (changes[0].plan, THREE, plan(Padded(samples=4)))
    courses = [set_course(changes[:number], each, 1, data) for number, each in enumerate(plans)]
    assert [course.steps for course in courses] == [10, 12, 11]
    pace = follow_pace(courses, changes, None)
    assert pace == ((0, 0.0), (4, 4.0), (7, 4 + 6 * 3 / 8), (11, 10.0))
    schedule = Schedule(name="linear", warmup=2, total=10, pace=pace)
    factors = [schedule.factor(step) for step in range(1, 13)]
    assert factors[:5] == [0, 0.5, 1, 1 - 1 / 8, 1 - 2 / 8]
    assert factors[-1] == pytest.approx(0)
    falls = -np.diff(factors[2:])
    assert min(falls) > 0.05 < max(falls) < 0.2
    assert follow_pace(courses, changes, 8)[-1] == (8, 8.0)
