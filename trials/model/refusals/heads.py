"""The attention heads of a tower, as its configuration divides them."""

from collections.abc import Iterable
from typing import Any

from trials.errors import InvalidPlan, ModelError


def check_heads(config: Any, tower: str) -> None:
    """Raise ModelError for heads that do not divide the width or are odd, or groups that do not divide the heads.

    transformers builds such a layer, and fails in its first step.
    """
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None)
    if width is None and config.hidden_size % heads:
        raise ModelError(
            f"the {tower} model has {heads} attention heads, which do not divide its hidden_size of "
            f"{config.hidden_size}; correct num_attention_heads or hidden_size in config.json"
        )
    if width is not None and (width < 1 or width % 2):
        raise ModelError(
            f"head_dim of the {tower} model is {width}; correct it in config.json to an even number above 0"
        )
    groups = getattr(config, "num_key_value_heads", None) or heads
    if heads % groups:
        raise ModelError(
            f"the {tower} model has {groups} key-value heads, which do not divide its {heads} attention heads; correct "
            "num_key_value_heads in config.json"
        )


def possible_degrees(config: Any, tensor: int = 1) -> tuple[int, ...]:
    """Return the sequence degrees by which the heads of a language model's attention can be shared, ascending.

    Each rank has 1 / `tensor` of the heads.
    """
    heads, groups = (each // tensor for each in heads_of(config))
    return tuple(each for each in range(1, heads + 1) if not heads % each and (not groups % each or not each % groups))


def check_degrees(config: Any, degrees: Iterable[int], tensor: int = 1) -> None:
    """Raise InvalidPlan for a sequence degree by which the heads of the language model's attention cannot be shared.

    A `tensor` degree by which the heads can be cut leaves 1 / `tensor` of them to each rank.
    """
    heads, groups = (each // tensor for each in heads_of(config))
    possible = possible_degrees(config, tensor)
    of_rank = f" that tensor degree {tensor} leaves to a rank" if tensor > 1 else ""
    for degree in degrees:
        if degree not in possible:
            use = f"use a degree of {', '.join(map(str, possible[:-1]))} or {possible[-1]}" if heads > 1 else "use 1"
            what = f"{heads} attention heads" if heads % degree else f"{groups} key-value heads"
            left = heads % degree or max(groups % degree, 1)
            raise InvalidPlan(
                f"sequence degree {degree} cannot share the {what} of the language model{of_rank}: {left} would be "
                f"left over; {use}"
            )


def heads_of(config: Any) -> tuple[int, int]:
    """Return the numbers of attention heads and of key-value heads."""
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads
