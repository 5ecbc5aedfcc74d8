"""The analytic cost of packs, from the shape of a model: equal on every machine, which then matches packs alike."""

from trials.data.epoch import CostWeights
from trials.job import PARTS
from trials.workload import ModelShape, Part


def forward_weights(shape: ModelShape) -> CostWeights:
    """Return the floating-point operations of the forward pass, which runs all parts."""
    return CostWeights(
        unit=shape.unit_flops, token=shape.token_flops, target=shape.target_flops, square=shape.square_flops
    )


def cost_weights(shape: ModelShape) -> CostWeights:
    """Return the cost in a training, by which packs are matched.

    It is that of all passes, in units of the three that a matrix takes whose weights train.
    """
    vision, language = _passes(shape, "vision") / 3, _passes(shape, "language") / 3
    return CostWeights(
        unit=vision * shape.unit_flops,
        token=language * shape.token_flops,
        target=language * shape.target_flops,
        square=language * shape.square_flops,
    )


def _passes(shape: ModelShape, part: Part) -> int:
    """Return how many passes a step makes over a part: forward, gradients of its input, gradients of its weights."""
    if shape.trained is None:
        return 3
    # As `trials.model.trained.trained_parts` writes it: each part that trains, and the adapters that it may have.
    trained = {name: adapters for name, _, adapters in (text.partition(" with ") for text in shape.trained.split("; "))}
    if part in trained:
        return 2 if trained[part] else 3  # weights of adapters are few
    # The word embedding, before the language layers, is frozen with them.
    return 2 if any(before in trained for before in PARTS[: PARTS.index(part)]) else 1
