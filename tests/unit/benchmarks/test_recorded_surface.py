"""The truth of a recorded surface, on runs of which plan times, drift and noise are known."""

import numpy as np
import pytest

from benchmarks.surfaces.replay import replayed
from benchmarks.surfaces.surface import RECORDED, Surface, read_surface, without_drift
from tests.values.parameters import parameters


def test_times_are_found_without_the_drift_of_the_machine() -> None:
    random = np.random.default_rng(0)
    seconds = {f"plan {number}": 20.0 + number / 4 for number in range(60)}
    fastest = list(seconds)[:20]
    order = [*random.permutation(list(seconds)), *(key for _ in range(5) for key in random.permutation(fastest))]
    drift = 0.1 * np.sin(np.arange(len(order)) / 25)
    runs = [
        (str(key), seconds[str(key)] * float(np.exp(slow + 0.01 * random.standard_normal())))
        for key, slow in zip(order, drift, strict=True)
    ]

    found, error = without_drift(runs)

    ratios = np.array([found[key] / seconds[key] for key in fastest])
    assert ratios.std() < 0.008, "the drift alone is ten times as large"
    assert error == pytest.approx(0.01 / np.sqrt(6), rel=0.5)
    others = np.array([found[key] / seconds[key] for key in seconds if key not in fastest])
    assert others.std() < 0.03


def test_runs_without_repeats_have_no_known_drift() -> None:
    with pytest.raises(AssertionError, match="recorded without repeats"):
        without_drift([(f"plan {number}", 1.0) for number in range(30)])


@pytest.mark.parametrize("name", parameters({name: name for name in RECORDED}, short=("pages-epyc",)))
def test_a_search_among_recorded_plans_chooses_one_of_them(name: str) -> None:
    regrets = replayed("model", Surface(*read_surface(RECORDED[name])), 4, 0)
    assert len(regrets) == 4
    assert all(0 <= regret < 0.2 for regret in regrets)
