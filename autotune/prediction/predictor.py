"""Prediction of plans: seconds of each step of the epoch, and bytes of each stage."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from autotune.prediction.chosen_steps import ChosenSteps
from autotune.prediction.columns import WITHOUT_TARGETS, in_columns
from autotune.prediction.curves import Curves
from autotune.prediction.freeing import Freeing
from autotune.prediction.memory import PeakParts, StageBytes, StageMemory
from autotune.prediction.parameters import Parameters
from autotune.prediction.parts import LANGUAGE, PROJECTOR, Parts, numbered
from autotune.prediction.simulation.attribution import (
    Breakdown,
    PackSeconds,
    Slowness,
    UpdateSeconds,
    attribute_all,
    whole_seconds,
)
from autotune.prediction.simulation.meetings import Sharing
from autotune.prediction.simulation.schedule import simulate_plans
from autotune.prediction.sizes import EpochSizes
from trials.arrays import Floats, Ints
from trials.data.epoch import Epoch
from trials.engine.static_memory import GRADIENT_BYTES
from trials.layer_costs import KINDS, LayerCosts
from trials.model.cut import cut
from trials.plan import Layout, Packing, Plan

EpochOf = Callable[[Packing, int], Epoch]
"""Function from a packing and a data-parallel degree to the first epoch."""


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
        self._memory = StageMemory(costs, element_bytes, byte_factors)
        self.layer_bytes = self._memory.of_layers  # (degree, layout) -> LayerBytes
        # One row of coefficients per kind of layer.
        layers = [costs[kind] for kind in KINDS]
        self._forward = in_columns(layer.forward_seconds for layer in layers)
        self._backward = in_columns(layer.backward_seconds for layer in layers)
        self._curves, self._freeing = Curves(costs), Freeing(costs)
        self._outputs = in_columns(layer.output_bytes for layer in layers)
        self._parameters = Parameters(costs)
        self._has_backward = np.array([layer.has_backward for layer in layers])
        self._element_bytes = element_bytes
        alone = lru_cache(maxsize=kept_epochs)(lambda packing, data: sizes(epoch_of(packing, data)))
        self._sizes = lru_cache(maxsize=kept_epochs)(lambda packing, data, tensor: alone(packing, data).held_by(tensor))
        self._epoch_of, self._byte_factors = epoch_of, byte_factors
        self._epoch_seconds: dict[Plan, float] = {}

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
        update = self.update_parts(plan.layout, of_levels[0], sizes)
        sharing = self.sharing(of_levels[0], plan.layout, sizes)
        breakdown, of_steps = attribute_all(sizes.blocks, self.plan_seconds(plan, sizes), update, sharing=sharing)
        work = of_steps.sum(axis=0) / plan.layout.data
        busy = work + len(breakdown.ideal) * (update.reduction + update.optimizer)
        whole = float(breakdown.seconds.sum()) or 1.0  # costs may all be 0
        return Prediction(
            step_seconds=breakdown.seconds,
            breakdown=breakdown,
            stage_idle=tuple((1 - busy / whole).tolist()),
            step_samples=sizes.step_samples,
            stage_memory=self.stage_memory(plan, sizes),
            batch_deviation=sizes.epoch.batch_deviation,
            keeps_batch=sizes.epoch.keeps_batch,
        )

    def attributed(
        self, parts: Parts, layout: Layout, sizes: EpochSizes, update: UpdateSeconds, slowness: Slowness | None = None
    ) -> tuple[Breakdown, Floats]:
        """Return what `attribute` does, for the steps of one plan in the order of the blocks of `sizes`."""
        sharing = self.sharing(parts, layout, sizes)
        return attribute_all(sizes.blocks, self.pack_seconds(parts, layout, sizes), update, slowness, sharing)

    def sharing(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> Sharing | None:
        """Return which ranks of these stages wait for each other; None where they share all their packs, or none.

        With ZeRO 2 all data ranks exchange gradients in each backward pass, with ZeRO 3 weights in both passes.
        """
        if layout.shares_gradients:
            every = np.full_like(sizes.degrees, layout.data)
            return Sharing(degrees=every, forward=np.array([layout.shares_weights]), backward=np.array([True]))
        if len(np.unique(sizes.degrees)) == 1:
            return None
        layers = parts.layers[:, [PROJECTOR, LANGUAGE]] > 0
        forward, backward = (
            np.logical_or.reduce(exchanging, axis=1)
            for exchanging in (layers, layers & self._has_backward[[PROJECTOR, LANGUAGE]])
        )
        return Sharing(degrees=sizes.degrees, forward=forward, backward=backward)

    def plan_seconds(self, plan: Plan, sizes: EpochSizes) -> PackSeconds:
        """Return the seconds of all packs on the stages of a plan, which recompute as the level of a pack says."""
        several = [self.pack_seconds(parts, plan.layout, sizes) for parts in Parts.of_levels(plan)]
        return several[0] if len(several) == 1 else PackSeconds.by_level(several, sizes.levels)

    def update_parts(self, layout: Layout, parts: Parts, sizes: EpochSizes) -> UpdateSeconds:
        """Return the seconds of reduction and optimizer of the stages of one plan, after the passes of a step.

        ZeRO 2 and 3 reduce in each backward pass. With `bucket_bytes` a mean backward pass hides a share of it.
        """
        parameters = self._parameters.trained(parts, layout.tensor)
        reduction = np.zeros(len(parts))
        if layout.data > 1 and not layout.shares_gradients:
            cost = self.costs.communication(layout)
            reduction += parameters * GRADIENT_BYTES * cost.reduce_seconds_per_byte
            if layout.bucket_bytes:
                _, backward = self.pass_seconds(parts.before_head, layout, sizes.mean)
                reduction -= cost.hidden_share * np.minimum(reduction, backward[0])
        if layout.tensor > 1:  # of what its ranks hold whole, as if they were data ranks
            replicas = self._parameters.replicated(parts)
            alike = self.costs.communication(replace(layout, data=layout.tensor, tensor=1, reduce_within=1))
            reduction += replicas * GRADIENT_BYTES * alike.reduce_seconds_per_byte
        return UpdateSeconds(
            reduction=reduction,
            optimizer=parameters * self.costs.update_seconds_per_parameter(layout),
        )

    def step_seconds(self, plan: Plan, steps: Sequence[int]) -> Floats:
        """Return the seconds of these steps of the epoch, in the order of `ChosenSteps`."""
        seconds: Floats = self.plans_step_seconds((plan,), ChosenSteps(self.sizes(plan.packing, plan.layout), steps))[0]
        return seconds

    def epoch_seconds(self, plan: Plan) -> float:
        """Return the same as `predict(plan).epoch_seconds`, in less time."""
        return self.plans_epoch_seconds((plan,))[0]

    def plans_epoch_seconds(self, plans: Sequence[Plan]) -> list[float]:
        """Return the epoch seconds of each plan, in less time than one by one; they are kept."""
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
        if len(plans[0].packing.degrees) > 1 or layout.shares_gradients:
            return np.stack([self._whole_step_seconds(plan, sizes) for plan in plans])
        # Most stages of the plans are alike.
        parts, stages = Parts.of_plans(plans)
        numbers = None
        if any(self.costs.between_nodes(layout)):  # where a stage sends its states depends on its number
            parts, stages, numbers = numbered(parts, stages)
        packs = self.pack_seconds(parts, layout, sizes, numbers)
        passes = (packs.shared_forward, packs.shared_backward, packs.sends, packs.returns)
        of_packs = [np.ascontiguousarray(side.T) for side in passes]  # [stages, packs]; each block gathers from rows
        # All data ranks of a stage reduce together, so the slowest of them decides.
        update = self.update_parts(layout, parts, sizes).seconds[stages.T, None]
        seconds = []
        for block in sizes.timed_blocks:
            of_ranks = block.transpose(1, 0, 2).reshape(block.shape[1], -1)  # each data rank as a step of its own
            ends = simulate_plans(stages, *(side[:, of_ranks] for side in of_packs))
            ends = ends.reshape(*ends.shape[:2], len(block), layout.data).max(axis=3)
            seconds.append((ends + update).max(axis=0))
        return np.concatenate(seconds, axis=1)

    def _whole_step_seconds(self, plan: Plan, sizes: EpochSizes) -> Floats:
        """Return the seconds of steps in which data ranks may wait for each other, [steps]."""
        parts = Parts.of(cut(plan))
        update, sharing = self.update_parts(plan.layout, parts, sizes), self.sharing(parts, plan.layout, sizes)
        seconds = self.plan_seconds(plan, sizes)
        return np.concatenate([whole_seconds(block, seconds, update, sharing) for block in sizes.timed_blocks])

    def pack_seconds(self, parts: Parts, layout: Layout, sizes: EpochSizes, numbers: Ints | None = None) -> PackSeconds:
        """Return the seconds of all packs on stages with these `numbers`, by default those of one plan in order."""
        forward, backward = self.pass_seconds(parts, layout, sizes.table)
        latency, per_byte = self._links(layout, np.arange(len(parts)) if numbers is None else numbers)
        # A stage sends what its last layer outputs; the last stage sends nothing.
        last = len(KINDS) - 1 - np.argmax(parts.layers[:-1, ::-1] > 0, axis=1)
        sends = latency + per_byte * (sizes.table @ self._outputs[last].T)
        curves = self._curves.at(sizes.table)
        alone = sizes.samples_alone @ (self._forward + self._backward).T
        exchange, exchange_back = self.exchange_seconds(parts, layout, sizes.table, sizes.degrees)
        return PackSeconds(
            # Each rank prepares the images of the whole pack.
            load=self.load_seconds(parts, sizes.whole),
            forward=forward,
            backward=backward,
            recompute=self._freeing.seconds(sizes.table, curves, layout) @ parts.recomputed.T,
            samples=(curves * alone) @ parts.layers.T,
            sends=sends,
            returns=sends * self._has_backward[last],
            exchange=exchange,
            exchange_back=exchange_back,
        )

    def _links(self, layout: Layout, numbers: Ints) -> Floats:
        """Return (latency, seconds per byte) of all but the last of these stages, [2, stages], or [2, 1] if alike."""
        cost, leaving = self.costs.communication(layout), self.costs.between_nodes(layout)
        links = [(leaves and cost.between) or cost.link for leaves in (leaving if any(leaving) else leaving[:1])]
        times = np.array([(link.latency_seconds, link.seconds_per_byte) for link in links]).T
        return times[:, numbers[:-1]] if any(leaving) else times

    def exchange_seconds(self, parts: Parts, layout: Layout, sizes: Floats, degrees: Ints) -> tuple[Floats, Floats]:
        """Return the seconds of what ranks exchange in the passes of packs (forward, backward with recomputation).

        It is what ranks that compute a pack exchange, and with ZeRO 2 and 3 what all data ranks do. `sizes` [packs, 5]
        are those of a rank's part, `degrees` [packs] the numbers of data ranks that compute it, each with the tensor
        ranks of the layout; shapes as in `pass_seconds`.
        """
        tensor = layout.tensor
        forward, backward = np.zeros((2, len(sizes), len(parts))) + self._sharded_seconds(parts, layout)[:, None]
        language, again, projects = (
            parts.layers[:, LANGUAGE],
            parts.recomputed[:, LANGUAGE] * (not layout.offloads("language")),
            parts.layers[:, PROJECTOR],
        )
        for degree in np.unique(degrees[degrees * tensor > 1]).tolist():
            packs, together = np.flatnonzero(degrees == degree), self.costs.shared_by(degree * tensor)
            of_layer = np.zeros((2, 4))
            if degree > 1:
                cost = self.costs.shared_by(degree)
                of_layer += (cost.language_forward_seconds, cost.language_backward_seconds)
            if tensor > 1:
                around = self.costs.cut_in(tensor)
                of_layer += (around.forward_seconds, around.backward_seconds)
            in_layer, back_in_layer, behind, back_behind = (
                sizes[packs, WITHOUT_TARGETS] @ np.array(coefficients)
                for coefficients in (
                    *of_layer,
                    together.projector_forward_seconds,
                    together.projector_backward_seconds,
                )
            )
            forward[packs] += np.outer(in_layer, language) + np.outer(behind, projects)
            of_layers = np.outer(back_in_layer, language) + np.outer(in_layer, again)
            backward[packs] += self._has_backward[LANGUAGE] * of_layers
            backward[packs] += self._has_backward[PROJECTOR] * np.outer(back_behind, projects)
        return forward, backward

    def _sharded_seconds(self, parts: Parts, layout: Layout) -> Floats:
        """Return the seconds of what ZeRO 2 and 3 exchange in each (forward, backward) pass, [2, stages].

        ZeRO 2 averages gradients over all ranks. ZeRO 3 gathers the weights of each layer for either pass, and scatters
        the sums of gradients; a layer that is recomputed for its backward pass is gathered once for both.
        """
        forward, backward = np.zeros((2, len(parts)))
        gradients = GRADIENT_BYTES * self._parameters.trained(parts)
        if layout.shares_gradients and not layout.shares_weights:
            backward = gradients * self.costs.communication(layout).reduce_seconds_per_byte
        elif layout.shares_weights:
            cost = self.costs.gathered_by(layout.data)
            seconds = np.array(cost.seconds)
            forward = parts.layers @ seconds
            # The weights of the head stay for the backward pass, which begins there.
            backward = parts.layers[:, :-1] @ (seconds * self._has_backward)[:-1]
            backward += gradients * cost.scatter_seconds_per_byte
        return np.stack((forward, backward))

    def pass_seconds(self, parts: Parts, layout: Layout, sizes: Floats) -> tuple[Floats, Floats]:
        """Return (forward, backward with `Freeing`) seconds of packs [packs, stages]; `sizes` are [packs, 5]."""
        curves = self._curves.at(sizes)
        freeing = self._freeing.seconds(sizes, curves, layout)
        forward, backward = (curves * (sizes @ side.T) for side in (self._forward, self._backward))
        return forward @ parts.layers.T, backward @ parts.layers.T + freeing @ parts.recomputed.T

    def load_seconds(self, parts: Parts, sizes: Floats) -> Floats:
        """Return the seconds of loading packs on the stages that need pixels or labels; shapes as in `pass_seconds`."""
        embeds, heads = (parts.layers[:, [KINDS.index(kind)]] for kind in ("vision_embedding", "head"))
        loading = self.costs.loading
        of_stages = embeds * np.array(loading.pixels_seconds) + heads * (1 - embeds) * np.array(loading.labels_seconds)
        seconds: Floats = sizes[:, WITHOUT_TARGETS] @ of_stages.T
        return seconds

    def stage_bytes(self, parts: Parts, layout: Layout, numbers: Ints | int, sizes: EpochSizes) -> Floats:
        """Return the expected bytes of each of `parts` as the stage of its number, [stages]; see `StageMemory`."""
        return self._memory.expected(parts, layout, numbers, sizes)

    def heaviest_bytes(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> tuple[Floats, Floats]:
        """Return what the heaviest pack keeps, as `StageMemory.of_heaviest` does."""
        return self._memory.of_heaviest(parts, layout, sizes)

    def freed_bytes(self, in_flight: Ints, layout: Layout, sizes: EpochSizes) -> Floats:
        """Return what recomputing layers saves at most, as `StageMemory.freed` does."""
        return self._memory.freed(in_flight, layout, sizes)

    def static_bytes(self, parts: Parts, layout: Layout) -> Floats:
        """Return the bytes of weights, gradients and optimizer states of each of `parts`, [stages]."""
        return self._memory.static(parts, layout)

    def kept_bytes(self, plan: Plan, sizes: EpochSizes) -> Floats:
        """Return the bytes that each pack keeps on each stage between its two passes, [packs, stages]."""
        return self._memory.kept(Parts.of_levels(plan), plan.layout, sizes)

    def stage_memory(self, plan: Plan, sizes: EpochSizes) -> tuple[StageBytes, ...]:
        """Return the interval of the bytes of each stage of one plan."""
        return self._memory.intervals_of_levels(Parts.of_levels(plan), plan.layout, sizes)

    def plans_memory(self, plans: Sequence[Plan]) -> list[tuple[StageBytes, ...]]:
        """Return the intervals of the stages of each plan; most stages of similar plans are alike."""
        found: dict[Plan, tuple[StageBytes, ...]] = {}
        for group in _sharing_packs(plans):
            layout = group[0].layout
            if len(group[0].packing.degrees) > 1:
                found |= {plan: self.stage_memory(plan, self.sizes(plan.packing, layout)) for plan in group}
                continue
            parts, stages = Parts.of_plans(group)
            parts, stages, numbers = numbered(parts, stages)
            sizes = self.sizes(group[0].packing, layout)
            intervals = self._memory.intervals(parts, layout, numbers, sizes)
            for plan, of_plan in zip(group, stages.tolist(), strict=True):
                found[plan] = tuple(intervals[row] for row in of_plan)
        return [found[plan] for plan in plans]

    def peak_parts(self, plan: Plan) -> tuple[PeakParts, ...]:
        """Return the parts of the expected peak bytes of each stage."""
        of_levels, sizes = Parts.of_levels(plan), self.sizes(plan.packing, plan.layout)
        return tuple(
            self._memory.peak_parts(of_levels, plan.layout, number, sizes) for number in range(plan.layout.pipeline)
        )


def _sharing_packs(plans: Iterable[Plan]) -> Iterable[list[Plan]]:
    """Group plans by packing and layout."""
    groups: dict[tuple[Packing, Layout], list[Plan]] = {}
    for plan in plans:
        groups.setdefault((plan.packing, plan.layout), []).append(plan)
    return groups.values()
