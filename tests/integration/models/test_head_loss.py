"""The loss of the rows with a label alone is that of all rows, in chunks too."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from trials.data.records.sample import IGNORED
from trials.model.ends import head_loss
from trials.model.ends.head_loss import summed_loss, targets_of

ROWS, HIDDEN, WORDS = 50, 4, 97
SEVEN_ROWS = 7 * WORDS * 4
"""Bytes of float32 logits."""


def head() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, WORDS))


def labels(count: int) -> torch.Tensor:
    found = torch.full((ROWS,), IGNORED)
    found[torch.randperm(ROWS)[:count]] = torch.randint(0, WORDS, (count,))
    return found


def results(module: nn.Module, states: torch.Tensor, loss: torch.Tensor) -> list[torch.Tensor]:
    """The loss and all gradients."""
    loss.backward()
    learning = [states, *module.parameters()]
    gradients = [each.grad for each in learning if each.grad is not None]
    assert len(gradients) == len(learning)
    for each in learning:
        each.grad = None
    return [loss.detach(), *gradients]


@pytest.mark.parametrize("limit", [1 << 30, SEVEN_ROWS])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count", [0, 1, 20, ROWS])
def test_loss_and_gradients_are_those_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, count: int, weighted: bool, limit: int
) -> None:
    monkeypatch.setattr(head_loss, "_LOGITS_BYTES", limit)
    torch.manual_seed(count)
    module, states, wanted = head(), torch.randn(ROWS, HIDDEN, requires_grad=True), labels(count)
    scales = torch.rand(ROWS) if weighted else torch.tensor(0.5)
    found = results(module, states, summed_loss(module, states, targets_of(wanted, scales), WORDS))
    all_rows = (cross_entropy(module(states), wanted, ignore_index=IGNORED, reduction="none") * scales).sum()
    for one, other in zip(found, results(module, states, all_rows), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


class MostRows(TorchDispatchMode):
    """Notes the most rows of logits that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dim() == 2 and found.shape[1] == WORDS:
            self.most = max(self.most, len(found))
        return found


@pytest.mark.parametrize(("limit", "most"), [(1 << 30, 20), (SEVEN_ROWS, 7)])
def test_logits_are_those_of_targets_and_bounded(monkeypatch: pytest.MonkeyPatch, limit: int, most: int) -> None:
    monkeypatch.setattr(head_loss, "_LOGITS_BYTES", limit)
    module, states = head(), torch.randn(ROWS, HIDDEN, requires_grad=True)
    with MostRows() as rows:
        summed_loss(module, states, targets_of(labels(20), torch.ones(())), WORDS).backward()
    assert rows.most == most


def test_a_head_that_trains_behind_frozen_layers_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_loss, "_LOGITS_BYTES", SEVEN_ROWS)
    module = head()
    summed_loss(module, torch.randn(ROWS, HIDDEN), targets_of(labels(20), torch.ones(())), WORDS).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in module.parameters())
