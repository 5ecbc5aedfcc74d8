"""Prediction of plans: seconds of each step of the epoch, and bytes of each stage."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, TypeVar

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.memory import PeakParts, StageBytes, StageMemory
from autotune.prediction.parts import Parts, told_apart
from autotune.prediction.simulation.attribution import Breakdown, attribute_all, begun_together, whole_seconds
from autotune.prediction.simulation.schedule import simulate_plans
from autotune.prediction.sizes import EpochSizes
from autotune.prediction.stage_times import StageTimes, between_nodes
from trials.arrays import Floats, Ints
from trials.costs.layer_costs import LayerCosts
from trials.data.epoch import Epoch
from trials.model.cut import cut
from trials.plan import Layout, Packing, Plan

EpochOf = Callable[[Packing, int], Epoch]
"""Function from a packing and a data-parallel degree to the first epoch."""
_Bytes = TypeVar("_Bytes")
_OfStages: TypeAlias = Callable[[Sequence[Parts], Layout, Ints, EpochSizes], tuple[_Bytes, ...]]
"""Function of stages as `StageMemory.intervals`."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Prediction of one plan's epoch."""

    step_seconds: Floats
    """Communication and update included, [steps]."""
    breakdown: Breakdown
    """Seconds of each step by part."""
    stage_idle: tuple[float, ...]
    """Share of the epoch in which the ranks of each stage wait, send or receive; 0.1 is 10 %."""
    step_samples: Ints
    """Samples of each step, [steps]."""
    stage_memory: tuple[StageBytes, ...]
    """Bytes of each stage on its fullest rank."""
    heaviest_step: int
    """Step in which the fullest stage is expected to need that many bytes."""
    batch_deviation: float
    """Deviation of the mean samples of a step from the job's global batch; 0.1 is 10 %."""
    keeps_batch: bool
    """Whether that is within `training.batch_tolerance`."""

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Expected bytes of each stage."""
        return tuple(stage.expected for stage in self.stage_memory)

    @property
    def epoch_seconds(self) -> float:
        return float(self.step_seconds.sum())

    @property
    def idle_share(self) -> float:
        """Share of the time of all ranks."""
        return float(np.mean(self.stage_idle))

    @property
    def step_distances(self) -> Floats:
        """Distance of each step from the means of seconds and samples, as a share, [steps]."""
        seconds, samples = self.step_seconds, self.step_samples
        distances: Floats = np.abs(seconds / seconds.mean() - 1) + np.abs(samples / samples.mean() - 1)
        return distances


class Predictor:
    """Prediction of plans for one workload from its layer costs."""

    def __init__(
        self,
        costs: LayerCosts,
        epoch_of: EpochOf,
        element_bytes: int,
        byte_factors: tuple[float, float] = (1.0, 1.0),
        *,
        sizes: type[EpochSizes] = EpochSizes,
        kept_epochs: int = 512,
    ) -> None:
        """`element_bytes` is the size of a weight in the training's dtype; `byte_factors` of static and kept bytes.

        Plans whose packs ranks share are predicted only with costs of their degree; others raise ValueError. The last
        `kept_epochs` epochs are kept.
        """
        self.costs = costs
        self.memory = StageMemory(costs, element_bytes, byte_factors)
        self.times = StageTimes(costs)
        self._element_bytes = element_bytes
        alone = lru_cache(maxsize=kept_epochs)(lambda packing, data: sizes(epoch_of(packing, data)))
        self._sizes = lru_cache(maxsize=kept_epochs)(lambda packing, data, tensor: alone(packing, data).held_by(tensor))
        self._epoch_of, self._byte_factors = epoch_of, byte_factors
        self._epoch_seconds: dict[Plan, float] = {}
        self._memory: dict[Plan, tuple[StageBytes, ...]] = {}

    def with_costs(self, costs: LayerCosts, byte_factors: tuple[float, float] = (1.0, 1.0)) -> "Predictor":
        """Return a predictor of the same workload with these costs, which shares the packs that were built."""
        if costs == self.costs and byte_factors == self._byte_factors:
            return self  # with the times that were predicted
        other = Predictor(costs, self._epoch_of, self._element_bytes, byte_factors)
        other._sizes = self._sizes  # building packs takes longer than predicting with them
        return other

    def sizes(self, packing: Packing, layout: Layout) -> EpochSizes:
        """Return the sizes of the packs and steps of the first epoch, cached."""
        return self._sizes(packing, layout.data, layout.tensor)

    def predict(self, plan: Plan) -> Prediction:
        sizes = self.sizes(plan.packing, plan.layout)
        of_levels = Parts.of_levels(plan)
        update = self.times.update_parts(plan.layout, of_levels[0], sizes)
        waiting = self.times.waiting(of_levels[0], plan.layout, sizes)
        seconds = self.times.plan_seconds(plan, sizes)
        breakdown, of_steps = attribute_all(sizes.blocks, seconds, update, waiting=waiting)
        work = of_steps.sum(axis=0) / plan.layout.data
        busy = work + len(breakdown.ideal) * (update.reduction + update.optimizer)
        whole = float(breakdown.seconds.sum()) or 1.0  # costs may all be 0
        memory = self.stage_memory(plan, sizes)
        fullest = int(np.argmax([stage.expected for stage in memory]))
        return Prediction(
            step_seconds=breakdown.seconds,
            breakdown=breakdown,
            stage_idle=tuple((1 - busy / whole).tolist()),
            step_samples=sizes.step_samples,
            stage_memory=memory,
            heaviest_step=self.memory.heaviest_step(of_levels, plan.layout, fullest, sizes),
            batch_deviation=sizes.epoch.batch_deviation,
            keeps_batch=sizes.epoch.keeps_batch,
        )

    def step_seconds(self, plan: Plan, steps: Sequence[int]) -> Floats:
        """Return the seconds of these steps of the epoch, in the order of `ChosenSteps`."""
        seconds: Floats = self.plans_step_seconds((plan,), ChosenSteps(self.sizes(plan.packing, plan.layout), steps))[0]
        return seconds

    def epoch_seconds(self, plan: Plan) -> float:
        """Return `predict(plan).epoch_seconds` in less time."""
        return self.plans_epoch_seconds((plan,))[0]

    def plans_epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the epoch seconds of each plan, which are cached; plans together take less time than one by one."""
        kept = self._epoch_seconds
        for group in _sharing_packs(plan for plan in dict.fromkeys(plans) if plan not in kept):
            sizes = self.sizes(group[0].packing, group[0].layout)
            seconds = self.plans_step_seconds(group, sizes)
            seconds = seconds.sum(axis=1) * (sizes.epoch_steps / seconds.shape[1])
            kept |= dict(zip(group, seconds.tolist(), strict=True))
        return [kept[plan] for plan in plans]

    def plans_step_seconds(self, plans: Sequence[Plan], sizes: EpochSizes) -> Floats:
        """Return the step seconds of plans that share packing and layout, [plans, steps]."""
        layout = plans[0].layout
        if len(plans[0].packing.degrees) > 1 or layout.shards_gradients:
            return np.stack([self._whole_step_seconds(plan, sizes) for plan in plans])
        # Most stages of the plans are alike.
        parts, stages = Parts.of_plans(plans)
        # Where a stage sends its states, and when it computes deferred weight gradients, depends on its number; which
        # states it sends, on the layers before it.
        counts = layout.zero_bubble or any(between_nodes(self.costs, layout))
        numbers = np.arange(layout.pipeline) * counts
        further = self.times.further_states(parts.layers[stages])
        most = int(further.max()) + 1
        parts, stages, places = told_apart(parts, stages, numbers * most + further)
        packs = self.times.pack_seconds(parts, layout, sizes, *divmod(places, most))
        passes = (packs.shared_forward, packs.shared_backward, packs.sends, packs.returns)
        of_packs = [np.ascontiguousarray(side.T) for side in passes]  # [stages, packs]; each block gathers from rows
        deferred = packs.deferred
        # All data ranks of a stage reduce together, so the slowest of them decides.
        update = self.times.update_parts(layout, parts, sizes)
        after, together = update.seconds[stages.T, None], update.together[stages]
        seconds = []
        for block in sizes.timed_blocks:
            of_ranks = block.transpose(1, 0, 2).reshape(block.shape[1], -1)  # each data rank as a step of its own
            weights = deferred and deferred._replace(seconds=deferred.seconds[of_ranks.T])
            ends = simulate_plans(stages, *(side[:, of_ranks] for side in of_packs), weights=weights)
            ends = ends.reshape(*ends.shape[:2], len(block), layout.data).max(axis=3)
            begins = begun_together(ends.transpose(2, 1, 0), together).transpose(2, 1, 0)
            seconds.append((begins + after).max(axis=0))
        return np.concatenate(seconds, axis=1)

    def _whole_step_seconds(self, plan: Plan, sizes: EpochSizes) -> Floats:
        """Return the seconds of steps in which data ranks may wait for each other, [steps]."""
        parts = Parts.of(cut(plan))
        update = self.times.update_parts(plan.layout, parts, sizes)
        waiting = self.times.waiting(parts, plan.layout, sizes)
        seconds = self.times.plan_seconds(plan, sizes)
        return np.concatenate([whole_seconds(block, seconds, update, waiting) for block in sizes.timed_blocks])

    def stage_memory(self, plan: Plan, sizes: EpochSizes) -> tuple[StageBytes, ...]:
        """Return the interval of the bytes of each stage of one plan."""
        return self.memory.intervals(Parts.of_levels(plan), plan.layout, np.arange(plan.layout.pipeline), sizes)

    def plans_memory(self, plans: Sequence[Plan]) -> list[tuple[StageBytes, ...]]:
        """Return the intervals of the stages of each plan, which are cached."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self._memory]
        self._memory |= dict(zip(new, self._of_stages(new, self.memory.intervals), strict=True))
        return [self._memory[plan] for plan in plans]

    def plans_bytes(self, plans: Sequence[Plan]) -> list[tuple[float, ...]]:
        """Return the expected bytes of the stages of each plan, in less time than intervals."""
        return self._of_stages(plans, self.memory.expected_of_levels)

    def _of_stages(self, plans: Sequence[Plan], function: _OfStages[_Bytes]) -> list[tuple[_Bytes, ...]]:
        """Return what a function returns of the stages of each plan; most stages of similar plans are alike."""
        found: dict[Plan, tuple[_Bytes, ...]] = {}
        for group in _sharing_packs(plans):
            packing, layout = group[0].packing, group[0].layout
            sizes = self.sizes(packing, layout)
            if len(packing.degrees) > 1:
                numbers = np.arange(layout.pipeline)
                found |= {plan: function(Parts.of_levels(plan), layout, numbers, sizes) for plan in group}
                continue
            parts, stages = Parts.of_plans(group)
            parts, stages, numbers = told_apart(parts, stages, np.arange(layout.pipeline))
            of_parts = function((parts,), layout, numbers, sizes)
            for plan, of_plan in zip(group, stages.tolist(), strict=True):
                found[plan] = tuple(of_parts[row] for row in of_plan)
        return [found[plan] for plan in plans]

    def peak_parts(self, plan: Plan) -> tuple[PeakParts, ...]:
        """Return the parts of the expected peak bytes of each stage."""
        of_levels, sizes = Parts.of_levels(plan), self.sizes(plan.packing, plan.layout)
        return tuple(
            self.memory.peak_parts(of_levels, plan.layout, number, sizes) for number in range(plan.layout.pipeline)
        )


def _sharing_packs(plans: Iterable[Plan]) -> Iterable[list[Plan]]:
    """Group plans by packing and layout."""
    groups: dict[tuple[Packing, Layout], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.packing, plan.layout), []).append(plan)
    return groups.values()
