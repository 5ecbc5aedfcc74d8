"""The course of a training: the sequence of its steps, also after changes of its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trials.arrays import Ints
from trials.data.epoch import Epoch
from trials.data.index import DatasetIndex
from trials.errors import AllSkipped
from trials.job import TrainingSection
from trials.plan import Packed, Packing, Plan
from trials.tasks.training.output import PlanChange


class EpochSource(Protocol):
    """The epochs of a training's data."""

    def order(self, number: int) -> Ints:
        """Return the samples of epoch `number` in their order, as rows of the index, repeats included."""

    def build(self, number: int, plan: Plan, order: Ints | None) -> Epoch:
        """Return the steps of epoch `number` under a plan: of the samples in `order`, or of all."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stretch:
    """Consecutive steps of one epoch under one plan."""

    epoch: int
    plan: Plan
    order: Ints | None
    """The samples of which the plan makes its steps, as rows of the index; None for all of the epoch."""
    before: int
    """Total optimizer steps before the first one of the stretch."""
    steps: int
    """Steps that are run: the first ones that the plan makes."""
    ends_epoch: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Course:
    """All steps of a training, in order."""

    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        return sum(stretch.steps for stretch in self.stretches)

    @property
    def epoch_ends(self) -> frozenset[int]:
        """Total steps at the end of each epoch."""
        return frozenset(stretch.before + stretch.steps for stretch in self.stretches if stretch.ends_epoch)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Curriculum:
    """The first steps of a training, of some samples alone."""

    steps: int
    """Steps of these samples alone. With a plan that needs fewer for all of them, the curriculum ends sooner."""
    samples: NDArray[np.bool_]
    """Whether the curriculum has a sample, by its row in the index."""


def curriculum_of(training: TrainingSection, index: DatasetIndex) -> Curriculum | None:
    """Return the curriculum of a training; None where it begins with all samples."""
    settings = training.curriculum
    if settings.steps is None or settings.max_tokens is None:
        return None
    return Curriculum(steps=settings.steps, samples=index.text_tokens <= settings.max_tokens)


def set_course(
    changes: Sequence[PlanChange],
    plan: Plan,
    epochs: int,
    source: EpochSource,
    curriculum: Curriculum | None = None,
) -> Course:
    """Return the course of a training of `epochs` epochs that continues with `plan` after the `changes`.

    After a change, and after the curriculum, the rest of the epoch is packed: the samples that no step has trained on,
    each once, in the order of the epoch. Plans with equal packing and equally many packs in a row have equal steps, so
    a change between them is ignored.

    Raise AllSkipped where an epoch begins with samples that are all skipped as over-size.
    """
    parts = _parts(changes, plan)
    stretches: list[Stretch] = []
    before = 0
    for number in range(epochs):
        left, ends = None, False
        while not ends:
            current, end = next((each, end) for each, end in parts if end is None or before < end)
            order = left
            if curriculum and number == 0 and before < curriculum.steps:
                every = source.order(number) if left is None else left
                chosen = every[curriculum.samples[every]]
                # A curriculum of no samples, or of all, changes nothing.
                if 0 < len(chosen) < len(every):
                    order, end = chosen, curriculum.steps if end is None else min(curriculum.steps, end)
            try:
                epoch = source.build(number, current, order)
            except AllSkipped:
                if left is None:
                    raise
                # Nothing that is left fits: the curriculum is over, or, without one, the epoch.
                if order is left:
                    stretches[-1] = replace(stretches[-1], ends_epoch=True)
                    break
                curriculum = None
                continue
            steps = epoch.steps if end is None else min(epoch.steps, end - before)
            # A curriculum never ends its epoch: the other samples are left.
            ends = steps == epoch.steps and order is left
            stretches.append(
                Stretch(epoch=number, plan=current, order=order, before=before, steps=steps, ends_epoch=ends)
            )
            before += steps
            if not ends:
                left = _left(epoch, steps, source.order(number) if left is None else left)
    return Course(stretches=tuple(stretches))


def _parts(changes: Sequence[PlanChange], plan: Plan) -> list[tuple[Plan, int | None]]:
    """Return the plans with the steps at which each one ends; of plans with equal steps only the last."""
    every = [*((change.plan, change.steps) for change in changes), (plan, None)]
    same = [_packs(first) == _packs(second) for (first, _), (second, _) in pairwise(every)]
    return [part for part, is_same in zip(every, [*same, False], strict=True) if not is_same]


def _packs(plan: Plan) -> tuple[Packing, int]:
    """Return what decides the steps of a plan: how packs are filled, and how many a row has."""
    packing, data = plan.packing, plan.layout.data
    if not isinstance(packing, Packed):
        return packing, data
    # In a row, each group of ranks that share a pack takes one pack, as a single rank does.
    return replace(packing, sequence=1), data // packing.sequence


def _left(epoch: Epoch, steps: int, order: Ints) -> Ints:
    """Return the samples in `order` that the first `steps` steps of their epoch leave, skipped ones included."""
    done = [pack for number in range(steps) for of_rank in epoch.step(number).packs for pack in of_rank]
    times = np.bincount(np.concatenate(done), minlength=len(epoch.index))
    # A sample that an epoch repeats is left once for each time that it was not trained on.
    sorting = np.argsort(order, kind="stable")
    starts = np.searchsorted(order[sorting], order[sorting])
    occurrence = np.empty(len(order), dtype=np.int64)
    occurrence[sorting] = np.arange(len(order)) - starts
    return order[occurrence >= times[order]]


def follow_pace(
    courses: Sequence[Course], changes: Sequence[PlanChange], most: int | None
) -> tuple[tuple[int, float], ...]:
    """Map steps of a training to positions in the schedule of its first plan: ascending (steps, position).

    `courses` are those before each change and after the last one; `most` is `training.max_steps`. Between two entries
    the position is linear. So the schedule does not jump at a change, and ends with the training's last step.
    """
    end = _total(courses[0], most)
    pace = [(0, 0.0)]
    for change, course in zip(changes, courses, strict=False):
        last, position = pace[-1]
        left = _total(course, most) - last
        share = (change.steps - last) / left if left else 1.0
        pace.append((change.steps, position + share * (end - position)))
    return (*pace, (_total(courses[-1], most), float(end)))


def _total(course: Course, most: int | None) -> int:
    return min(course.steps, most or course.steps)
