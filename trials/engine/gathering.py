"""Weights and gradients in shards: gathered before a part of the chain runs, and scattered behind it.

Weights are freed behind each pass. A plan may let those of the last layers stay until their backward pass.

The parts of the chain have places in it. Each pass visits all places in order, the backward pass in reverse, and what a
rank sends follows from its place alone: at each, the weights of the next place are gathered and the gradients of the
one before are scattered, while this one computes. A rank that finds no gradient at some places sends all the same for
them. So no rank waits for a message that another one leaves out.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import distributed, nn

from trials.engine.weight_shards import WeightShards
from trials.model.paths import parameters_at
from trials.model.stage import StageModule


class CountBytes(Protocol):
    """Counts bytes that a rank takes for whole weights and gradients; negative ones are freed."""

    def __call__(self, size: int, /) -> None: ...


class GatheredWeights(WeightShards):
    """Weights that are whole while a layer needs them, and gradients that are whole in its backward pass alone."""

    def __init__(self, parameters: Sequence[nn.Parameter], *, stays: bool) -> None:
        """Take over the weights of rank 0, of which only shards are left unless it `stays`. Every rank must call it."""
        for parameter in parameters:
            # Ranks whose weights differ at the start would differ for ever.
            distributed.broadcast(parameter.data, src=0)
        super().__init__(parameters)
        self.count: CountBytes = lambda _: None
        self.is_here, self._stays, self._bytes = True, stays, self.whole.nbytes
        self._gather: distributed.Work | None = None
        self._sums: torch.Tensor | None = None
        self._scatter: tuple[torch.Tensor, distributed.Work] | None = None
        self.gradients: torch.Tensor | None = None
        """Sums of this rank's elements over ranks and packs, [shard], where they train."""
        if not stays:
            self.own = self.own.clone()
            self.release()

    def begin_updates(self) -> None:
        super().begin_updates()
        if not self.trains:
            return
        self.gradients = torch.zeros_like(self.shard)
        for parameter in self.places:
            parameter.grad_dtype = None  # of any type: autograd adds bfloat16 gradients without a float32 copy
        for held in self.held.values():
            held.values.grad = self.gradients[held.within]

    def gather(self) -> None:
        """Begin to gather the weights, unless they are here."""
        if self.is_here:
            return
        self.count(self._bytes)
        # The same storage, so that parameters, and what autograd keeps of them, have their values again.
        self.whole.untyped_storage().resize_(self._bytes)
        self._gather = distributed.all_gather_into_tensor(self.whole, self.own, async_op=True)
        self.is_here = True

    def wait(self) -> None:
        """Wait until the weights are here."""
        if self._gather is not None:
            self._gather.wait()
            self._gather = None

    def release(self) -> None:
        """Free the weights, unless they stay."""
        if self._stays or not self.is_here:
            return
        self.wait()
        self.whole.untyped_storage().resize_(0)
        self.is_here = False
        self.count(-self._bytes)

    def begin_gradients(self) -> None:
        """Give the parameters gradients of zeros, unless they have gradients."""
        if self._sums is None:
            self._sums = torch.zeros(len(self.whole), device=self.whole.device)
            self.count(self._sums.nbytes)
            for parameter, place in self.places.items():
                parameter.grad = self._sums[place].view_as(parameter)

    def scatter(self) -> None:
        """Begin to add up the gradients of all ranks, each of which keeps its own elements."""
        assert self._sums is not None
        received = torch.empty_like(self.shard)
        work = distributed.reduce_scatter_tensor(received, self._sums, async_op=True)
        self._scatter = received, work
        for parameter in self.places:
            parameter.grad = None

    def take_scattered(self) -> None:
        """Wait for the sums, and add them to those of the packs before."""
        assert self._sums is not None
        assert self._scatter is not None
        assert self.gradients is not None
        received, work = self._scatter
        work.wait()
        self.gradients.add_(received)
        self.count(-self._sums.nbytes)
        self._sums = self._scatter = None

    @torch.no_grad()
    def gather_update(self) -> None:
        if self._stays:
            super().gather_update()
        else:
            self.own.copy_(self.shard)

    def working(self, parameter: nn.Parameter) -> torch.Tensor:
        if self._stays:
            return super().working(parameter)
        whole = self.own.new_empty(len(self.whole))
        distributed.all_gather_into_tensor(whole, self.own)
        return whole[self.places[parameter]].view_as(parameter)

    def write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if self._stays:
            super().write(parameter, value)
        elif held := self.held.get(parameter):
            held.values.copy_(value.flatten()[held.elements])
            self.own[held.within].copy_(held.values)


def gathered_together(model: nn.Module, path: str) -> Iterator[list[nn.Parameter]]:
    """Yield the parameters under a path of the chain that make up one message: those that train, and frozen ones."""
    parameters = [parameter for _, parameter in parameters_at(model, path)]
    for trains in (True, False):
        if found := [each for each in parameters if each.requires_grad == trains]:
            yield found


