import numpy as np
from hypothesis import given, settings

from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.problem import Problem
from tests.values.parameters import examples
from tests.values.solver import problems
from trials.plan import Layout, Packing


@given(problems(most_stages=2))
@settings(max_examples=examples(30))
def test_no_stage_fits_with_fewer_language_layers_recomputed_than_the_lower_bound_says(
    problem: tuple[Predictor, Limits, Packing, Layout],
) -> None:
    posed = Problem(*problem)
    level, held = posed._level, posed.cuts.different
    nothing = np.zeros_like(held.vision)
    excess = level.excess(held, nothing, nothing)
    over = np.flatnonzero(excess > 0)
    held, excess, nothing = held[over], excess[over], nothing[over]
    for vision in range(int(held.vision.max(initial=0)) + 1):
        tried = np.minimum(held.vision, vision)
        least = level.fewest(held, excess, tried)
        for language in range(int(held.language.max(initial=0)) + 1):
            counts = np.minimum(held.language, language)
            assert not (level.fits(held, tried, counts) & (counts < least)).any()
