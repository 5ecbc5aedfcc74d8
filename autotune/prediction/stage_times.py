"""Seconds of packs on pipeline stages, and of what follows their passes in a step."""

from functools import cache

import numpy as np

from autotune.dimensions.folds import exchanges
from autotune.dimensions.overlap import hidden_share
from autotune.dimensions.zero import trained_parameters
from autotune.prediction.charges import Charges, PassesOfLayers, ShardExchanges
from autotune.prediction.columns import UNITS, WITHOUT_TARGETS, in_columns
from autotune.prediction.curves import Curves
from autotune.prediction.parameters import Parameters
from autotune.prediction.parts import HEAD, LANGUAGE, PROJECTOR, VISION, Parts
from autotune.prediction.recompute_times import RecomputeTimes
from autotune.prediction.simulation.attribution import PackSeconds, UpdateSeconds
from autotune.prediction.simulation.synchronization import Lockstep, Sharing, Waiting
from autotune.prediction.sizes import EpochSizes
from autotune.prediction.updates import update_seconds_per_parameter
from trials.arrays import Floats, Ints
from trials.costs.coefficients import KINDS
from trials.costs.layer_costs import LayerCosts
from trials.engine.static_memory import GRADIENT_BYTES
from trials.plan import Layout, Plan

_LEAST = float(np.finfo(np.float64).tiny)


