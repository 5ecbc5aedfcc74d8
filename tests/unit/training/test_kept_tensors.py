"""The memory of the ranks of a stage while its tensors are read for one of them."""

import weakref
from collections.abc import Iterator

import torch

from trials.engine.state import kept

TENSORS = 8


class Reader:
    """Tensors that are made when they are read."""

    def __init__(self) -> None:
        self.most_alive = 0
        self.read: list[weakref.ref[torch.Tensor]] = []

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(TENSORS):
            tensor = torch.full((4,), float(number))
            self.read.append(weakref.ref(tensor))
            self.most_alive = max(self.most_alive, sum(each() is not None for each in self.read))
            yield f"layer.{number}", tensor


def test_the_rank_that_uses_them_keeps_every_tensor() -> None:
    found = kept(reader := Reader(), keeps=True)
    assert [found[f"layer.{number}"][0].item() for number in range(TENSORS)] == [*range(TENSORS)]
    assert reader.most_alive == TENSORS


def test_other_ranks_read_every_tensor_and_hold_a_few_at_a_time() -> None:
    assert kept(reader := Reader(), keeps=False) == {}
    assert len(reader.read) == TENSORS
    assert reader.most_alive <= 2