def share_weights(stage: StageModule, path: str, *, stays: bool) -> None:
    """Leave this rank its shards of the weights under a path of the stage. Every rank must call it."""
    held = {parameter for each in stage.shards for parameter in each.places}  # a tied weight has two paths
    for parameters in gathered_together(stage.model, path):
        if further := [each for each in parameters if each not in held]:
            stage.shards.append(GatheredWeights(further, stays=stays))


class Gathering:
    """One rank's passes from place to place of the chain, each with weights of its own."""

    def __init__(self, stage: StageModule, shards: Sequence[GatheredWeights]) -> None:
        """Follow the passes of a stage whose parameters these shards hold."""
        self._shards = shards
        holding = {parameter: each for each in shards for parameter in each.places}
        self._needed = [
            list(dict.fromkeys(holding[each] for path in paths for _, each in parameters_at(stage.model, path)))
            for paths in stage.cut.places(stage.chain)
        ]
        """The weights that each place needs; a tied weight has two places."""
        self._owned: list[list[GatheredWeights]] = []
        """Those whose gradients are complete when the backward pass leaves a place."""
        seen = set[GatheredWeights]()
        for needed in self._needed:
            self._owned.append([each for each in needed if each.trains and each not in seen])
            seen.update(needed)
        self._first = next(place for place, owned in enumerate(self._owned) if owned)
        """The first place that trains, at which backward passes end."""
        self._staying = self._gathered_once(stage)
        """Weights that stay for the backward pass, by their place."""
        self._scattered: list[GatheredWeights] = []
        """Those whose gradients are on their way."""
        self._at = -1
        """The place at which the pass is."""
        self._trains = False
        """Whether a backward pass follows the forward pass."""
        stage.reached = self._reach

    def _gathered_once(self, stage: StageModule) -> dict[GatheredWeights, int]:
        layers, once = set(stage.cut.layers(stage.chain)), stage.cut.gathered_once
        of_layers = [place for place, paths in enumerate(stage.cut.places(stage.chain)) if layers.issuperset(paths)]
        staying = [place for place in of_layers[len(of_layers) - once :] if place >= self._first]
        return {each: place for place in staying for each in self._needed[place]}

    def begin_pass(self) -> None:
        """Call it before each forward pass."""
        self._at, self._trains = -1, torch.is_grad_enabled()

    def begin_backward(self) -> None:
        """Call it before each backward pass."""
        self._expect_gradients()

    def end_backward(self) -> None:
        """Call it after each backward pass: send what the pass has left out, and wait for all sums."""
        self._return_to(self._first)
        self._scatter(self._first)
        self._take_scattered()
        self.end_forward()
        if any(parameter.grad is not None for each in self._shards for parameter in each.places):
            raise RuntimeError(
                "a parameter got a further gradient after its gradient was scattered, as in layers that share "
                "weights; use ZeRO 1"
            )

    def end_forward(self) -> None:
        """Free all weights; call it after a forward pass that no backward pass follows."""
        for each in self._shards:
            each.release()

    def _reach(self, states: Iterable[torch.Tensor]) -> None:
        """Enter the next place in a forward pass, with states at whose gradients the backward pass has left it."""
        self._at += 1
        place = self._at
        if place + 1 < len(self._needed):
            following: int | None = place + 1
        else:  # where a pass that goes on turns around
            following = place - 1 if self._trains and place > self._first else None
        self._gather(place, following)
        self._wait(place)
        if self._trains:
            for each in states:
                if each.requires_grad:
                    each.register_hook(partial(self._returned, place - 1))

    def _returned(self, place: int, _: torch.Tensor) -> None:
        self._return_to(place)

    def _return_to(self, place: int) -> None:
        """Go on in a backward pass to a place, with all that ranks send on the way."""
        while self._at > place:
            self._at -= 1
            self._gather(self._at, self._at - 1 if self._at > self._first else None)
            self._scatter(self._at + 1)
            self._expect_gradients()
            self._wait(self._at)

    def _expect_gradients(self) -> None:
        for each in self._needed[self._at]:
            if each.trains:
                each.begin_gradients()

    def _scatter(self, place: int) -> None:
        """Scatter the gradients of a place that the pass has left, when those before are there."""
        self._take_scattered()
        self._scattered = self._owned[place]
        for each in self._scattered:
            each.scatter()

    def _take_scattered(self) -> None:
        for each in self._scattered:
            each.take_scattered()
        self._scattered = []

    def _gather(self, place: int, following: int | None) -> None:
        """Begin to gather the weights of a place and of the following one, and free all others that need not stay."""
        wanted = [*self._needed[place], *(() if following is None else self._needed[following])]
        for each in self._shards:
            stays = self._trains and self._staying.get(each, place) < place
            if each not in wanted and not stays:
                each.release()
        for each in wanted:
            each.gather()

    def _wait(self, place: int) -> None:
        for each in self._needed[place]:
            each.wait()
