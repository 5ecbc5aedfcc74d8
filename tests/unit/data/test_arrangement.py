import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trials.arrays import Floats, Ints
from trials.certification import Mixed
from trials.data.steps.arrangement import _MARGIN, arrange
from trials.data.steps.traits import variance_ratios

ANY = Mixed(samples=10**6, tolerance=0.1, variance=2.0)
"""What no steps of these tests keep, so that each step is a window of its own."""


def arranged(
    costs: Floats,
    samples: Ints,
    *,
    ranks: int = 4,
    micro_batches: int = 8,
    mixed: Mixed | None = None,
    traits: Floats | None = None,
    seed: int = 0,
) -> Ints:
    """Rows of packs; where nothing is said of their samples, these are all alike, and steps mixed however they are."""
    step = micro_batches * ranks * float(samples.mean())
    return arrange(
        costs,
        samples,
        np.zeros((len(costs), 0)) if traits is None else traits,
        np.zeros(len(costs), dtype=np.int64),
        (1,),
        data_parallel=ranks,
        micro_batches=micro_batches,
        mixed=mixed or Mixed(samples=round(step), tolerance=0.1, variance=2.0),
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


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 9))
def test_every_pack_has_one_place(rows: int, ranks: int, micro_batches: int) -> None:
    costs, samples = uneven(rows * ranks)
    result = arranged(costs, samples, ranks=ranks, micro_batches=micro_batches)
    assert result.shape == (rows, ranks)
    assert sorted(result.ravel()) == list(range(rows * ranks))


def test_packs_of_a_row_are_alike_in_vision_and_in_language() -> None:
    costs, samples = uneven(8000)
    vision, language = waiting(costs, arranged(costs, samples))
    # Of 64 rows: matched over all 2,000 rows, 3 % would wait, and steps would be of like packs.
    assert max(vision, language) < 0.1
    by_cost = np.argsort(costs.sum(axis=1)).reshape(-1, 4)
    assert min(waiting(costs, by_cost)) > 0.2


def test_full_packs_that_differ_in_tokens_alone_hardly_wait() -> None:
    costs, samples = uneven(8000)
    costs[:, 0] = 1
    vision, language = waiting(costs, arranged(costs, samples))
    assert vision == pytest.approx(0, abs=1e-12)
    # Of 64 rows, as above: 0.2 % over all rows.
    assert language < 0.02


def test_rows_are_matched_over_more_than_a_step_where_that_keeps_the_steps_mixed() -> None:
    costs, samples = uneven(8000)
    wide, narrow = (waiting(costs, arranged(costs, samples, mixed=mixed)).sum() for mixed in (None, ANY))
    assert narrow > 2 * wide


def test_packs_of_like_cost_do_not_share_a_step_where_that_would_bias_it() -> None:
    """Packs that cost more hold longer samples: rows of like packs are steps of like samples, unless rows are mixed."""
    costs, samples = uneven(8000)
    samples[:] = 4
    length = costs[:, 1]
    traits = ((length - length.mean()) / length.std() * 4)[:, None]
    rows = arranged(costs, samples, micro_batches=2, traits=traits)
    of_steps = traits[rows].sum(axis=(1, 2)).reshape(-1, 2).sum(axis=1)
    assert variance_ratios(of_steps[:, None], np.full(len(of_steps), 2 * 4 * 4))[0] < 2 * _MARGIN
    by_cost = np.argsort(length).reshape(-1, 8)
    assert variance_ratios(traits[by_cost].sum(axis=1), np.full(1000, 32))[0] > 20


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
    load = costs.sum(axis=1)[arranged(costs, samples, mixed=ANY)].reshape(-1, 8, 4).sum(axis=1)
    assert (load.max(axis=1) - load.min(axis=1)).mean() < 0.08 * load.mean()
