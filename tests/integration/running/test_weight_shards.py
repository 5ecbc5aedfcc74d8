"""Float32 weights in shards, on real ranks: an update is that of AdamW over whole weights."""

import os
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.machines.own_ranks import on_ranks
from tests.values.parameters import parameters
from trials.channels.folder import file_rendezvous
from trials.engine.gradients.flat import FlatGradients
from trials.engine.group import process_group
from trials.engine.state import MOMENTS, PARTS, WEIGHT
from trials.engine.weight_shards import WeightShards

SIZES = ((7, 9), (1,), (130,), (5, 40), (3,))
STEPS = 3


def weights(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.AdamW:
    first, rest = {"params": parameters[1:4], "lr": 0.1}, {"params": [parameters[0], parameters[4]], "lr": 0.01}
    return torch.optim.AdamW([first, {**rest, "weight_decay": 0.0}], weight_decay=0.1, fused=True)


def gradients(step: int) -> list[torch.Tensor]:
    torch.manual_seed(step + 1)
    return [torch.randn(size) for size in SIZES]


def whole(dtype: torch.dtype) -> list[list[list[float]]]:
    """The parts of each weight after some updates of its float32 form."""
    floats = [nn.Parameter(each.detach().float()) for each in weights(dtype)]
    optimizer = adamw(floats)
    for step in range(STEPS):
        for each, gradient in zip(floats, gradients(step), strict=True):
            each.grad = gradient
        optimizer.step()
    parts = [[each.detach(), *(optimizer.state[each][name] for name in MOMENTS)] for each in floats]
    return [[part.flatten().tolist() for part in of_weight] for of_weight in parts]


def in_shards(rendezvous: str, name: str) -> tuple[list[list[list[float]]], list[list[float]], list[int]]:
    """The same, and the weights in their own type, as a rank has them, with the places where they begin."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with process_group(rank, rank, ranks, rendezvous):
        parameters = weights(getattr(torch, name))
        FlatGradients(parameters)
        optimizer = adamw(parameters)
        shards = WeightShards(parameters, optimizer)
        for step in range(STEPS):
            for each, gradient in zip(parameters, gradients(step), strict=True):
                assert each.grad is not None
                each.grad.copy_(gradient)
            shards.update()
        parts = [[shards.read(each, part) for part in PARTS] for each in parameters]
        own = [each.detach().float().flatten().tolist() for each in parameters]
        with torch.no_grad():
            for each, (weight, *moments) in zip(parameters, parts, strict=True):
                shards.write(each, WEIGHT, 2 * weight)
                for part, moment in zip(MOMENTS, moments, strict=True):
                    shards.write(each, part, 2 * moment)
        for each, of_weight in zip(parameters, parts, strict=True):
            for part, value in zip(PARTS, of_weight, strict=True):
                torch.testing.assert_close(shards.read(each, part), 2 * value, rtol=0, atol=0)
        return (
            [[part.flatten().tolist() for part in of_weight] for of_weight in parts],
            own,
            [int(each.storage_offset()) for each in parameters],
        )


@pytest.mark.parametrize(
    ("name", "ranks"),
    parameters(
        {f"{name}, {ranks}": (name, ranks) for name in ("float32", "bfloat16") for ranks in (1, 2, 3)},
        short=("float32, 2", "bfloat16, 3"),
    ),
)
def test_an_update_is_that_of_whole_weights(name: str, ranks: int, tmp_path: Path) -> None:
    expected = whole(getattr(torch, name))
    for parts, own, places in on_ranks(in_shards, file_rendezvous(tmp_path / "rendezvous"), name, world_size=ranks):
        for of_weight, wanted in zip(parts, expected, strict=True):
            for part, values in zip(of_weight, wanted, strict=True):
                assert part == pytest.approx(values, rel=1e-6, abs=1e-7)
        for held, (weight, *_) in zip(own, parts, strict=True):
            assert held == torch.tensor(weight).to(getattr(torch, name)).float().tolist()
        assert all(place % 64 == 0 for place in places)
        assert all(first < second for first, second in pairwise(places))
