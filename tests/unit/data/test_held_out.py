"""Which samples are held out of a training."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.held_out import hold_out, trained_on, without_records
from tests.values.data import index_of, lengths
from trials.data.index import DatasetIndex
from trials.data.order import epoch_order
from trials.errors import DataError
from trials.job import EvaluationSection


def evaluation(samples: float, seed: int = 0) -> EvaluationSection:
    return EvaluationSection(samples=samples, seed=seed)


def records(index: DatasetIndex) -> list[int]:
    return [int(number) for number in index.record]


@given(lengths, st.lists(st.sampled_from([1.0, 2.5]), min_size=1, max_size=3), st.integers(0, 3))
def test_every_sample_is_either_trained_on_or_held_out(
    rows: list[tuple[int, int]], repeats: list[float], seed: int
) -> None:
    index = index_of([*rows, (1, 1)], repeats)
    count = len(rows) // 2 or 1
    if count >= len(index):
        return
    training, held_out = hold_out(index, evaluation(count, seed))
    assert held_out is not None
    assert len(held_out) == count
    assert sorted(records(training) + records(held_out)) == records(index)
    assert [file.repeat for file in training.files] == [file.repeat for file in index.files]
    assert sorted(epoch_order(held_out, 5, 7)) == list(range(count))
    assert not len(trained_on(training, 0, held_out))
    assert len(trained_on(index, 0, held_out)) == count


def test_the_held_out_samples_depend_on_their_own_seed_alone() -> None:
    index = index_of([(1, number) for number in range(1, 101)])
    _, first = hold_out(index, evaluation(0.07))
    _, again = hold_out(index, evaluation(7))
    _, other = hold_out(index, evaluation(7, seed=1))
    assert first is not None
    assert again is not None
    assert other is not None
    assert records(first) == records(again) != records(other)
    assert len(other) == 7


def test_the_same_records_can_be_held_out_of_what_is_left_of_the_data() -> None:
    index = index_of([(1, number) for number in range(1, 11)])
    training, held_out = hold_out(index, evaluation(4))
    assert held_out is not None
    lost = [records(training)[0], records(held_out)[0]]
    left = index.keep(~np.isin(index.record, lost))
    assert records(without_records(left, held_out.record)) == records(training)[1:]
    with pytest.raises(DataError, match="the 4 records held out leave none of the 4 samples that can be used"):
        without_records(held_out, held_out.record)


def test_without_an_evaluation_the_index_stays_as_it_is() -> None:
    index = index_of([(1, 2)] * 3)
    assert hold_out(index, EvaluationSection()) == (index, None)


@pytest.mark.parametrize("samples", [4, 40, 0.99])
def test_a_part_that_leaves_nothing_to_train_on_is_refused(samples: float) -> None:
    index = index_of([(1, 2)] * 4)
    with pytest.raises(DataError, match=rf"evaluation\.samples: {samples:g} of the 4 samples of data.sources leave"):
        hold_out(index, evaluation(samples))


def test_only_samples_that_an_epoch_shows_are_held_out_or_count_as_trained_on() -> None:
    index = index_of([(1, number) for number in range(1, 41)], [0.5])
    shown = {int(row) for row in np.unique(epoch_order(index, 0, 0))}
    _, held_out = hold_out(index, evaluation(19))
    assert held_out is not None
    assert set(records(held_out)) < shown
    once = replace(index, files=tuple(replace(file, repeat=1.0) for file in index.files))
    assert set(trained_on(index, 0, once)) == shown


def test_a_record_that_two_sources_name_is_held_out_of_both() -> None:
    once = index_of([(1, number) for number in range(1, 21)], [1.0, 1.0])
    other = replace(once.files[1], path=once.files[0].path)
    twice = replace(once, files=(once.files[0], other), offset=once.record % 10)
    training, held_out = hold_out(twice, evaluation(3))
    assert held_out is not None
    assert (len(training), len(held_out)) == (14, 3)
    assert not set(training.offset) & set(held_out.offset)
    assert not len(trained_on(training, 0, held_out))
    with pytest.raises(DataError, match=r"10 of the 10 samples of data\.sources leave none"):
        hold_out(twice, evaluation(10))
