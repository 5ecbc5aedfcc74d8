"""The tokens of a pack with its samples and images, also as the one tensor that travels between stages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch

_PARTS = 6
"""Ids, positions, lengths, grids, (whether the unit stands in, level), shapes of the states."""
_DIMENSIONS, _UNUSED = 4, -1
"""Most dimensions of a state, and what fills up the shape of one with fewer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackTokens:
    """The T tokens of a pack, on the CPU: they decide what the host lets the device do.

    A sample starts where `lengths` says: positions may restart or repeat inside it.
    """

    input_ids: torch.Tensor
    """int64 [T]"""
    positions: torch.Tensor
    """int64 [P, T], from 0 or 1 in each sample. P is 1, or 3 where positions are (time, height, width).

    It is 2 where the tokens of a prompt see each other: the second row is 0 for them, and 1 for those behind it."""
    lengths: tuple[int, ...]
    """Tokens of each sample, its padding included; their sum is T."""
    grids: torch.Tensor
    """int64 [images, G]: what the family says of each image. G is 0 where images are tiles of one size.

    Where ranks share the pack, these are the images whose units this rank computes."""
    stands_in: bool = False
    """Whether the units are one of zeros, which no token shows, because this rank has none to compute."""
    level: int = 0
    """Level of the pack, which decides the ranks that share it and the layers that are recomputed."""

    @property
    def checksum(self) -> int:
        """The same for packs of the same tokens."""
        return crc32(self.input_ids.numpy().tobytes())


def pack(states: Sequence[torch.Tensor], tokens: PackTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (floats, integers): all that a stage needs, as DeepSpeed sends it.

    A single state keeps its shape. Several are flattened into one tensor: DeepSpeed wants a gradient for each float
    tensor that it sends, and as many of them for each pack.
    """
    shapes = [[*state.shape, *(_UNUSED,) * (_DIMENSIONS - state.dim())] for state in states]
    flags = torch.tensor([[int(tokens.stands_in), tokens.level]])
    lengths = torch.tensor([tokens.lengths])
    parts = (tokens.input_ids[None], tokens.positions, lengths, tokens.grids, flags, torch.tensor(shapes))
    sizes = torch.tensor([size for part in parts for size in part.shape])
    # One tensor of integers, since DeepSpeed sends each tensor of a tuple by itself.
    integers = torch.cat([sizes, *(part.flatten() for part in parts)])
    # Towers that begin with a convolution keep its strides, and only contiguous tensors can be sent.
    floats = states[0].contiguous() if len(states) == 1 else torch.cat([state.flatten() for state in states])
    return floats, integers.to(floats.device, non_blocking=True)


def unpack(floats: torch.Tensor, integers: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], PackTokens]:
    """Return the states and the tokens of which `pack` made two tensors; the integers have come to the CPU."""
    sizes = integers[: 2 * _PARTS].view(_PARTS, 2).tolist()
    values = integers[2 * _PARTS :].split([rows * columns for rows, columns in sizes])
    ids, positions, lengths, grids, flags, shapes = (part.view(size) for part, size in zip(values, sizes, strict=True))
    tokens = PackTokens(
        input_ids=ids[0],
        positions=positions,
        lengths=tuple(lengths[0].tolist()),
        grids=grids,
        stands_in=bool(flags[0, 0]),
        level=int(flags[0, 1]),
    )
    if len(shapes) == 1:
        return (floats,), tokens
    every = [[size for size in shape if size != _UNUSED] for shape in shapes.tolist()]
    states = floats.split([math.prod(shape) for shape in every])
    return tuple(state.view(shape) for state, shape in zip(states, every, strict=True)), tokens
