"""A stand-in for torch's FlashAttention of samples in a row, which runs on CUDA devices alone."""

import torch


def varlen_attn(  # noqa: PLR0917 (as torch has it)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Compute what torch's function of this name documents, with all scores in memory; check what its kernel checks."""
    tokens, heads, size = query.shape
    assert cu_seq_k is not None
    assert (cu_seq_q.dtype, cu_seq_k.dtype) == (torch.int32, torch.int32)
    lengths = cu_seq_q.diff()
    assert (int(cu_seq_q[0]), int(cu_seq_q[-1]), int(lengths.max())) == (0, tokens, max_q)
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert max_q == max_k
    assert size % 8 == 0
    assert all(each.stride(-1) == 1 and each.shape[::2] == (tokens, size) for each in (query, key, value))
    assert enable_gqa or key.shape[1] == heads
    key, value = (each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value))
    sample = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    place = torch.arange(tokens)
    ahead = place - place[:, None]
    left, right = window_size
    seen = sample == sample[:, None]
    seen &= (ahead <= right) | (right < 0)
    seen &= (-ahead <= left) | (left < 0)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (size**-0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(dim=-1), value)
