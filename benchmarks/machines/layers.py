"""Work of each kind of layer, from the architecture: matrix products, attention, and values moved."""

from dataclasses import dataclass

from benchmarks.machines.analytic import LanguageShape, VisionShape
from trials.costs.coefficients import LayerKind

ELEMENT_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class MatrixProduct:
    """States of some rows times a matrix of weights."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Forward pass of one layer. Rows are tokens inside the layer."""

    rows_per_unit: int = 0
    rows_per_token: int = 0
    rows_per_target: int = 0
    products: tuple[MatrixProduct, ...] = ()
    square_flops: float = 0.0
    """Of attention, for each squared length."""
    sequence: int | None = None
    """Length of a sequence, where all have the same: each unit is one. None where samples are sequences."""
    row_values: int = 0
    """Values moved outside matrix products for each row."""
    again_values: int = 0
    """Those of norms, activation functions and gates, which alone run again with selective recomputation."""
    widest: int
    """Values of the widest state of a row."""
    parameters: int
    """All of them are read once in a pass."""
    kernels: int
    """Launched in a forward pass, without fusion."""
    again_kernels: int = 0
    """Those that selective recomputation launches again."""


def layer_works(vision: VisionShape, language: LanguageShape) -> dict[LayerKind, LayerWork]:
    """Return the work of the layers of a vision transformer and of a decoder with gated feed-forward layers."""
    seen, hidden = vision.hidden, language.hidden
    joined = vision.tokens // vision.image_tokens * seen
    keys = 2 * hidden * language.key_heads // language.heads
    return {
        "vision_embedding": LayerWork(
            rows_per_unit=vision.tokens,
            products=(MatrixProduct(inputs=vision.patch_values, outputs=seen),),
            row_values=3 * seen,
            widest=seen,
            parameters=(vision.patch_values + vision.tokens) * seen,
            kernels=6,
        ),
        "vision": LayerWork(
            rows_per_unit=vision.tokens,
            products=_products((seen, 3 * seen), (seen, seen), (seen, vision.mlp), (vision.mlp, seen)),
            square_flops=4.0 * seen,
            sequence=vision.tokens,
            row_values=10 * seen + 2 * vision.mlp,
            again_values=4 * seen + 2 * vision.mlp,
            widest=vision.mlp,
            parameters=4 * seen**2 + 2 * seen * vision.mlp,
            kernels=22,
            again_kernels=3,  # two norms and an activation function
        ),
        "projector": LayerWork(
            rows_per_unit=vision.image_tokens,
            products=_products((joined, hidden), (hidden, hidden)),
            row_values=4 * joined,
            widest=joined,
            parameters=(joined + hidden) * hidden + language.vocabulary * hidden,
            kernels=14,
        ),
        "language": LayerWork(
            rows_per_token=1,
            products=_products(
                (hidden, hidden + keys), (hidden, hidden), (hidden, 2 * language.mlp), (language.mlp, hidden)
            ),
            # Causal: half of the scores.
            square_flops=2.0 * hidden,
            row_values=10 * hidden + 3 * language.mlp,
            again_values=4 * hidden + 3 * language.mlp,
            widest=2 * language.mlp,
            parameters=2 * hidden**2 + hidden * keys + 3 * hidden * language.mlp,
            kernels=34,
            again_kernels=14,  # two norms of six each, an activation function and a gate
        ),
        "head": LayerWork(
            rows_per_target=1,
            products=_products((hidden, language.vocabulary)),
            row_values=6 * language.vocabulary,
            widest=2 * language.vocabulary,
            parameters=hidden * language.vocabulary,
            kernels=12,
        ),
    }


def _products(*shapes: tuple[int, int]) -> tuple[MatrixProduct, ...]:
    return tuple(MatrixProduct(inputs=inputs, outputs=outputs) for inputs, outputs in shapes)
