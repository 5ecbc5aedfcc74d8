"""Packs that ranks share: the time of what they exchange, and the bytes of a language layer, for each degree."""

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import distributed

from trials.engine.stopwatch import Stopwatch
from trials.grid import Grid
from trials.model.family import join_samples
from trials.model.refusals.heads import possible_degrees
from trials.sharing.group import SharingGroup, join_groups
from trials.tasks.answer import ExchangeTiming
from trials.tasks.profiling.one_of_each import OneOfEach
from trials.tasks.profiling.pace import Pace, ladder
from trials.tasks.profiling.probes import Probe, ProbeBytes, language_probes
from trials.tasks.request import ProbeSizes

_EXCHANGES = 7
"""As for messages between stages: exchanges are short."""
# A choice: fewer tokens than ranks would leave some without any.
_LEAST_TOKENS = 16

Shape = tuple[int, int]
"""(samples, tokens of each) of a pack."""


def time_sharing(
    stage: OneOfEach, sizes: ProbeSizes, device: torch.device, bytes_of: Callable[[Probe], ProbeBytes], pace: Pace
) -> Iterator[ExchangeTiming]:
    """Time every degree that divides all ranks and by which attention can be shared. Every rank must take all of them.

    All ranks exchange at once, as those of every layout do, in which neighbours share packs. `bytes_of` measures the
    bytes of a layer.
    """
    ranks = distributed.get_world_size()
    for degree in possible_degrees(stage.model.config.get_text_config()):
        if degree == 1 or ranks % degree:
            continue
        groups = Grid(pipeline=1, data=ranks).sharing_ranks(degree)
        sharing = join_groups(groups, distributed.get_rank())
        what, attention = f"exchanges of {degree} ranks that share packs", partial(_attention, stage, sharing, device)
        for shape in shapes_in_time(what, sizes.sample_shapes, attention, pace):
            divisible, shows = _divisible(shape, degree), sizes.image_units > 0
            yield from _timings(stage, sharing, divisible, device, bytes_of, shows=shows, pace=pace)
        distributed.destroy_process_group(sharing.group)


def shapes_in_time(
    what: str, shapes: Sequence[Shape], prepare: Callable[[Shape], Callable[[], object]], pace: Pace
) -> Iterator[Shape]:
    """Yield the shapes of packs; on slow links those of smaller packs, in the same proportions.

    `prepare` returns the exchange for a shape, and `what` is its name.
    """
    largest = max(shapes, key=math.prod)
    full = math.prod(largest)

    def scaled(shape: Shape, tokens: int) -> Shape:
        samples, length = shape
        return samples, math.ceil(length * tokens / full)

    tokens = pace.sizes(what, ladder(full, _LEAST_TOKENS), lambda tokens: prepare(scaled(largest, tokens)))[-1]
    for shape in shapes:
        yield scaled(shape, tokens)


