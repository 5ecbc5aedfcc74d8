"""Costs: time and memory of each kind of layer as functions of a pack's size, fitted to a profile."""

from dataclasses import dataclass, replace
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import Field

from trials.grid import Grid
from trials.plan import Layout, ZeroStage
from trials.units import check_measured

LayerKind: TypeAlias = Literal["vision_embedding", "vision", "projector", "language", "head"]
"""Kinds of layers, in the order of the chain."""
KINDS: tuple[LayerKind, ...] = get_args(LayerKind)
SlowCause: TypeAlias = Literal["convolution", "dropout", "dtype", "mask", "widths"]
Measured: TypeAlias = Annotated[float, Field(le=1e15)]
"""Seconds, bytes or a share. The bound keeps sums of products of such numbers finite; larger ones are refused."""
Coefficients: TypeAlias = tuple[Measured, Measured, Measured, Measured]
SlowCall: TypeAlias = tuple[LayerKind, SlowCause, Coefficients, Coefficients]
"""(kind, convolution or what keeps attention from a fused kernel, seconds of both passes, those of a faster way)."""

NOISE_LIMIT = 0.20
"""A layer's times are noisy when its repeats spread by more than this share of their median."""
LEAST_HIDDEN_SHARE = 0.5
"""Averages of gradients run during a backward pass where this hides at least this share of them. Buckets cost time in
each pass: on two CPU ranks, which have no core left for messages, steps with them were 2 to 6 % longer."""
NOTHING: Coefficients = (0.0, 0.0, 0.0, 0.0)