class StageTimes:
    """Seconds of the passes of packs on stages, from layer costs.

    Sizes of packs are [packs, 5]; `parts` are stages, and seconds [packs, stages]. Methods raise ValueError for a
    layout whose exchanges the profile has not timed.
    """

    def __init__(self, costs: LayerCosts) -> None:
        # One row of coefficients per kind of layer.
        layers = [costs[kind] for kind in KINDS]
        self._costs = costs
        self._forward = in_columns(layer.forward_seconds for layer in layers)
        self._backward = in_columns(layer.backward_seconds for layer in layers)
        self._curves, self._recompute = Curves(costs), RecomputeTimes(costs)
        self._weights = in_columns(layer.weight_seconds for layer in layers)
        self._deferral = in_columns(layer.deferral_seconds for layer in layers)
        self._outputs = in_columns(layer.output_bytes for layer in layers)
        self._further = np.zeros_like(self._outputs)
        self._further[VISION] = self._outputs[VISION]
        # The projector outputs the features of units, and with them the states of all tokens.
        self._further[LANGUAGE, UNITS] = self._outputs[PROJECTOR, UNITS] / max(costs.added_features, 1)
        self._parameters = Parameters(costs)
        self._has_backward = has_backward = np.array([layer.has_backward for layer in layers])
        # Without `self`, so that predictors, of which a search makes thousands, are freed at once.
        self._charges = cache(
            lambda layout, sequence: Charges.of(exchanges(costs, layout, sequence), layout, has_backward)
        )
        self._of_shards = cache(lambda layout: ShardExchanges(costs, layout))

    def waiting(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> Waiting | None:
        """Return which ranks of these stages wait for each other inside of a step; None where none does.

        They do with ZeRO 2 and 3, and where they share some packs but not all.
        """
        if layout.shards_gradients:
            return self._lockstep(parts, layout, sizes)
        if len(np.unique(sizes.degrees)) == 1:
            return None
        layers = parts.layers[:, [PROJECTOR, LANGUAGE]] > 0
        forward, backward = (
            np.logical_or.reduce(exchanging, axis=1)
            for exchanging in (layers, layers & self._has_backward[[PROJECTOR, LANGUAGE]])
        )
        return Sharing(degrees=sizes.degrees, forward=forward, backward=backward)

    def _lockstep(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> Lockstep:
        """Return how ranks wait for each other at the layers of the only stage.

        With ZeRO 2 all data ranks exchange gradients in each backward pass, with ZeRO 3 weights in both passes.
        """
        of_kinds = Parts.of_layers(*(np.diag(each[0]) for each in (parts.layers, parts.recomputed, parts.selective)))
        forward, backward = (
            side / np.maximum(side.sum(axis=1, keepdims=True), _LEAST)
            for side in self.pass_seconds(of_kinds, layout, sizes.table)
        )
        # Between the two passes of the head, and of the layer before it, a rank waits for no message.
        before_head = np.arange(len(KINDS)) < HEAD
        scatters = np.array(trained_parameters(self._costs)) > 0
        return Lockstep(
            layers=parts.layers[0],
            forward=forward,
            backward=backward,
            waits_forward=before_head & layout.shards_weights,
            waits_back=before_head & (scatters | layout.shards_weights),
        )

    def plan_seconds(self, plan: Plan, sizes: EpochSizes) -> PackSeconds:
        """Return the seconds of all packs on the stages of a plan, which recompute as the level of a pack says."""
        several = [self.pack_seconds(parts, plan.layout, sizes) for parts in Parts.of_levels(plan)]
        return several[0] if len(several) == 1 else PackSeconds.by_level(several, sizes.levels)

    def pack_seconds(
        self, parts: Parts, layout: Layout, sizes: EpochSizes, numbers: Ints | None = None, further: Ints | None = None
    ) -> PackSeconds:
        """Return the seconds of all packs on stages with these `numbers` that send so many `further_states`.

        By default they are those of one plan in order.
        """
        forward, backward = self.pass_seconds(parts, layout, sizes.table)
        numbers = np.arange(len(parts)) if numbers is None else numbers
        further = self.further_states(parts.layers) if further is None else further
        latency, per_byte = link_times(self._costs, layout, numbers)
        # A stage sends what its last layer outputs, and the further states; the last stage sends nothing.
        last = len(KINDS) - 1 - np.argmax(parts.layers[:-1, ::-1] > 0, axis=1)
        sent = self._outputs[last] + further[:-1, None] * self._further[last]
        sends = latency + per_byte * (sizes.table @ sent.T)
        curves = self._curves.at(sizes.table)
        alone, equal = (each @ (self._forward + self._backward).T for each in (sizes.samples_alone, sizes.equal_parts))
        weights, deferral = (parts.most_deferred > 0) * self._deferred_seconds(parts, layout, sizes.table, curves)
        exchange, exchange_back = self.exchange_seconds(parts, layout, sizes.table, sizes.degrees)
        return PackSeconds(
            # Each rank prepares the images of the whole pack.
            load=self.load_seconds(parts, sizes.whole),
            forward=forward,
            backward=backward + deferral,
            recompute=self._recompute.seconds(parts, sizes.table, curves, layout),
            weights=weights,
            most_deferred=parts.most_deferred,
            samples=(curves * alone) @ parts.layers.T + deferral,
            equal_parts=(curves * equal) @ parts.layers.T + deferral,
            sends=sends,
            returns=sends * self._has_backward[last],
            exchange=exchange,
            exchange_back=exchange_back,
        )

    def further_states(self, layers: Floats) -> Ints:
        """Return how many states stages send beside the output of their last layer, [plans, stages] or [stages].

        They are those of earlier vision layers for the projector, and behind it features for later language layers.
        `layers` are those of the stages of plans in order, [..., stages, kinds].
        """
        vision, projector, language = (np.cumsum(layers[..., kind], axis=-1) for kind in (VISION, PROJECTOR, LANGUAGE))
        kept = np.searchsorted(self._costs.kept_states, vision)
        features = np.maximum(self._costs.added_features - language.astype(np.int64), 0)
        further: Ints = np.where(projector > 0, features, kept)
        return further

    def exchange_seconds(self, parts: Parts, layout: Layout, sizes: Floats, degrees: Ints) -> tuple[Floats, Floats]:
        """Return the seconds of what ranks exchange in the passes of packs (forward, backward with recomputation).

        `sizes` are those of a rank's part, `degrees` [packs] the numbers of data ranks that compute it, each with the
        tensor ranks of the layout. A layer that is recomputed for its backward pass is gathered once for both. What
        passes hide is left out, and so are gathers of weights that are still there.
        """
        forward, backward = np.zeros((2, len(sizes), len(parts)))
        gradient_bytes = GRADIENT_BYTES * self._parameters.trained(parts, layout.tensor)
        for degree in np.unique(degrees).tolist():
            charges = self._charges(layout, degree)
            if charges.are_in_passes:
                packs = np.flatnonzero(degrees == degree)
                forward[packs], backward[packs] = charges.seconds(parts, sizes[packs], gradient_bytes)
        of_shards = self._of_shards(layout)
        if layout.shards_weights:
            backward -= of_shards.left_out(parts)
        if of_shards.share:
            passes = self._of_layers(sizes, layout)
            forward -= of_shards.hidden_forward(parts, passes)
            backward -= of_shards.hidden_backward(parts, passes)
        return forward, backward

    def _of_layers(self, sizes: Floats, layout: Layout) -> PassesOfLayers:
        curves = self._curves.at(sizes)
        forward, backward = (curves * (sizes @ side.T) for side in (self._forward, self._backward))
        return PassesOfLayers(
            forward=forward, backward=backward, again=self._recompute.of_layers(sizes, curves, layout)
        )

    def pass_seconds(self, parts: Parts, layout: Layout, sizes: Floats) -> tuple[Floats, Floats]:
        """Return (forward, backward with `RecomputeTimes`) seconds of packs [packs, stages]; `sizes` are [packs, 5]."""
        curves = self._curves.at(sizes)
        recompute = self._recompute.seconds(parts, sizes, curves, layout)
        forward, backward = (curves * (sizes @ side.T) for side in (self._forward, self._backward))
        return forward @ parts.layers.T, backward @ parts.layers.T + recompute

    def _deferred_seconds(self, parts: Parts, layout: Layout, sizes: Floats, curves: Floats) -> Floats:
        """Return the seconds (of weight gradients that stages defer, that this adds to passes), [2, packs, stages].

        Layers defer them that keep everything.
        """
        if not layout.zero_bubble:
            return np.zeros((2, len(sizes), len(parts)))
        kept = parts.layers - parts.recomputed - parts.selective
        return np.stack([(curves * (sizes @ each.T)) @ kept.T for each in (self._weights, self._deferral)])

    def deferred_share(self, parts: Parts, layout: Layout, sizes: EpochSizes) -> float:
        """Return the share of deferred weight gradients in both passes of the mean pack of one stage."""
        weights, _ = self._deferred_seconds(parts, layout, sizes.mean, self._curves.at(sizes.mean))
        return float(weights[0, 0] / max(np.sum(self.pass_seconds(parts, layout, sizes.mean), axis=0)[0, 0], _LEAST))

    def load_seconds(self, parts: Parts, sizes: Floats) -> Floats:
        """Return the seconds of loading packs on the stages that need pixels or labels; shapes as in `pass_seconds`."""
        embeds, heads = (parts.layers[:, [KINDS.index(kind)]] for kind in ("vision_embedding", "head"))
        loading = self._costs.loading
        of_stages = embeds * np.array(loading.pixels_seconds) + heads * (1 - embeds) * np.array(loading.labels_seconds)
        seconds: Floats = sizes[:, WITHOUT_TARGETS] @ of_stages.T
        return seconds

    def update_parts(self, layout: Layout, parts: Parts, sizes: EpochSizes) -> UpdateSeconds:
        """Return the seconds of reduction and optimizer of the stages of one plan, after the passes of a step.

        ZeRO 2 and 3 reduce in each backward pass. With `bucket_bytes` a mean backward pass hides a share of it.
        """
        parameters, charges = self._parameters.trained(parts, layout.tensor), self._charges(layout, 1)
        reduction = parameters * GRADIENT_BYTES * charges.in_step
        if layout.bucket_bytes:
            _, backward = self.pass_seconds(parts.before_head, layout, sizes.mean)
            reduction -= hidden_share(self._costs, layout) * np.minimum(reduction, backward[0])
        copies = self.copies_seconds(layout, parts)
        return UpdateSeconds(
            reduction=reduction + self._parameters.replicated(parts) * GRADIENT_BYTES * charges.replicas + copies,
            together=copies > 0,
            optimizer=parameters * update_seconds_per_parameter(self._costs, layout),
        )

    def copies_seconds(self, layout: Layout, parts: Parts) -> Floats:
        """Return the seconds in which stages add up the gradients of their copies of a tied weight, [stages].

        The two ranks of a pair each send all bytes to the other one, both at once, as a ring of two does. Ranks of two
        stages exchange, so the time of their link counts, which was measured while all ranks sent. A profile times
        reductions of the ranks of one stage alone, which may be nearer to each other.
        """
        _, per_byte = link_times(self._costs, layout, np.arange(layout.pipeline))
        # The two ends may lie on any two stages: the slowest link of the pipeline is the one to another node.
        seconds: Floats = self._parameters.copied(parts) * GRADIENT_BYTES * per_byte.max()
        return seconds


def between_nodes(costs: LayerCosts, layout: Layout) -> tuple[bool, ...]:
    """Return for each stage whether it sends its states to another node."""
    of_node, grid = costs.of_node, layout.grid
    return tuple(of_node > 0 and grid.leaves_node(stage, of_node) for stage in range(layout.pipeline))


def link_times(costs: LayerCosts, layout: Layout, numbers: Ints) -> Floats:
    """Return (latency, seconds per byte) of all but the last of these stages, [2, stages], or [2, 1] if alike.

    Links are those that were timed with as many ranks in a stage, or else those of any layout.
    """
    timed = next((cost for cost in costs.communications if cost.data == layout.grid.of_stage), None)
    # With all ranks in data parallel there was no link to time.
    inside = timed.link if timed and timed.pipeline > 1 else costs.link
    known = (timed, *reversed(costs.communications))
    outside = next((cost.between for cost in known if cost and cost.between), inside)
    leaving = between_nodes(costs, layout)
    links = [outside if leaves else inside for leaves in (leaving if any(leaving) else leaving[:1])]
    times = np.array([(link.latency_seconds, link.seconds_per_byte) for link in links]).T
    return times[:, numbers[:-1]] if any(leaving) else times
