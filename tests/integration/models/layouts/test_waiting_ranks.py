"""How long data ranks wait for each other with ZeRO 2 and 3, from the messages that two real ranks send."""

import os
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from autotune.prediction.parts import Parts
from autotune.prediction.simulation.synchronization import Lockstep
from tests.integration.models.layouts.test_gathered_weights import TIGHT, request_of
from tests.machines.own_ranks import on_ranks
from tests.values.exchanges import exchanging, of_weights
from tests.values.search import COSTS, predictor_of
from tests.values.training import plan_of
from trials import wire
from trials.arrays import Floats
from trials.engine.gathering import GatheredWeights, Gathering
from trials.engine.group import process_group
from trials.model.cut import cut
from trials.plan import ZeroStage
from trials.tasks.request import Request
from trials.tasks.session import open_session

pytestmark = pytest.mark.ranks
RANKS = 2
Event: TypeAlias = tuple[str, int]
"""What a rank does in a pack: it `begins` a message, `ends` one, or computes a place, there or `back`."""


@pytest.mark.parametrize("zero", [2, 3])
def test_ranks_wait_as_long_as_predicted(zero: ZeroStage, shallow: Path, tmp_path: Path) -> None:
    plan = plan_of("4+2", data=RANKS, zero=zero, packing=TIGHT)
    events, others = on_ranks(events_of_a_pack, request_of(plan, shallow, tmp_path))
    assert events == others
    layers = np.array([1, 4, 1, 2, 1])
    assert [number for kind, number in events if kind == "there"] == list(range(layers.sum()))
    assert [number for kind, number in events if kind == "back"] == list(reversed(range(layers.sum())))
    random = np.random.default_rng(0)
    for _ in range(50):
        # Of a pass of each kind of layer, some of which take next to no time.
        seconds = random.random((2, RANKS, len(layers))) ** 3
        predicted = predicted_seconds(plan_of("4+2", data=RANKS, zero=zero), seconds)
        assert predicted == pytest.approx(simulated_seconds(events, np.repeat(seconds / layers, layers, axis=2)))


def predicted_seconds(plan: Any, seconds: Floats) -> float:
    predictor = predictor_of(exchanging(COSTS, *of_weights(RANKS, (0.0,) * 5, 0.0)))
    sizes = predictor.sizes(plan.packing, plan.layout)
    waiting = predictor.times.waiting(Parts.of(cut(plan)), plan.layout, sizes)
    assert isinstance(waiting, Lockstep)
    forward, backward = seconds / seconds.sum(axis=2, keepdims=True)
    waiting = Lockstep(
        layers=waiting.layers,
        forward=forward,
        backward=backward,
        waits_forward=waiting.waits_forward,
        waits_back=waiting.waits_back,
    )
    passes = waiting.awaited(np.arange(RANKS)[None, None], *seconds.sum(axis=2)[..., None, None])
    return float(np.sum(passes, axis=0).max())


def simulated_seconds(events: list[Event], seconds: Floats) -> float:
    """Return when the last rank is done; `seconds` are those of each place in both passes, [2, ranks, places]."""
    clock, sent = np.zeros(RANKS), dict[int, float]()
    for kind, number in events:
        if kind == "begins":
            sent[number] = clock.max()  # a message has come when all ranks have sent theirs
        elif kind == "ends":
            clock = np.maximum(clock, sent[number])
        else:
            clock = clock + seconds[int(kind == "back"), :, number]
    return float(clock.max())


def events_of_a_pack(file: Path) -> list[Event]:
    """Return what this rank does in the first pack of a training."""
    rank, request = int(os.environ["RANK"]), wire.decode(Request, file.read_text())
    with (
        process_group(rank, rank, RANKS, f"file://{file}.rendezvous") as device,
        open_session(request, rank, device) as session,
        pytest.MonkeyPatch.context() as patch,
    ):
        events, under_way, numbers = list[Event](), dict[tuple[GatheredWeights, str], int](), iter(range(10_000))
        backward = list[bool]()

        def begins(name: str, original: Any, each: GatheredWeights) -> None:
            if name == "scatter" or not each.is_here:
                under_way[each, name] = next(numbers)
                events.append(("begins", under_way[each, name]))
            original(each)

        def ends(name: str, original: Any, each: GatheredWeights) -> None:
            if (each, name) in under_way:
                events.append(("ends", under_way.pop((each, name))))
            original(each)

        def computes(original: Any, each: Gathering, place: int) -> None:
            original(each, place)
            events.append(("back" if backward else "there", place))

        def starts(original: Any, each: Gathering) -> None:
            backward.clear()
            original(each)

        def turns(original: Any, each: Gathering) -> None:
            backward.append(True)
            original(each)
            events.append(("back", each._at))

        for owner, method, logged in (
            (GatheredWeights, "gather", partial(begins, "gather")),
            (GatheredWeights, "scatter", partial(begins, "scatter")),
            (GatheredWeights, "wait", partial(ends, "gather")),
            (GatheredWeights, "take_scattered", partial(ends, "scatter")),
            (Gathering, "_wait", computes),
            (Gathering, "begin_pass", starts),
            (Gathering, "begin_backward", turns),
        ):
            original = getattr(owner, method)
            patch.setattr(owner, method, lambda *given, logged=logged, original=original: logged(original, *given))
        epoch = session.epoch(0)
        with closing(session.batches(epoch, [0])) as batches:
            session.step(batches, epoch.step(0))
        packs = [number for number, event in enumerate(events) if event == ("there", 0)]
        return events[: packs[1]]
