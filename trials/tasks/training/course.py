"""The course of a training: the sequence of its steps, also after changes of its plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import numpy as np

from trials.data.epoch import Epoch
from trials.data.records.sample import Ints
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
    """The remaining samples of the epoch, as rows of the index; None for all."""
    before: int
    """Total optimizer steps before the first one of the stretch."""
    steps: int
    """Steps that are run: the first ones of those that the plan builds from the samples."""
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


def set_course(changes: Sequence[PlanChange], plan: Plan, epochs: int, source: EpochSource) -> Course:
    """Return the course of a training of `epochs` epochs that continues with `plan` after the `changes`.

    After a change, the next plan packs the rest of the epoch: the samples that no step has trained on, each once, in
    the order of the epoch. Plans with equal packing and equally many packs in a row have equal steps, so a change
    between them is ignored.
    """
    parts = _parts(changes, plan)
    stretches: list[Stretch] = []
    before = 0
    for number in range(epochs):
        order, ends = None, False
        while not ends:
            current, end = next((each, end) for each, end in parts if end is None or before < end)
            epoch = source.build(number, current, order)
            ends = end is None or before + epoch.steps <= end
            steps = epoch.steps if ends or end is None else end - before
            stretches.append(
                Stretch(epoch=number, plan=current, order=order, before=before, steps=steps, ends_epoch=ends)
            )
            before += steps
            if not ends:
                order = _left(epoch, steps, source.order(number) if order is None else order)
    return Course(stretches=tuple(stretches))


def _parts(changes: Sequence[PlanChange], plan: Plan) -> list[tuple[Plan, int | None]]:
    """Return the plans with the steps at which each one ends; of those with equal steps only the last."""
    every = [*((change.plan, change.steps) for change in changes), (plan, None)]
    same = [_packs_equally(first, second) for (first, _), (second, _) in pairwise(every)]
    return [part for part, is_same in zip(every, [*same, False], strict=True) if not is_same]


def _packs_equally(first: Plan, second: Plan) -> bool:
    return _packs(first) == _packs(second)


def _packs(plan: Plan) -> tuple[Packing, int]:
    """Return what decides the steps of a plan: how packs are filled, and how many a row has."""
    packing, data = plan.packing, plan.layout.data
    if not isinstance(packing, Packed):
        return packing, data
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
