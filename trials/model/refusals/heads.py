"""The attention heads of a tower, as its configuration divides them."""

from typing import Any

from trials.errors import ModelError


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
