"""The cost of a kind of layer: time and memory as functions of a pack's size."""

from dataclasses import dataclass

from trials.costs.coefficients import NOTHING, Coefficients, Measured
from trials.units import check_measured

# A choice: repeats on a GPU spread by less than 1 %, those of CPU ranks by more; a fifth is a disturbance.
NOISE_LIMIT = 0.20
"""A layer's times are noisy when its repeats spread by more than this share of their median."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """One kind of layer. Costs have coefficients of units, tokens (the head: of targets), squared lengths, and 1."""

    forward_seconds: Coefficients
    backward_seconds: Coefficients
    """Without recomputation."""
    recompute_seconds: Coefficients
    """Seconds that recomputation adds to forward and backward; zero for kinds that are never recomputed."""
    kept_bytes: Coefficients
    """Bytes of each layer kept for the backward pass, without recomputation; of the head, all that it holds at once in
    its two passes, of which no other pack on the stage has any."""
    output_bytes: Coefficients
    """Bytes of the output, which are all that is kept of the next layer when that one is recomputed."""
    parameters: int
    shared_bytes: Coefficients = NOTHING
    """Bytes kept once for all layers of the kind on a stage, such as rotary embeddings."""
    transient_bytes: Coefficients = NOTHING
    """Bytes live during the pass beyond those kept: gradients and workspaces. Zero where the meter counts none."""
    selective_seconds: Coefficients = NOTHING
    """Seconds that selective recomputation adds to forward and backward."""
    selective_bytes: Coefficients = NOTHING
    """Bytes of each layer kept with selective recomputation; zero where layers have none."""
    selective_peak_bytes: Coefficients = NOTHING
    """Most bytes of a layer, with those that are shared, while it is recomputed selectively."""
    weight_seconds: Coefficients = NOTHING
    """Seconds of the backward pass for weight gradients that the layer can defer."""
    deferral_seconds: Coefficients = NOTHING
    """Seconds that deferring them adds to all passes."""
    weight_bytes: Coefficients = NOTHING
    """Bytes that each layer keeps from its backward pass until its deferred weight gradients are computed."""
    seconds_error: Measured = 0.0
    """Median relative error of the fitted forward and backward times together, on the profiled sizes."""
    bytes_error: Measured = 0.0
    """Largest relative error of the fitted kept bytes, on the profiled sizes."""
    noise: Measured = 0.0
    """Upper quartile, over the sizes, of the spread of the repeats as a share of their median, after repetition."""
    frozen_parameters: int = 0
    """Parameters that do not train, and have neither gradient nor optimizer states."""
    tensor_parallel_parameters: int = 0
    """Parameters of which each tensor rank holds a slice; 0 for layers that cannot be cut."""
    tied_parameters: int = 0
    """Parameters of the head that are the word embedding's too; a stage with both ends holds them once."""
    chunk_targets: int = 0
    """Most targets whose logits the head holds at once, of more it computes them again; 0 where no more of them were
    profiled."""
    further_share: Measured = 0.0
    """Bytes of each target beyond `chunk_targets`, as a share of those of each up to there."""
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
    def can_select(self) -> bool:
        """Whether selective recomputation of the layer was timed, and frees memory."""
        return any(self.selective_bytes)

    @property
    def is_noisy(self) -> bool:
        return self.noise > NOISE_LIMIT
