"""Data ranks that wait for each other at each layer, compared with layers one after the other."""

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from autotune.prediction.simulation.schedule import simulate
from autotune.prediction.simulation.synchronization import Lockstep, run_waiting
from tests.values.parameters import examples
from trials.arrays import Bools, Floats

KINDS, RANKS = 5, 3


@st.composite
def cases(draw: st.DrawFn) -> tuple[Lockstep, Floats]:
    """Layers that have waits, and seconds of each kind of layer in both passes, [2, ranks, kinds]."""
    layers = np.array(draw(st.lists(st.integers(0, 6), min_size=KINDS, max_size=KINDS)), dtype=np.float64)
    seconds = draw(arrays(np.float64, (2, RANKS, KINDS), elements=st.floats(0.0, 100))) * (layers > 0)
    waits = (np.array(draw(st.lists(st.booleans(), min_size=KINDS, max_size=KINDS))) for _ in range(2))
    forward, backward = seconds / np.maximum(seconds.sum(axis=2, keepdims=True), 1e-300)
    names = ("layers", "forward", "backward", "waits_forward", "waits_back")
    return Lockstep(**dict(zip(names, (layers, forward, backward, *waits), strict=True))), seconds


def layer_by_layer(lockstep: Lockstep, seconds: Floats) -> tuple[Floats, Floats]:
    """Return the times at which ranks end (their forward, their backward pass)."""
    forward = through(np.zeros(RANKS), lockstep, seconds[0], lockstep.waits_forward, range(KINDS))
    return forward, through(forward, lockstep, seconds[1], lockstep.waits_back, reversed(range(KINDS)))


def through(times: Floats, lockstep: Lockstep, seconds: Floats, waits: Bools, kinds: Iterable[int]) -> Floats:
    for kind in kinds:
        layers = int(lockstep.layers[kind])
        for _ in range(layers):
            begun = times.max() if waits[kind] else 0.0
            times = np.maximum(times + seconds[:, kind] / layers, begun)
    return times


@given(cases())
@settings(max_examples=examples(200))
def test_a_rank_begins_a_layer_when_all_have_begun_the_one_before(case: tuple[Lockstep, Floats]) -> None:
    lockstep, seconds = case
    turned, ended = layer_by_layer(lockstep, seconds)
    forward, backward = lockstep.awaited(np.arange(RANKS)[None, None], *seconds.sum(axis=2)[..., None, None])
    assert forward[:, 0, 0] == pytest.approx(turned)
    assert (forward + backward)[:, 0, 0] == pytest.approx(np.full(RANKS, ended.max()))


def test_each_row_of_packs_takes_its_own_time() -> None:
    """Two steps of two rows on two ranks. Ranks with packs for one tower alone wait for each other at the projector."""
    vision, language = [0.0, 1, 0, 0, 0], [0.0, 0, 0, 1, 0]
    shares = np.array([vision, language, vision, vision, language, language, vision, language])
    always = np.ones(KINDS, dtype=np.bool_)
    lockstep = Lockstep(
        layers=np.array([1.0, 10, 1, 10, 1]), forward=shares, backward=shares, waits_forward=always, waits_back=always
    )
    packs = np.arange(8).reshape(2, 2, 2)
    seconds = np.repeat([10.0, 3.0], 4).reshape(4, 2, 1)
    found = run_waiting(lockstep, simulate, packs, seconds, seconds).seconds
    assert found == pytest.approx([2 * 20 + 20, 2 * 20 + 20, 2 * 6 + 6, 2 * 6 + 6])
