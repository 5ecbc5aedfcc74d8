"""One pipeline stage as a module: the Hugging Face model with the other stages' layers taken out."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trials.data.tokens import PackTokens, pack, unpack
from trials.model.cut import Cut
from trials.model.ends.head_loss import Targets, summed_loss
from trials.model.ends.scales import before_head, behind_head
from trials.model.features import add_features, join_text
from trials.model.paths import remove
from trials.model.skeleton import Skeleton
from trials.model.slices import cut_layer, layer_plan
from trials.model.trained import trains
from trials.model.weight_gradients import WeightGradients
from trials.offload.offloading import Offloading
from trials.recomputation.selective import run_selectively
from trials.sharing.group import SharingGroup
from trials.stage import Tower

RunLayer: TypeAlias = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor], torch.Tensor], torch.Tensor]
"""Function of a layer, of what runs it on states, and of the states, that returns the states after the layer."""


class StageModule(nn.Module):
    """The part of the model that one stage runs on a pack. Parameters keep their Hugging Face names, under `model.`.

    Input and output are two tensors, as DeepSpeed sends them between stages (`pack` in trials/data/tokens.py):
    - the pixels [units, *unit_shape] (first stage), the family's vision states, or the language states [1, T, hidden],
      with the states that later layers need;
    - the tokens of the pack, which are taken on the CPU, and given to the next stage on the device of its states.
    The last stage returns the language states [1, T, hidden] before its head, or their loss where it gets the targets.
    """

    def __init__(self, skeleton: Skeleton, cut: Cut) -> None:
        """Take over `skeleton.model`, and remove the parts of other stages from it."""
        super().__init__()
        self.model = skeleton.model
        self.chain = skeleton.chain
        self.family = skeleton.family
        self.tied = skeleton.tied
        self.cut = cut
        self.sharing: tuple[SharingGroup, ...] = (SharingGroup(),)
        """The ranks that compute a pack together, for each level of packs; the session of a rank sets them."""
        self.attending: tuple[SharingGroup, ...] = (SharingGroup(),)
        """Ranks of `sharing` with the same slices of the language layers: their heads are dealt among these ranks."""
        self.tensor = SharingGroup()
        """The ranks that hold this copy of the stage together."""
        self.offloading: Offloading | None = None
        """What offloads the layers that the cut offloads; the engine sets it."""
        self.shards: list[Any] = []
        """What holds the weights, in parts of the chain, where ranks hold them in shards."""
        self.reached: Callable[[Sequence[torch.Tensor]], None] | None = None
        """Called with the states that come to each of the cut's places, before it runs; the engine sets it."""
        self.weight_gradients: WeightGradients | None = None
        """What defers the weight gradients of layers that keep everything; the engine sets it."""
        self.slices: dict[nn.Parameter, int] = {}
        """The parameters of which each of these ranks holds a slice, with the dimension along which they are cut."""
        paths, parts = cut.paths(skeleton.chain), skeleton.chain.parts
        self.trains_before = trains(self.model, parts[: parts.index(paths[0])])
        """Whether an earlier stage trains, so that the states that this one receives need a gradient."""
        self.has_backward = self.trains_before or trains(self.model, paths)
        """Whether this stage has a backward pass: it or an earlier one trains."""
        owned = set(paths)
        for path in (*skeleton.chain.parts, *skeleton.chain.unused):
            if path not in owned:
                remove(self.model, path)

    @property
    def paths(self) -> tuple[str, ...]:
        """Module paths of this stage's parameters."""
        return self.cut.paths(self.chain)

    def defer_weight_gradients(self) -> WeightGradients:
        """Let the vision and language layers defer their weight gradients, which the caller has to compute."""
        chain, cut = self.chain, self.cut
        paths = [chain.vision_layers[number] for number in cut.vision]
        paths += [chain.language_layers[number] for number in cut.language]
        self.weight_gradients = WeightGradients(map(self.model.get_submodule, paths))
        return self.weight_gradients

    def tie(self) -> None:
        """Tie the output projection to the word embedding, where the model ties them and this stage holds both."""
        if self.tied and self.cut.projects and self.cut.heads:
            self.model.get_output_embeddings().weight = self.model.get_input_embeddings().weight

    def keep_slices(self, path: str, group: SharingGroup) -> None:
        """Keep one rank's slices of the part at `path`, which has its weights, if the ranks of `group` divide it."""
        self.tensor = group
        if group.share.degree > 1 and path in self.chain.language_layers:
            self.slices |= cut_layer(self.model.get_submodule(path), layer_plan(self.model.config), group)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor], targets: Targets | None = None) -> Any:
        if self.offloading is None:
            return self._forward(inputs, targets)
        self.offloading.begin_pack()
        output = self._forward(inputs, targets)
        self.offloading.end_pack(output if self.cut.heads else output[0])
        return output

    def _forward(self, inputs: tuple[torch.Tensor, torch.Tensor], targets: Targets | None) -> Any:
        floats, integers = inputs
        # DeepSpeed wants a gradient for all that it receives; layers before the first that trains would compute it.
        states, tokens = unpack(floats if self.trains_before else floats.detach(), integers)
        if self.cut.embeds:
            self._reach(states)
            states = (self.family.embed_vision(self.model, states[0], tokens),)
        if self.cut.vision:
            states = self.vision(states, tokens)
        if self.cut.projects:
            self._reach(states)
            features = self.family.image_features(self.model, states, tokens)
            states = join_text(self.model, features, tokens, self.sharing[tokens.level])
        if self.cut.language:
            states = self.language(states, tokens)
        if not self.cut.heads:
            return pack(states, tokens)
        self._reach(states)
        return states[0] if targets is None else self.loss(states[0], targets)

    def vision(self, states: Sequence[torch.Tensor], tokens: PackTokens) -> tuple[torch.Tensor, ...]:
        """Return the states after this stage's vision layers, then earlier layers' states that the projector takes."""
        current, *kept = states
        runner = self.family.vision_runner(self.model, current, tokens)
        for place, number in enumerate(self.cut.vision):
            layer = self.model.get_submodule(self.chain.vision_layers[number])
            recompute = self._recompute("vision", place, tokens)
            self._reach((current, *kept))
            current = run_layer(layer, partial(runner, layer, number), current, recompute)
            # The profile's chain has one layer, which stands for all that are kept.
            kept += [current] * self.chain.kept.count(number)
        return (current, *kept)

    def language(self, states: Sequence[torch.Tensor], tokens: PackTokens) -> tuple[torch.Tensor, ...]:
        """Return language states [1, T, hidden] after this stage's layers, then what later layers add to images."""
        current, *features = states
        sharing, attending = self.sharing[tokens.level], self.attending[tokens.level]
        rotary = self.model.get_submodule(self.chain.rotary)
        runner = self.family.language_runner(self.model, rotary, current, tokens, attending)
        for place, number in enumerate(self.cut.language):
            layer = self.model.get_submodule(self.chain.language_layers[number])
            recompute = self._recompute("language", place, tokens)
            self._reach((current, *features))
            current = run_layer(layer, partial(runner, layer, number), current, recompute)
            # Outside of what is recomputed: a feature is freed as soon as it is added.
            if features:
                current = add_features(self.model, current, features.pop(0), tokens, sharing)
        return (current, *features)

    def _reach(self, states: Sequence[torch.Tensor]) -> None:
        if self.reached is not None:
            self.reached(states)

    def _recompute(self, tower: Tower, place: int, tokens: PackTokens) -> RunLayer | None:
        """Return what runs the layer at this place of its kind in the stage; None for one that runs as it is."""
        recomputed = self.cut.levels[tokens.level]
        whole = recomputed.whole(tower)
        if place >= whole + recomputed.selective(tower):
            return self.weight_gradients.run if self.weight_gradients else None
        if place >= whole:
            return run_selectively
        if not self.cut.offloads(tower):
            return run_again
        assert self.offloading is not None, "the engine has to set what offloads"
        return self.offloading.run

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocabulary] of language states [..., hidden]."""
        norm, projection = (self.model.get_submodule(path) for path in self.chain.head)
        config = self.model.config
        return behind_head(config, projection(before_head(config, norm(states))))

    def loss(self, states: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Return the loss [] of language states [1, T, hidden], summed over the targets (`summed_loss`)."""
        return summed_loss(self.head, states.squeeze(0), targets, self.model.config.get_text_config().vocab_size)


def run_layer(
    layer: nn.Module,
    run: Callable[[torch.Tensor], torch.Tensor],
    states: torch.Tensor,
    recompute: RunLayer | None = None,
) -> torch.Tensor:
    """Return the states after a layer, which keeps what its backward pass needs unless `recompute` runs it.

    Without a backward pass nothing is kept.
    """
    trains = torch.is_grad_enabled()
    if trains and not states.requires_grad and any(parameter.requires_grad for parameter in layer.parameters()):
        # The first layer that trains. A reentrant checkpoint has gradients only if its input needs one.
        states = states.detach().requires_grad_()
    if recompute is None or not (trains and states.requires_grad):
        return run(states)
    return recompute(layer, run, states)


def run_again(_: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], states: torch.Tensor) -> torch.Tensor:
    """Return the states after a layer that keeps its input alone, and runs again in the backward pass."""
    # Reentrant, so that what the recomputation saves passes the hooks that count live bytes, like everything else.
    output: torch.Tensor = checkpoint(run, states, use_reentrant=True)
    return output
