import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.prediction.columns import CONSTANT, TOKENS, UNITS
from autotune.prediction.sizes import EpochSizes
from tests.values.data import index_of, lengths
from tests.values.search import epoch_of
from trials.plan import Packed, Packing, Padded

packings = st.sampled_from([Padded(samples=1), Padded(samples=3), Packed(qv=12, qt=300, qv_min=10, qt_min=250)])
costs = st.lists(st.floats(0, 1e6), min_size=5, max_size=5).map(np.array)


@given(
    rows=lengths,
    packing=packings,
    data=st.integers(1, 3),
    batch=st.integers(1, 20),
    in_flight=st.integers(1, 5),
    cost=costs,
    cost_behind=costs,
    columns=st.sampled_from([(0, 1, 2, 3, 4), (0, 1, 3, 4), (0, 1, 3), (3, 4), (3,)]),
)
def test_the_heaviest_packs_in_flight_of_every_cost_are_among_the_candidates(
    *,
    rows: list[tuple[int, int]],
    packing: Packing,
    data: int,
    batch: int,
    in_flight: int,
    cost: np.ndarray,
    cost_behind: np.ndarray,
    columns: tuple[int, ...],
) -> None:
    epoch = epoch_of(index_of(rows), batch)(packing, data)
    sizes = EpochSizes(epoch)
    cost, cost_behind = (np.where(np.isin(range(5), columns), each, 0.0) for each in (cost, cost_behind))
    most = 0.0
    for step in range(epoch.steps):
        for packs in epoch.rows(step).T:
            for first in range(len(packs)):
                running, *behind = sizes.table[packs[first : first + in_flight]]
                most = max(most, float(running @ cost + sum(behind, np.zeros(5)) @ cost_behind))
    found = sizes.heaviest(in_flight, columns)
    assert (found[:, 0] @ cost + found[:, 1] @ cost_behind).max() == pytest.approx(most)


def test_the_heaviest_of_many_packs_are_among_few_candidates() -> None:
    random = np.random.default_rng(0)
    rows = list(zip(random.integers(0, 9, 3000).tolist(), random.integers(1, 900, 3000).tolist(), strict=True))
    epoch = epoch_of(index_of(rows), 32)(Packed(qv=20, qt=2000, qv_min=20, qt_min=1900), 2)
    assert len(epoch.packs) > 500
    sizes = EpochSizes(epoch)
    assert len(sizes.heaviest(2, (UNITS, TOKENS, CONSTANT))) < 50
    found = sizes.heaviest(2)
    assert len(found) < 200
    ranks = [sizes.table[packs] for step in range(epoch.steps) for packs in epoch.rows(step).T]
    running = np.concatenate(ranks)
    behind = np.concatenate([np.pad(packs[1:], ((0, 1), (0, 0))) for packs in ranks])
    # Shares of the largest sizes, so that each column decides sometimes.
    costs = random.dirichlet(np.full(10, 0.3), 300) / np.tile(np.maximum(running.max(axis=0), 1.0), 2)
    most = (running @ costs[:, :5].T + behind @ costs[:, 5:].T).max(axis=0)
    assert (found[:, 0] @ costs[:, :5].T + found[:, 1] @ costs[:, 5:].T).max(axis=0) == pytest.approx(most)


def test_the_shorter_last_step_is_a_block_of_its_own() -> None:
    epoch = epoch_of(index_of([(1, 10)] * 10), 4)(Padded(samples=1), 1)
    assert [block.shape for block in EpochSizes(epoch).blocks] == [(2, 4, 1), (1, 2, 1)]


@given(rows=lengths, packing=packings, data=st.integers(1, 3), batch=st.integers(1, 20))
def test_the_samples_of_each_step_are_those_that_it_trains_on(
    rows: list[tuple[int, int]], packing: Packing, data: int, batch: int
) -> None:
    epoch = epoch_of(index_of(rows), batch)(packing, data)
    assert EpochSizes(epoch).step_samples.tolist() == [epoch.step(number).samples for number in range(epoch.steps)]
