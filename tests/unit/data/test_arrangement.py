import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.data.arrangement import Floats, arrange
from trials.data.records.sample import Ints


def arranged(
    costs: Floats, samples: Ints, *, ranks: int = 4, micro_batches: int = 8, window_rows: int = 10**6, seed: int = 0
) -> Ints:
    return arrange(
        costs,
        samples,
        np.zeros(len(costs), dtype=np.int64),
        (1,),
        data_parallel=ranks,
        micro_batches=micro_batches,
        window_rows=(window_rows,),
        random=np.random.default_rng(seed),
    )


def uneven(packs: int) -> tuple[Floats, Ints]:
    """Random costs of packs, with 1 to 9 samples each."""
    random = np.random.default_rng(0)
    return random.random((packs, 3)) * (1, 1, 0), random.integers(1, 10, packs)


def waiting(costs: Floats, rows: Ints) -> Floats:
    """Return the share of time in which ranks wait for the costliest pack of the row: for vision, and for language."""
    of_rows = costs[rows][..., :2]
    share: Floats = 1 - of_rows.sum(axis=(0, 1)) / (rows.shape[1] * of_rows.max(axis=1).sum(axis=0))
    return share


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9), st.integers(1, 50))
def test_every_pack_has_one_place(rows: int, ranks: int, micro_batches: int, window_rows: int) -> None:
    costs, samples = uneven(rows * ranks)
    result = arranged(costs, samples, ranks=ranks, micro_batches=micro_batches, window_rows=window_rows)
    assert result.shape == (rows, ranks)
    assert sorted(result.ravel()) == list(range(rows * ranks))


def test_packs_of_a_row_are_alike_in_vision_and_in_language() -> None:
    costs, samples = uneven(8000)
    vision, language = waiting(costs, arranged(costs, samples))
    assert max(vision, language) < 0.03
    by_cost = np.argsort(costs.sum(axis=1)).reshape(-1, 4)
    assert min(waiting(costs, by_cost)) > 0.2


def test_full_packs_that_differ_in_tokens_alone_hardly_wait() -> None:
    costs, samples = uneven(8000)
    costs[:, 0] = 1
    vision, language = waiting(costs, arranged(costs, samples))
    assert vision == pytest.approx(0, abs=1e-12)
    assert language < 0.002


def test_a_wider_window_waits_less() -> None:
    costs, samples = uneven(8000)
    shares = [waiting(costs, arranged(costs, samples, window_rows=rows)).sum() for rows in (1, 10, 100, 2000)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 5 * shares[-1]


def test_packs_are_matched_inside_their_window_alone() -> None:
    """With windows of one row, each row is a random one: other seeds give other partners."""
    costs, samples = uneven(400)
    partners = [
        {frozenset(row.tolist()) for row in arranged(costs, samples, window_rows=rows, seed=seed)}
        for rows, seed in ((100, 0), (100, 1), (5, 0), (5, 1))
    ]
    assert partners[0] == partners[1]
    assert len(partners[2] & partners[3]) < 10


def test_steps_have_nearly_the_same_number_of_samples() -> None:
    costs, samples = uneven(8000)
    rows = arranged(costs, samples)
    of_steps = samples[rows].sum(axis=1).reshape(-1, 8).sum(axis=1)
    of_random = samples[np.random.default_rng(1).permutation(rows)].sum(axis=1).reshape(-1, 8).sum(axis=1)
    assert of_steps.std() < 0.4 * of_random.std()
    assert (abs(of_steps / of_steps.mean() - 1) < 0.1).all()


def test_a_step_begins_and_ends_with_its_small_packs() -> None:
    costs, samples = uneven(320)
    of_rows = costs.sum(axis=1)[arranged(costs, samples)].sum(axis=1).reshape(-1, 8)
    rising, falling = of_rows[:, :5], of_rows[:, 4:]
    assert (np.diff(rising, axis=1) >= 0).all()
    assert (np.diff(falling, axis=1) <= 0).all()


def test_a_global_batch_above_all_samples_is_one_step() -> None:
    costs, samples = uneven(40)
    assert sorted(arranged(costs, samples, micro_batches=10**12).ravel()) == list(range(40))


def test_no_rank_has_more_work_in_a_step_than_the_others() -> None:
    costs, samples = uneven(800)
    load = costs.sum(axis=1)[arranged(costs, samples, window_rows=1)].reshape(-1, 8, 4).sum(axis=1)
    assert (load.max(axis=1) - load.min(axis=1)).mean() < 0.08 * load.mean()
