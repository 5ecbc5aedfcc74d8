"""Patch embeddings as matrices: a convolution whose stride is its kernel sees each value of an image once.

So it is one product of the patches with its weight. As convolutions, libraries run some of them many times slower:
those in bfloat16 on CPUs, and those in three dimensions on some GPUs (pytorch#174051, transformers#45750).
"""

from collections.abc import Sequence

import torch
from torch import nn

# By name, so that it is torch's own under ZeRO 3, too: of a frozen image it keeps the patches alone, no weight.
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd


class _PatchConvolution(_ConvNd):
    """A convolution that multiplies patches with its weight; parameters keep their names and shapes."""

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return what the convolution does: [..., out, *counts] of pixels [..., channels, *sides].

        Like it, leave out what is beyond whole patches.
        """
        sides = pixels.shape[-len(self.kernel_size) :]
        counts = [side // size for side, size in zip(sides, self.kernel_size, strict=True)]
        if not all(counts):
            refused: torch.Tensor = super().forward(pixels)  # by the convolution, which says why
            return refused
        states = linear(_cut(pixels, counts, self.kernel_size), self.weight.flatten(1), self.bias)
        return states.movedim(-1, -1 - len(counts))


class PatchConv2d(_PatchConvolution, nn.Conv2d):
    """Patches of images."""


class PatchConv3d(_PatchConvolution, nn.Conv3d):
    """Patches of a few frames each."""


_AS_MATRIX: dict[type[nn.Module], type[_PatchConvolution]] = {nn.Conv2d: PatchConv2d, nn.Conv3d: PatchConv3d}


def embed_by_matrix(part: nn.Module) -> None:
    """Let each convolution in `part` whose kernels neither overlap nor leave gaps multiply its patches, in place.

    The modules stay the same objects, so that whatever gathers, reads or saves the weights of a module still does.
    """
    for module in part.modules():
        # A class of its own may compute something else.
        matrix = _AS_MATRIX.get(type(module))
        if matrix is not None and _cuts_patches(module):
            module.__class__ = matrix


def _cuts_patches(convolution: nn.Module) -> bool:
    assert isinstance(convolution, _ConvNd)
    dimensions = len(convolution.kernel_size)
    return (
        convolution.stride == convolution.kernel_size
        and convolution.padding in ("valid", (0,) * dimensions)
        and convolution.dilation == (1,) * dimensions
        and convolution.groups == 1
    )


def _cut(pixels: torch.Tensor, counts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return patches [..., *counts, values] of pixels [..., channels, *sides]: a view where an image is one patch."""
    first = pixels.dim() - len(counts)
    for place, (count, size) in enumerate(zip(counts, sizes, strict=True)):
        axis = first + 2 * place
        pixels = pixels.narrow(axis, 0, count * size).unflatten(axis, (count, size))
    patches = range(first, pixels.dim(), 2)
    inner = range(first + 1, pixels.dim(), 2)
    return pixels.permute(*range(first - 1), *patches, first - 1, *inner).flatten(first - 1 + len(counts))