class _Measurement:
    """Base of costs that are refused, with ValueError, for a number that no measurement can give."""

    __slots__ = ()

    def __post_init__(self) -> None:
        check_measured(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost(_Measurement):
    """Sending a pack's states to the next stage; both are 0 where there is one rank."""

    latency_seconds: Measured
    """Time of all messages that announce the states."""
    seconds_per_byte: Measured


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunicationCost(_Measurement):
    """Messages between stages and averaging of gradients in one layout, while all of its ranks communicate."""

    pipeline: int
    data: int
    link: LinkCost
    """Of the slowest stage to the next one, inside a node where there is such a stage; 0 with one stage."""
    reduce_seconds_per_byte: Measured
    """Time of averaging gradients over the data ranks of the slowest stage; 0 with one data rank."""
    within: int = 1
    """Data ranks of a node that can average gradients first; 1 where there are none, or they were not timed."""
    within_seconds_per_byte: Measured = 0.0
    """As `reduce_seconds_per_byte`, where these data ranks average gradients first."""
    between: LinkCost | None = None
    """Of the slowest stage to the next one on another node; None where all are on one."""
    bucket_bytes: int = 0
    """Least bytes of gradients to average at once during a computation; 0 where that was not timed."""
    hidden_share: Annotated[Measured, Field(le=1)] = 0.0
    """Share of averages in such buckets that a computation of the same length hides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCost(_Measurement):
    """Reading and encoding a pack on the stages that need it, as coefficients like those of `LayerCost`."""

    pixels_seconds: Coefficients = NOTHING
    """Seconds on the first stage, which decodes the images."""
    labels_seconds: Coefficients = NOTHING
    """Seconds on the last stage, when it is not also the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One kind of layer. Costs have coefficients of units, tokens (the head: of targets), squared lengths, and 1."""

    forward_seconds: Coefficients
    backward_seconds: Coefficients
    """Without recomputation."""
    recompute_seconds: Coefficients
    """Seconds that recomputation adds to forward and backward; zero for kinds that are never recomputed."""
    kept_bytes: Coefficients
    """Bytes of each layer kept for the backward pass, without recomputation."""
    output_bytes: Coefficients
    """Bytes of the output, which are all that is kept of the next layer when that one is recomputed."""
    parameters: int
    shared_bytes: Coefficients = NOTHING
    """Bytes kept once for all layers of the kind on a stage, such as rotary embeddings."""
    transient_bytes: Coefficients = NOTHING
    """Bytes live during the pass beyond those kept: gradients and workspaces. Zero where the meter counts none."""
    seconds_error: Measured = 0.0
    """Median relative error of the fitted forward and backward times together, on the profiled sizes."""
    bytes_error: Measured = 0.0
    """Largest relative error of the fitted kept bytes, on the profiled sizes."""
    noise: Measured = 0.0
    """Upper quartile, over the sizes, of the spread of the repeats as a share of their median, after repetition."""
    frozen_parameters: int = 0
    """Those of `parameters` that do not train: they have neither gradient nor optimizer states."""
    dealt_parameters: int = 0
    """Those of `parameters` of which each tensor rank holds a slice; 0 for layers that cannot be cut."""
    tied_parameters: int = 0
    """Those of the head's `parameters` that are the word embedding's too, which a stage with both ends holds once."""
    gathered_parameters: int = 0
    """Most of `parameters` that ZeRO 3 gathers at once."""
    lingering_parameters: int = 0
    """Those of `parameters` that ZeRO 3 gathers in the backward pass and frees at its end."""
    curve_sizes: tuple[Measured, ...] = ()
    """Ascending sizes of packs at which `curve` is given: units for vision kinds, targets for the head, or tokens."""
    curve: tuple[Measured, ...] = ()
    """Measured seconds over those of the coefficients, for each of `curve_sizes`; in between it is linear."""

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no measurement can give, and for a curve with other sizes."""
        check_measured(self)
        if len(self.curve) != len(self.curve_sizes):
            raise ValueError(f"there are {len(self.curve)} values of a curve for {len(self.curve_sizes)} sizes")

    @property
    def has_backward(self) -> bool:
        """Whether the layer has a backward pass: it or a layer before it trains."""
        return any(self.backward_seconds)

    @property
    def recomputed_bytes(self) -> Coefficients:
        """Bytes that the layer keeps when it is recomputed: those of its input, which is as large as its output."""
        return self.output_bytes if self.has_backward else NOTHING

    @property
    def is_noisy(self) -> bool:
        return self.noise > NOISE_LIMIT


@dataclass(frozen=True, slots=True, kw_only=True)
class SharingCost(_Measurement):
    """What ranks that share a pack exchange and keep, as coefficients of the sizes of a rank's part of the pack."""

    degree: int
    """Number of ranks that share a pack."""
    language_forward_seconds: Coefficients = NOTHING
    """Exchanges in the attention of one language layer, while all ranks exchange."""
    language_backward_seconds: Coefficients = NOTHING
    """Without recomputation, which repeats the exchanges of the forward pass."""
    projector_forward_seconds: Coefficients = NOTHING
    """Exchanges behind the projector."""
    projector_backward_seconds: Coefficients = NOTHING
    kept_bytes: Coefficients
    """Bytes that each language layer keeps, as in `LayerCost`: not all of them are divided by the degree."""
    shared_bytes: Coefficients
    transient_bytes: Coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorCost(_Measurement):
    """What ranks that hold language layers together exchange, as coefficients of a rank's part of a pack."""

    degree: int
    """Number of ranks that hold a layer."""
    forward_seconds: Coefficients
    """Exchanges around the blocks of one language layer, while all ranks exchange."""
    backward_seconds: Coefficients
    """Without recomputation, which repeats the exchanges of the forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherCost(_Measurement):
    """What data ranks exchange that hold each weight in shares (ZeRO 3)."""

    data: int
    """Number of data ranks."""
    seconds: tuple[Measured, Measured, Measured, Measured, Measured]
    """Gathering the weights of a layer of each kind, in the order of KINDS."""
    scatter_seconds_per_byte: Measured
    """Averaging gradients of which each rank keeps its share."""

    def times(self, factor: float) -> "GatherCost":
        """Return the costs where all exchanges take `factor` times as long."""
        embedding, vision, projector, language, head = (factor * each for each in self.seconds)
        scatter = factor * self.scatter_seconds_per_byte
        return replace(self, seconds=(embedding, vision, projector, language, head), scatter_seconds_per_byte=scatter)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost(_Measurement):
    """The optimizer's step, with the engine's work around it except averaging gradients."""

    zero: ZeroStage
    data_parallel: int
    """Number of ranks on which it was measured; 1 is without ZeRO."""
    seconds_per_parameter: Measured
    """Seconds on every rank for each parameter of its stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """The costs of all kinds of layers of one model on one kind of hardware."""

    layers: tuple[tuple[LayerKind, LayerCost], ...]
    loading: LoadCost
    link: LinkCost
    """Sending in layouts that were not timed."""
    updates: tuple[UpdateCost, ...]
    """The cost on a single rank comes first."""
    reduce_seconds_per_byte: Measured
    """Time of averaging gradients in layouts that were not timed: over all ranks."""
    residual: Measured
    """Median relative error of the fitted forward and backward times on the profiled sizes."""
    communications: tuple[CommunicationCost, ...] = ()
    """The layouts that were timed."""
    sharing: tuple[SharingCost, ...] = ()
    """The sequence degrees that were timed, ascending."""
    tensor: tuple[TensorCost, ...] = ()
    """The tensor degrees that were timed, ascending."""
    gathers: tuple[GatherCost, ...] = ()
    """Of all ranks in data parallel; none where layers were not profiled for ZeRO 2 and 3."""
    host_seconds_per_byte: tuple[Measured, Measured] | None = None
    """Copying to the host's memory, and back, while all ranks do; None where it was not timed."""
    of_node: int = 0
    """Ranks on each of several nodes; 0 where all were on one."""
    compile_seconds: Measured | None = None
    """Seconds in which a rank compiles layers of all kinds; None for layers as they are."""
    compiled_shares: tuple[tuple[LayerKind, Measured, Measured], ...] = ()
    """(kind, time of a compiled layer over that of one as it is, spread of that share), timed in turns."""
    slow_calls: tuple[SlowCall, ...] = ()

    def __post_init__(self) -> None:
        """Raise ValueError for a number that no measurement can give, and unless every kind of layer has one cost."""
        check_measured(self)
        if missing := [kind for kind in KINDS if kind not in dict(self.layers)]:
            raise ValueError(f"there are no costs of {', '.join(missing)}")
        if len(self.layers) > len(KINDS):
            raise ValueError(f"there are costs of {len(self.layers)} kinds of layers, not of {', '.join(KINDS)} alone")
        if not self.updates:
            raise ValueError("there is no cost of an update")

    def __getitem__(self, kind: LayerKind) -> LayerCost:
        return dict(self.layers)[kind]

    def communication(self, layout: Layout) -> CommunicationCost:
        """Return what was timed where stages have as many ranks, and data ranks lie as in this layout.

        What was not timed has the costs of any layout: see `_reduction` for averages of gradients.
        """
        linked = next((cost for cost in self.communications if cost.data == layout.grid.of_stage), None)
        between = [cost.between for cost in (linked, *reversed(self.communications)) if cost and cost.between]
        return CommunicationCost(
            pipeline=layout.pipeline,
            data=layout.data,
            # With all ranks in data parallel there was no link to time.
            link=linked.link if linked and linked.pipeline > 1 else self.link,
            reduce_seconds_per_byte=self._reduction(layout),
            between=between[0] if between else None,
            bucket_bytes=linked.bucket_bytes if linked else 0,
            hidden_share=linked.hidden_share if linked else 0.0,
        )

    def extrapolates(self, layout: Layout) -> bool:
        """Return whether data ranks lie on several nodes as no timed ones do, and have a share of all ranks' time."""
        return self._alike(layout) is None and layout.grid.data_place(self.of_node)[0] > 1

    def knows_reduction(self, layout: Layout) -> bool:
        """Return whether averages of gradients in this layout can be predicted."""
        timed = {(cost.pipeline, cost.data, cost.within): layout.tensor == 1 for cost in self.communications}
        return layout.reduce_within == 1 or timed.get((layout.pipeline, layout.data, layout.reduce_within), False)

    def overlapped(self, layout: Layout) -> Layout:
        """Return the layout with averages of gradients during the last backward pass, where that is known to help."""
        if not layout.can_overlap:
            return layout
        cost = self.communication(layout)
        return replace(layout, bucket_bytes=cost.bucket_bytes if cost.hidden_share >= LEAST_HIDDEN_SHARE else 0)

    def _alike(self, layout: Layout) -> CommunicationCost | None:
        """Return what was timed with as many data ranks that lie on as many nodes; None where nothing was."""
        place = layout.grid.data_place(self.of_node)
        for cost in self.communications:
            timed = Grid(pipeline=cost.pipeline, data=cost.data)
            if timed.data == layout.data and timed.data_place(self.of_node) == place:
                return cost
        return None

    def _reduction(self, layout: Layout) -> float:
        """Return the seconds per byte of averaging gradients: that of all ranks, in proportion, where none were alike.

        The link of a node carries 2 (n - 1) / n of the gradients of n ranks (Patarasuk and Yuan 2009), for all groups
        of data ranks on the node at once.
        """
        if not self.knows_reduction(layout):
            raise ValueError(
                f"the profile has no times of averaging gradients over {layout.reduce_within} data ranks first"
            )
        if alike := self._alike(layout):
            return alike.reduce_seconds_per_byte if layout.reduce_within == 1 else alike.within_seconds_per_byte
        if not self.extrapolates(layout):
            return self.reduce_seconds_per_byte
        carried = (1 - 1 / layout.data) / (1 - 1 / layout.world_size)
        return self.reduce_seconds_per_byte * carried * self.of_node / layout.grid.data_place(self.of_node)[1]

    def between_nodes(self, layout: Layout) -> tuple[bool, ...]:
        """Return for each stage whether it sends its states to another node."""
        grid = layout.grid
        return tuple(self.of_node > 0 and grid.leaves_node(stage, self.of_node) for stage in range(layout.pipeline))

    def knows_degree(self, degree: int) -> bool:
        """Return whether packs that `degree` ranks share can be predicted."""
        return degree == 1 or bool(self.sharing) or self._is_of_one_rank

    def shared_by(self, degree: int) -> SharingCost:
        """Return the costs of packs that `degree` ranks share.

        A degree that was not timed has the costs of the next one that was, or of the largest. On a single rank there
        was nothing to exchange. Raise ValueError where other profiles would have timed degrees.
        """
        if self.sharing and degree > 1:
            timed = [cost for cost in self.sharing if cost.degree >= degree]
            return replace(timed[0] if timed else self.sharing[-1], degree=degree)
        if not self.knows_degree(degree):
            raise ValueError(f"the profile has no times of what {degree} ranks exchange that share a pack")
        language = self["language"]
        return SharingCost(
            degree=degree,
            kept_bytes=language.kept_bytes,
            shared_bytes=language.shared_bytes,
            transient_bytes=language.transient_bytes,
        )

    def knows_tensor(self, degree: int) -> bool:
        """Return whether layers that `degree` ranks hold together can be predicted."""
        is_dealt = self["language"].dealt_parameters > 0 and self.compile_seconds is None
        return degree == 1 or (is_dealt and (bool(self.tensor) or self._is_of_one_rank))

    def cut_in(self, degree: int) -> TensorCost:
        """Return the costs of layers that `degree` ranks hold together, as `shared_by` does for packs."""
        if self.tensor and degree > 1:
            timed = [cost for cost in self.tensor if cost.degree >= degree]
            return replace(timed[0] if timed else self.tensor[-1], degree=degree)
        if not self.knows_tensor(degree):
            raise ValueError(f"the profile has no times of what {degree} ranks exchange that hold layers together")
        return TensorCost(degree=degree, forward_seconds=NOTHING, backward_seconds=NOTHING)

    def knows_zero(self, zero: ZeroStage) -> bool:
        """Return whether plans with this ZeRO stage can be predicted."""
        return zero < 2 or (bool(self.gathers) and (zero == 2 or self.compile_seconds is None))

    def gathered_by(self, data: int) -> GatherCost:
        """Return the costs of ZeRO 3 on `data` data ranks: those that were timed, or 0 where none were."""
        if self.gathers:
            return replace(self.gathers[-1], data=data)
        return GatherCost(data=data, seconds=(0.0, 0.0, 0.0, 0.0, 0.0), scatter_seconds_per_byte=0.0)

    @property
    def _is_of_one_rank(self) -> bool:
        return all(update.data_parallel == 1 for update in self.updates)

    def update_seconds_per_parameter(self, layout: Layout) -> float:
        """Return the time of the update on every rank.

        On another number of data ranks than was measured, it is the time of a single rank, which ZeRO divides by the
        ranks, and the rest of the measured time, which is communication, in proportion to that of averaging gradients.
        """
        found = {(update.zero, update.data_parallel > 1): update for update in self.updates}
        # ZeRO 2 updates as ZeRO 1 does. ZeRO 3 exchanges nothing then, so it was not timed.
        if (update := found.get((1 if layout.zero == 2 else layout.zero, layout.data > 1))) is None:
            return self._update_alone(layout.zero, layout.data)
        if update.data_parallel == layout.data:
            return update.seconds_per_parameter
        of_all, at_once = self.reduce_seconds_per_byte, self.communication(replace(layout, reduce_within=1))
        rest = self._update_exchange(update) * (at_once.reduce_seconds_per_byte / of_all if of_all else 1.0)
        return self._update_alone(layout.zero, layout.data) + rest

    def scaled_updates(self, computing: float, communication: float) -> tuple[UpdateCost, ...]:
        """Return the updates with a factor for the time of a single rank, and one for the rest."""
        return tuple(
            replace(
                update,
                seconds_per_parameter=(update.seconds_per_parameter - exchange) * computing + exchange * communication,
            )
            for update, exchange in zip(self.updates, map(self._update_exchange, self.updates), strict=True)
        )

    def _update_alone(self, zero: ZeroStage, data: int) -> float:
        return self.updates[0].seconds_per_parameter / (data if zero else 1)

    def _update_exchange(self, update: UpdateCost) -> float:
        return max(0.0, update.seconds_per_parameter - self._update_alone(update.zero, update.data_parallel))

    def with_workers(self, workers: int) -> "LayerCosts":
        """Return the costs with `workers` loading processes per rank: with any, packs are ready in time."""
        return replace(self, loading=LoadCost()) if workers else self

    @property
    def noisy_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds whose times spread too far even after they were measured again."""
        return tuple(kind for kind, cost in self.layers if cost.is_noisy)
