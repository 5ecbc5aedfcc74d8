"""Gathers of weights as a profile times them."""

import pytest
import torch
from torch import distributed, nn

from trials.engine.gathering import gathered_together
from trials.tasks.profiling import gathers


def test_a_timed_gather_is_one_message_for_each_group_of_weights_as_large_as_the_engines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5, bias=False)).bfloat16()
    layer[1].requires_grad_(False)
    groups = [*gathered_together(nn.Sequential(layer), "0")]
    assert [sum(each.numel() for each in group) for group in groups] == [54, 30]
    sent: list[tuple[int, int, torch.dtype]] = []
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        distributed,
        "all_gather_into_tensor",
        lambda whole, part: sent.append((whole.numel(), part.numel(), part.dtype)),
    )
    gathers._gather(groups, 1.0)
    assert sent == [(54, 27, torch.bfloat16), (30, 15, torch.bfloat16)]
