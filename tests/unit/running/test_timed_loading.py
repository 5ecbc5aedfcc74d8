import numpy as np
import pytest

from trials.tasks.profiling.loading import drawn_packs


@pytest.mark.parametrize("seed", range(4))
def test_packs_with_images_are_timed_however_few_samples_have_one(seed: int) -> None:
    units = np.zeros(1000, dtype=np.int64)
    units[[17, 600]] = 12
    packs = drawn_packs(units, seed)
    assert sorted(map(len, packs)) == [1, 1, 2, 2, 4, 4]
    assert [len(rows) for rows in packs if units[rows].all()] == [1, 2, 4]


def test_packs_of_text_alone_are_timed_where_there_are_no_images() -> None:
    assert all(rows.max() < 5 for rows in drawn_packs(np.zeros(5, dtype=np.int64), seed=0))
