"""Float32 weights in shards, on real ranks: an update is that of AdamW over whole weights."""

import os
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch
from torch import nn

from tests.machines.own_ranks import on_ranks
from trials.channels.folder import file_rendezvous
from trials.engine.gathering import GatheredWeights
from trials.engine.gradients.flat import FlatGradients
from trials.engine.group import process_group
from trials.engine.state import MOMENTS, PARTS, WEIGHT
from trials.engine.weight_shards import ShardedState, WeightShards, update_shards

SIZES = ((7, 9), (1,), (130,), (5, 40), (3,))
STEPS = 3
TYPES = ("float32", "bfloat16")
CASES = tuple(product(TYPES, ("whole", "stay", "go")))
Updated: TypeAlias = tuple[list[list[list[float]]], list[list[float]], list[int]]


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


def give(shards: WeightShards, values: list[torch.Tensor]) -> None:
    """Set the gradients to these values, which are the same on all ranks."""
    if isinstance(shards, GatheredWeights):
        shards.begin_gradients()
    for each, value in zip(shards.places, values, strict=True):
        assert each.grad is not None
        each.grad.copy_(value)
    if isinstance(shards, GatheredWeights) and shards.gradients is not None:
        shards.gradients.zero_()
        shards.scatter()
        shards.take_scattered()
        shards.gradients.div_(torch.distributed.get_world_size())


def of_all_kinds(rendezvous: str) -> list[Updated]:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with process_group(rank, rank, ranks, rendezvous):
        return [in_shards(*case) for case in CASES]


def in_shards(name: str, kind: str) -> Updated:
    """The same, and the weights in their own type, as a rank has them, with the places where they begin.

    Of `kind` "whole" each rank has all gradients, with "stay" they are scattered, and with "go" weights are freed too.
    """
    parameters = weights(getattr(torch, name))
    optimizer = adamw(parameters)
    if kind == "whole":
        FlatGradients(parameters)
        shards = WeightShards(parameters)
    else:
        shards = GatheredWeights(parameters, stays=kind == "stay")
    update_shards(optimizer, [shards])
    state = ShardedState([shards], optimizer, cast(Any, SimpleNamespace(tensor=None, slices={})))
    for step in range(STEPS):
        give(shards, gradients(step))
        optimizer.step()
        shards.gather_update()
    parts = [[state.read(each, part) for part in PARTS] for each in parameters]
    own = [state.working(each).float().flatten().tolist() for each in parameters]
    if isinstance(shards, GatheredWeights):
        shards.gather()
        shards.wait()
        assert own == [each.detach().float().flatten().tolist() for each in parameters]
        shards.release()
    for each, (weight, *moments) in zip(parameters, parts, strict=True):
        state.write(each, WEIGHT, 2 * weight)
        for part, moment in zip(MOMENTS, moments, strict=True):
            state.write(each, part, 2 * moment)
    for each, of_weight in zip(parameters, parts, strict=True):
        for part, value in zip(PARTS, of_weight, strict=True):
            torch.testing.assert_close(state.read(each, part), 2 * value, rtol=0, atol=0)
        doubled = (2 * of_weight[0]).to(each.dtype)
        torch.testing.assert_close(state.working(each), doubled, rtol=0, atol=0)
    return (
        [[part.flatten().tolist() for part in of_weight] for of_weight in parts],
        own,
        [int(each.storage_offset()) for each in parameters],
    )


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 3])
def test_an_update_is_that_of_whole_weights(ranks: int, tmp_path: Path) -> None:
    place = file_rendezvous(tmp_path / "rendezvous")
    expected = {name: whole(getattr(torch, name)) for name in TYPES}
    for of_rank in on_ranks(of_all_kinds, place, world_size=ranks):
        for (name, kind), (parts, own, places) in zip(CASES, of_rank, strict=True):
            for of_weight, wanted in zip(parts, expected[name], strict=True):
                for part, values in zip(of_weight, wanted, strict=True):
                    assert part == pytest.approx(values, rel=1e-6, abs=1e-7), (name, kind)
            for held, (weight, *_) in zip(own, parts, strict=True):
                assert held == torch.tensor(weight).to(getattr(torch, name)).float().tolist(), (name, kind)
            assert all(each % 64 == 0 for each in places)
            assert all(first < second for first, second in pairwise(places))
