"""Mixtures of experts in a language model, as its configuration describes them."""

from typing import Any

from trials.errors import ModelError


def check_experts(text: Any) -> None:
    """Raise ModelError for the router's auxiliary loss, and for more experts per token than a layer has."""
    if getattr(text, "output_router_logits", False):
        raise ModelError(
            "output_router_logits is true, with which transformers adds a loss that balances the experts over all "
            "tokens and layers of a batch; packs and stages see only their own, so set it to false in the text_config "
            "of config.json"
        )
    experts, chosen = getattr(text, "num_experts", 0), getattr(text, "num_experts_per_tok", 0)
    if experts and not 1 <= chosen <= experts:
        raise ModelError(
            f"num_experts_per_tok is {chosen} but a layer has {experts} experts; correct it in config.json to a number "
            f"from 1 to {experts}"
        )
