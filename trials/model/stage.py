"""One pipeline stage as a module: the Hugging Face model with the other stages' layers taken out."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trials.data.records.sample import IGNORED
from trials.model.cut import Cut
from trials.model.skeleton import Skeleton


class StageModule(nn.Module):
    """The part of the model that one stage runs on a pack. Parameters keep their Hugging Face names, under `model.`.

    Input and output are a tuple of one float tensor and one int64 tensor, as DeepSpeed sends them between stages:
    - the pixels [units, *unit_shape] (first stage), the family's vision states, or the language states [1, T, hidden];
    - input ids and positions, [2, T].
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
        for path in skeleton.chain.parts:
            if path not in owned:
                self._remove(path)

    @property
    def paths(self) -> tuple[str, ...]:
        """Module paths of this stage's parameters."""
        return self.cut.paths(self.chain)

    def tie(self) -> None:
        """Tie the output projection to the word embedding, where the model does so and this stage holds both."""
        if self.tied and self.cut.projects and self.cut.heads:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    def _remove(self, path: str) -> None:
        parent, _, name = path.rpartition(".")
        # Its place stays taken, so that the names of the other layers do not change.
        setattr(self.model.get_submodule(parent), name, nn.Identity())

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> Any:
        states, ids = inputs
        if self.cut.embeds:
            states = self.family.embed_vision(self.model, states)
        for number, layer in enumerate(self._layers(self.chain.vision_layers, self.cut.vision)):
            run = partial(self.family.vision_layer, layer)
            states = _recomputed(run, states) if number < self.cut.recompute_vision else run(states)
        if self.cut.projects:
            states = self.family.join_text(self.model, states, ids[0])
        if self.cut.language:
            states = self.language(states, ids[1])
        return self.head(states) if self.cut.heads else (states, ids)

    def _layers(self, paths: tuple[str, ...], numbers: range) -> list[nn.Module]:
        return [self.model.get_submodule(paths[number]) for number in numbers]

    def language(self, states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Return language states [1, T, hidden] after this stage's layers; positions [T] restart at each sample."""
        runner = self.family.language_runner(self.model.get_submodule(self.chain.rotary), states, position_ids)
        for number, layer in enumerate(self._layers(self.chain.language_layers, self.cut.language)):
            run = partial(runner, layer)
            states = _recomputed(run, states) if number < self.cut.recompute_language else run(states)
        return states

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
    # Reentrant, so that what the recomputation saves passes the hooks that count live bytes, like everything else.
    output: torch.Tensor = checkpoint(run, states, use_reentrant=True)
    return output
