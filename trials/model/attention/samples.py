"""The samples of a pack, and what their tokens may attend to."""

from itertools import accumulate

import torch


class PackedSamples:
    """What the attention of all layers takes of a pack; made once for a pack.

    Lengths and blocks are known to the host, so that no layer waits for the device.
    """

    def __init__(
        self,
        lengths: tuple[int, ...],
        blocks: torch.Tensor | None = None,
        *,
        causal: bool = True,
        beyond_window: bool = False,
    ) -> None:
        """`lengths` are those of the samples. Tokens of one of `blocks` see each other, too, inside the window.

        `blocks` [T], on the CPU, holds the number of a token's block in its sample, or -1 for a token that only sees
        what is before it. Where they see `beyond_window`, no window is between the tokens of a block. Where attention
        is not `causal`, tokens see all of their sample.
        """
        self.lengths = lengths
        self.causal = causal
        self.longest = max(lengths)
        self._beyond_window = beyond_window
        self._blocks = blocks if blocks is not None and bool((blocks >= 0).any()) else None
        self._masks: dict[int | None, list[torch.Tensor | None]] = {}
        self._ends: torch.Tensor | None = None

    @property
    def has_blocks(self) -> bool:
        """Whether tokens of blocks see what is behind them."""
        return self._blocks is not None

    def ends(self, device: torch.device) -> torch.Tensor:
        """Return the ends of the samples in the pack behind a 0, int32 [samples + 1]; copied to the device once."""
        if self._ends is None:
            ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._ends = ends.to(device, non_blocking=True)
        return self._ends

    def masks(self, window: int | None, device: torch.device) -> list[torch.Tensor | None]:
        """Return a mask [length, length] for each sample, True where a token may look; None where it needs none."""
        if not self.causal:
            return [None] * len(self.lengths)
        if window not in self._masks:
            blocks = self._blocks.split(self.lengths) if self._blocks is not None else [None] * len(self.lengths)
            self._masks[window] = [
                self._mask(length, window, block, device) for length, block in zip(self.lengths, blocks, strict=True)
            ]
        return self._masks[window]

    def _mask(
        self, length: int, window: int | None, blocks: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor | None:
        in_blocks = blocks is not None and bool((blocks >= 0).any())
        if not in_blocks and (window is None or length <= window):
            return None
        place = torch.arange(length, device=device)
        before = place[:, None] >= place
        near = place > place[:, None] - (length if window is None else window)
        if blocks is None:
            return before & near
        number = blocks.to(device, non_blocking=True)
        together = (number[:, None] == number) & (number >= 0)
        return before & near | together if self._beyond_window else (before | together) & near