def _divisible(shape: Shape, degree: int) -> Shape:
    samples, length = shape
    return samples, -(-length // degree) * degree


def _timings(
    stage: OneOfEach,
    sharing: SharingGroup,
    shape: Shape,
    device: torch.device,
    bytes_of: Callable[[Probe], ProbeBytes],
    *,
    shows: bool,
    pace: Pace,
) -> tuple[ExchangeTiming, ExchangeTiming]:
    """Time the exchanges in the attention of a language layer, and behind the projector.

    Image tokens are the first half of the pack.
    """
    same = language_probes(stage, shape, device, shows=shows, sharing=sharing)
    held, probe = [bytes_of(each) for each in same], same[0]
    pack = ExchangeTiming(name="sequence", ranks=sharing.share.degree, tokens=probe.tokens, squares=probe.squares)
    forward, backward = exchange_seconds(*_in_attention(stage, sharing, shape, device), device, pace)
    in_attention = replace(
        pack,
        layer="language",
        forward_seconds=forward,
        backward_seconds=backward,
        recompute_seconds=forward,
        kept_bytes=round(sum(each.share * layer.kept for each, layer in zip(same, held, strict=True))),
        shared_bytes=max(layer.shared for layer in held),
        transient_bytes=max(layer.transient for layer in held),
    )
    forward, backward = exchange_seconds(*_behind_projector(stage, sharing, probe.tokens, device), device, pace)
    return in_attention, replace(pack, layer="projector", forward_seconds=forward, backward_seconds=backward)


Tensors = tuple[torch.Tensor, ...]
Exchange = Callable[[], Tensors]


def _attention(
    stage: OneOfEach, sharing: SharingGroup, device: torch.device, shape: Shape
) -> Callable[[], tuple[float, float]]:
    return passes(*_in_attention(stage, sharing, _divisible(shape, sharing.share.degree), device), device)


def _in_attention(
    stage: OneOfEach, sharing: SharingGroup, shape: Shape, device: torch.device
) -> tuple[Exchange, Tensors]:
    """Return both exchanges of a language layer, and the tensors that they take, in the form that its attention has."""
    noting = _NotingGroup(share=sharing.share, group=sharing.group, given=[])
    # What is exchanged depends on no image.
    probe = language_probes(stage, shape, device, shows=False, sharing=noting)[0]
    with torch.no_grad():
        probe.run(probe.states)
    # A clone keeps the strides, on which the time of a copy depends.
    given = tuple(each.clone().requires_grad_() for each in noting.given[0])
    attended = noting.given[1][0].clone().requires_grad_()
    return lambda: (*sharing.heads_of_pack(*given), sharing.tokens_of_rank(attended)), (*given, attended)


def _behind_projector(
    stage: OneOfEach, sharing: SharingGroup, tokens: int, device: torch.device
) -> tuple[Exchange, Tensors]:
    """Return the exchange behind the projector, and the features that it takes; none for a model for text alone."""
    share, shown = sharing.share, tokens // 2
    first, end = (place * shown // share.degree for place in (share.index, share.index + 1))
    held = tuple(
        torch.zeros(end - first, each.shape[1], dtype=each.dtype, device=device, requires_grad=True)
        for each in _features(stage, device)
    )
    wanted = torch.arange(tokens) < shown
    return lambda: tuple(sharing.features_of_tokens(held, wanted, checksum=0)) if held else (), held


def _features(stage: OneOfEach, device: torch.device) -> Tensors:
    """Return the features of one vision unit."""
    family, model = stage.family, stage.model
    images = family.random_images(model.config, 1)
    tokens = join_samples(family, model.config, [(images.input_ids, images.grids)])
    with torch.no_grad():
        states = family.embed_vision(model, images.pixels.to(device), tokens)
        return tuple(family.image_features(model, (states,) * (1 + len(stage.chain.kept)), tokens))


def exchange_seconds(exchange: Exchange, given: Tensors, device: torch.device, pace: Pace) -> tuple[float, float]:
    """Return the median seconds (forward, backward) of an exchange, which all ranks begin together; 0 for nothing."""
    if not given:
        return 0.0, 0.0
    found = pace.repeat(passes(exchange, given, device), _EXCHANGES)
    forward, backward = (statistics.median(of_pass) for of_pass in zip(*found, strict=True))
    return forward, backward


def passes(exchange: Exchange, given: Tensors, device: torch.device) -> Callable[[], tuple[float, float]]:
    """Return both passes of an exchange, which all ranks begin together and which return their seconds."""
    stopwatch = Stopwatch(device)

    def both() -> tuple[float, float]:
        # Without the barriers, waiting for a late rank would count as an exchange.
        distributed.barrier()
        with stopwatch.section("forward"):
            received = exchange()
        gradients = tuple(map(torch.ones_like, received))
        distributed.barrier()
        with stopwatch.section("backward"):
            torch.autograd.grad(received, given, gradients)
        seconds = stopwatch.read()
        return seconds["forward"], seconds["backward"]

    return both


@dataclass(frozen=True, slots=True, kw_only=True)
class _NotingGroup(SharingGroup):
    """Group that keeps what an attention gives to its exchanges."""

    given: list[Tensors]

    def heads_of_pack(self, *tensors: torch.Tensor) -> Tensors:
        self.given.append(tensors)
        return SharingGroup.heads_of_pack(self, *tensors)

    def tokens_of_rank(self, states: torch.Tensor) -> torch.Tensor:
        self.given.append((states,))
        return SharingGroup.tokens_of_rank(self, states)
