"""The update of a single rank is timed as its engine runs it, else in the type that the engine updates."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trials.job import TrainingSection
from trials.plan import Layout
from trials.tasks.profiling import updates
from trials.tasks.profiling.updates import ExchangeRates

RATES = ExchangeRates(reduction=0.0, gathering=0.0)


def timed(monkeypatch: pytest.MonkeyPatch, ranks: int) -> tuple[float, list[Layout], list[torch.dtype]]:
    """(seconds per parameter of a single rank, layouts of timed engines, types of the weights of timed optimizers)."""
    layouts, dtypes = list[Layout](), list[torch.dtype]()

    def engine_seconds(_: object, layout: Layout, *__: object) -> float:
        layouts.append(layout)
        return 6.0

    def build_optimizer(stage: nn.Module, _: object) -> torch.optim.Optimizer:
        dtypes.extend(each.dtype for each in stage.parameters())
        return torch.optim.AdamW(stage.parameters())

    monkeypatch.setattr(updates, "_engine_seconds", engine_seconds)
    monkeypatch.setattr(updates, "build_optimizer", build_optimizer)
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda: ranks)
    request: Any = SimpleNamespace(job=SimpleNamespace(training=TrainingSection()))
    task: Any = SimpleNamespace(zero_stages=(1,), repeats=1)
    pace: Any = SimpleNamespace(repeats=lambda *_: 1)
    build: Any = lambda: nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)  # noqa: E731
    alone, *_ = updates.time_updates(request, task, build, RATES, pace)
    return alone.seconds_per_parameter, layouts, dtypes


def test_one_rank_times_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, layouts, dtypes = timed(monkeypatch, ranks=1)
    assert (seconds, layouts, dtypes) == (3.0, [Layout(pipeline=1, data=1, zero=1)], [])


def test_one_of_several_ranks_times_float32_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, layouts, dtypes = timed(monkeypatch, ranks=2)
    assert 0 < seconds < 1
    assert layouts == [Layout(pipeline=1, data=2, zero=1)]
    assert dtypes == [torch.float32]
