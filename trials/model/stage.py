"""One pipeline stage as a module: the Hugging Face model with the other stages' layers taken out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trials.data.records.sample import IGNORED
from trials.data.tokens import PackTokens, pack, unpack
from trials.model.cut import Cut
from trials.model.features import add_features
from trials.model.paths import remove
from trials.model.skeleton import Skeleton


class StageModule(nn.Module):
    """The part of the model that one stage runs on a pack. Parameters keep their Hugging Face names, under `model.`.

    Input and output are two tensors, as DeepSpeed sends them between stages (`pack` in trials/data/tokens.py):
    - the pixels [units, *unit_shape] (first stage), the family's vision states, or the language states [1, T, hidden],
      with the states that later layers need;
    - the tokens of the pack.
    The last stage returns logits [T, vocabulary].
    """

    def __init__(self, skeleton: Skeleton, cut: Cut) -> None:
        """Take over `skeleton.model`, and remove the parts of other stages from it."""
        super().__init__()
        self.model = skeleton.model
        self.chain = skeleton.chain
        self.family = skeleton.family
        self.tied = skeleton.tied
        self.cut = cut
        owned = set(cut.paths(skeleton.chain))
        for path in (*skeleton.chain.parts, *skeleton.chain.unused):
            if path not in owned:
                remove(self.model, path)

    @property
    def paths(self) -> tuple[str, ...]:
        """Module paths of this stage's parameters."""
        return self.cut.paths(self.chain)

    def tie(self) -> None:
        """Tie the output projection to the word embedding, where the model does so and this stage holds both."""
        if self.tied and self.cut.projects and self.cut.heads:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        states, tokens = unpack(*inputs)
        if self.cut.embeds:
            states = (self.family.embed_vision(self.model, states[0], tokens),)
        if self.cut.vision:
            states = self.vision(states, tokens)
        if self.cut.projects:
            states = tuple(self.family.join_text(self.model, states, tokens))
        if self.cut.language:
            states = self.language(states, tokens)
        return self.head(states[0]) if self.cut.heads else pack(states, tokens)

    def vision(self, states: Sequence[torch.Tensor], tokens: PackTokens) -> tuple[torch.Tensor, ...]:
        """Return the states after this stage's vision layers, then those of earlier layers that the projector takes."""
        current, *kept = states
        runner = self.family.vision_runner(self.model, current, tokens)
        for place, number in enumerate(self.cut.vision):
            run = partial(runner, self.model.get_submodule(self.chain.vision_layers[number]), number)
            current = _recomputed(run, current) if place < self.cut.recompute_vision else run(current)
            # The profile's chain has one layer, which stands for all that are kept.
            kept += [current] * self.chain.kept.count(number)
        return (current, *kept)

    def language(self, states: Sequence[torch.Tensor], tokens: PackTokens) -> tuple[torch.Tensor, ...]:
        """Return language states [1, T, hidden] after this stage's layers, then what later layers add to images."""
        current, *features = states
        rotary = self.model.get_submodule(self.chain.rotary)
        runner = self.family.language_runner(self.model, rotary, current, tokens)
        for place, number in enumerate(self.cut.language):
            run = partial(runner, self.model.get_submodule(self.chain.language_layers[number]), number)
            current = _recomputed(run, current) if place < self.cut.recompute_language else run(current)
            # Outside of what is recomputed: a feature is freed as soon as it is added.
            if features:
                current = add_features(self.model, current, features.pop(0), tokens)
        return (current, *features)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [T, vocabulary] of language states [1, T, hidden]."""
        norm, projection = (self.model.get_submodule(path) for path in self.chain.head)
        logits: torch.Tensor = projection(norm(states)).squeeze(0)
        return logits


def pack_loss(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Return the cross-entropy of logits [T, vocabulary] with labels [T], summed over the targets, times a scale []."""
    labels, scale = target
    return cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum") * scale


def _recomputed(run: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    if not torch.is_grad_enabled():  # it would warn that there is nothing to recompute for
        return run(states)
    # Reentrant, so that what the recomputation saves passes the hooks that count live bytes, like everything else.
    output: torch.Tensor = checkpoint(run, states, use_reentrant=True)
    return output
