"""How much exchanges of weights and gradients, and averages, add to passes of layers, timed by two real ranks."""

import os
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.machines.own_ranks import on_ranks
from trials.channels.folder import file_rendezvous
from trials.engine.group import process_group
from trials.job import ModelSection, TrainingSection
from trials.tasks.profiling.gathers import time_added_share
from trials.tasks.profiling.layer_passes import run_layers, saved_share, share_of_turn
from trials.tasks.profiling.one_of_each import one_of_each
from trials.tasks.profiling.overlap import Overlap, time_overlap
from trials.tasks.profiling.pace import Pace
from trials.tasks.request import ProbeSizes

SIZES = ProbeSizes(unit_counts=(1, 4, 2), sample_shapes=((1, 8), (2, 60), (2, 16)), image_units=2)
MESSAGES = ("all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.mark.parametrize(
    ("alone", "computing", "both", "saved"), [(1.0, 2, 2, 1), (2, 1, 3, 0), (1, 2, 2.5, 0.5), (1, 2, 4, -1)]
)
def test_the_saved_share_is_that_of_the_shorter_of_both(
    alone: float, computing: float, both: float, saved: float
) -> None:
    assert share_of_turn(lambda: alone, lambda: computing, lambda: both) == pytest.approx(saved)


@pytest.mark.ranks
def test_passes_run_with_the_messages_that_are_timed_alone(example: Path, tmp_path: Path) -> None:
    for share, sent, shortened in on_ranks(timed, example / "model", file_rendezvous(tmp_path / "meeting"), 60.0):
        assert 0 <= share <= 2
        assert shortened == {}
        gathered, scattered = (sent[name] for name in MESSAGES)
        # Four layers of two towers; a round sends all messages twice: alone, and during passes.
        rounds, rest = divmod(scattered, 2 * 2 * 4)
        assert (rest, gathered) == (0, 2 * scattered)
        assert rounds > 1


@pytest.mark.ranks
def test_over_slow_links_nothing_is_taken_to_be_saved(example: Path, tmp_path: Path) -> None:
    for share, sent, shortened in on_ranks(timed, example / "model", file_rendezvous(tmp_path / "meeting"), 0.001):
        assert (share, sent, shortened) == (1.0, {}, {"exchanges during passes": 0.0})


def timed(model: Path, rendezvous: str, seconds: float) -> tuple[float, dict[str, int], dict[str, float]]:
    """Return (the share that this rank measures, its messages by name, `Pace.shortened`) within these seconds."""
    rank, ranks, sent = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Counter[str]()

    def counted(name: str, original: Any, *given: Any, **named: Any) -> Any:
        sent[name] += 1
        return original(*given, **named)

    with process_group(rank, rank, ranks, rendezvous) as device, pytest.MonkeyPatch.context() as patch:
        for name in MESSAGES:
            patch.setattr(distributed, name, partial(counted, name, getattr(distributed, name)))
        stage = one_of_each(ModelSection(path=str(model), dtype="float32"), TrainingSection(), torch.device("cpu"))
        pace = Pace.of(seconds, device)
        return time_added_share(stage, SIZES, 0.001, device, pace), dict(sent), pace.shortened


@pytest.mark.ranks
@pytest.mark.parametrize("seconds", [60.0, 0.001])
def test_averages_begin_evenly_during_the_passes(example: Path, tmp_path: Path, seconds: float) -> None:
    found = on_ranks(overlapped, example / "model", file_rendezvous(tmp_path / "meeting"), seconds)
    assert len({overlap.bucket_bytes for overlap, _, _ in found}) == 1
    for overlap, events, shortened in found:
        assert 0 <= overlap.hidden_share <= 1
        assert ("averaging of gradients during computation" in shortened) is (seconds < 1)
        *_, both = events.split("|")
        before, *of_passes = (len(averages) for averages in both.split("p"))
        # Fewer than one during each pass where an average takes longer than one.
        assert (before, max(of_passes)) <= (0, 1 + min(of_passes))
        assert sum(of_passes) > 0
        # At most once more: either of them is repeated until both take as long.
        assert len(of_passes) <= 2 or sum(of_passes) * overlap.bucket_bytes <= 8 << 20


def overlapped(model: Path, rendezvous: str, seconds: float) -> tuple[Overlap, str, dict[str, float]]:
    """Return (what this rank measures, its passes "p" and averages "a" in turn, `Pace.shortened`).

    "|" is where a turn of both together begins.
    """
    rank, ranks, events = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), list[str]()

    def noted(event: str, original: Any, *given: Any, **named: Any) -> Any:
        events.extend(event if event != "a" or "async_op" in named else "")
        return original(*given, **named)

    def saved(exchange: Any, passes: Any, both: Any, *given: Any) -> float:
        return saved_share(exchange, passes, partial(noted, "|", both), *given)

    with process_group(rank, rank, ranks, rendezvous) as device, pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "all_reduce", partial(noted, "a", distributed.all_reduce))
        patch.setattr("trials.tasks.profiling.overlap.run_layers", partial(noted, "p", run_layers))
        patch.setattr("trials.tasks.profiling.overlap.saved_share", saved)
        stage = one_of_each(ModelSection(path=str(model), dtype="float32"), TrainingSection(), torch.device("cpu"))
        pace = Pace.of(seconds, device)
        return time_overlap(stage, SIZES, device, 3, pace), "".join(events), pace.shortened
