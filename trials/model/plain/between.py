"""What transformers computes between the parts of a model that stages run, and what it gives to its language layers."""

import inspect
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from trials.model.ends.scales import before_head, before_layers, behind_head
from trials.model.plain.small_copy import SmallSample
from trials.model.skeleton import Chain

_GIVEN = frozenset(("attention_mask", "position_ids", "position_embeddings"))
"""What stages give to a layer, besides the states"""
_WITHOUT_EFFECT = re.compile(r"cache|past_key_value|^output_|^return_|^labels$|^num_items_in_batch$|^logits_to_keep$")
"""What a training without a cache of keys does not need"""
_SCALE = re.compile(r"scal|multiplier|softcap|^emb\w*_(norm|dropout)$|^dim_model_base$")
"""Names of settings that may say what is computed between two parts"""

_WORDS, _NORM, _HEAD = "the word embedding", "the final norm", "the head"


class _PassedStates:
    """The states that enter and leave parts of a model in one forward pass, and what its layers are given."""

    def __init__(self, model: nn.Module, parts: Mapping[str, str]) -> None:
        """`parts` are the paths, by what each is called."""
        self.entered: dict[str, torch.Tensor] = {}
        self.left: dict[str, torch.Tensor] = {}
        self.given: dict[str, str] = {}
        """Names of a layer's further inputs -> the layer."""
        self._hooks: list[Any] = []
        for called, path in parts.items():
            module = model.get_submodule(path)
            self._hooks += [
                module.register_forward_pre_hook(self._enters(called), with_kwargs=True),
                module.register_forward_hook(self._leaves(called)),
            ]

    def _enters(self, called: str) -> Any:
        def hook(module: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            names = inspect.signature(module.forward).bind_partial(*positional, **named)
            first, *further = names.arguments.items()
            self.entered.setdefault(called, first[1])
            for name, value in further:
                inner = value.items() if isinstance(value, dict) and name == "kwargs" else [(name, value)]
                self.given |= {each: called for each, one in inner if one is not None and one is not False}

        return hook

    def _leaves(self, called: str) -> Any:
        def hook(_module: nn.Module, _positional: Any, output: Any) -> None:
            self.left.setdefault(called, output[0] if isinstance(output, tuple) else output)

        return hook

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def check_between(model: PreTrainedModel, chain: Chain, sample: SmallSample) -> None:
    """Raise ValueError where transformers' own model changes states between two parts as stages do not.

    Values must be equal, not near: a wide cap, or a scale near 1, is an option that stages have to follow, too. Raise
    it for layers that are given something of which stages know nothing. The `sample` shows no image.
    """
    layers = {f"language layer {number}": path for number, path in enumerate(chain.language_layers)}
    norm, projection = chain.head
    parts = {_WORDS: chain.projector[-1], **layers, _NORM: norm, _HEAD: projection}
    passed = _PassedStates(model, parts)
    try:
        logits = model(input_ids=sample.input_ids[None]).logits
    finally:
        passed.end()
    further = sorted(name for name in passed.given if name not in _GIVEN and not _WITHOUT_EFFECT.search(name))
    if further:
        raise ValueError(f"its layers are given {further[0]}, of which stages know nothing")
    for earlier, later in pairwise(parts):
        changed = {_WORDS: before_layers, _NORM: before_head}.get(earlier, lambda _, states: states)
        if not torch.equal(changed(model.config, passed.left[earlier]), passed.entered[later]):
            raise ValueError(_found(model, f"{earlier} and {later}"))
    if not torch.equal(behind_head(model.config, passed.left[_HEAD]), logits):
        raise ValueError(_found(model, f"{_HEAD} and the loss"))


def _found(model: PreTrainedModel, where: str) -> str:
    text = model.config.get_text_config().to_dict()
    said = [f"{name} {value}" for name, value in text.items() if _SCALE.search(name) and value not in (None, 0, 1, {})]
    which = f" (its configuration has {', '.join(said)})" if said else ""
    return f"transformers changes the states between {where} in another way than stages{which}"
