"""Plans with ZeRO 3 that gather weights once where memory is left: the most that fits, and joint with recomputation."""

from dataclasses import replace

import numpy as np
import pytest

from autotune.plan_text import plan_text
from autotune.prediction.predictor import Predictor
from autotune.search.solver.limits import Limits
from autotune.search.solver.solver import Solver
from tests.values.exchanges import exchanging, of_weights
from tests.values.parameters import examples
from tests.values.search import COSTS, limits_of, predictor_of, scaled
from tests.values.solver import PACKINGS, selecting, uneven
from tests.values.training import plan_of, stage
from trials.errors import InvalidPlan
from trials.plan import Layout, Packing, Plan

LAYOUT = Layout(pipeline=1, data=2, zero=3)


def sharded_problem(number: int) -> tuple[Predictor, Limits, Packing]:
    """Return a random problem of one stage whose weights are in shards, with memory for some of what may stay."""
    random = np.random.default_rng(number)
    language = int(random.integers(1, 4))
    vision = int(random.integers(0, min(5, 7 - language)))
    kinds = len(COSTS.layers)
    costs = uneven(
        scaled(random.uniform(1, 4, kinds).tolist()), random.uniform((0.2, 0, 0), (3, 2, 1), (kinds, 3)).tolist()
    )
    costs = selecting(costs, random.random((kinds, 3)).tolist())
    parameters = int(random.integers(3_000_000))
    costs = replace(costs, layers=tuple((kind, replace(cost, parameters=parameters)) for kind, cost in costs.layers))
    # Some take hardly any time.
    gathers, scatter = 0.1 * random.random(kinds) ** 2, 1e-9 * random.random() ** 2
    *of_layers, of_gradients = of_weights(LAYOUT.data, gathers.tolist(), scatter)
    of_gradients = replace(of_gradients, added_share=2 * random.random())
    predictor = predictor_of(exchanging(costs, *of_layers, of_gradients), batch=int(random.choice([1, 8, 32])))
    packing, limits = PACKINGS[random.integers(len(PACKINGS))], limits_of(1, vision, language)
    least = Solver(predictor, limits).least_bytes(packing, LAYOUT)
    return predictor, replace(limits, memory_limit_bytes=round(least * random.uniform(1, 3))), packing


def every_plan(packing: Packing, limits: Limits) -> list[Plan]:
    """Return the plan of each number of recomputed layers and of layers whose weights stay."""
    vision, language = limits.vision_layers, limits.language_layers
    texts = (
        f"{vision}+{language}r{first},{second}g{once}"
        for first in range(vision + 1)
        for second in range(language + 1)
        for once in range(limits.layers + 1)
    )
    return [Plan(packing=packing, layout=LAYOUT, stages=(stage(text),)) for text in texts]


def times_the_fastest(number: int) -> float:
    """Return the seconds of the plan that is found, as a multiple of those of the fastest one that fits."""
    predictor, limits, packing = sharded_problem(number)
    solver = Solver(predictor, limits)
    plans = every_plan(packing, limits)
    peaks = [stages[0].expected for stages in predictor.plans_memory(plans)]
    fitting = [plan for plan, peak in zip(plans, peaks, strict=True) if peak <= limits.usable_bytes]
    found = solver.solve(packing, LAYOUT)
    assert (found is None) == (not fitting)
    if found is None:
        return 1.0
    assert solver.fullest(found)[0] <= limits.usable_bytes
    (seconds,) = solver.epoch_seconds([found])
    assert not solver.keeps_batch(packing, LAYOUT) or solver.least_seconds(packing, LAYOUT) <= seconds * 1.01
    return seconds / min(solver.epoch_seconds(fitting))


def test_hardly_any_plan_that_fits_is_faster() -> None:
    """By more than 1 %, in one of forty problems at most; `make test` tries the first eight of them."""
    problems = examples(40)
    assert sum(times_the_fastest(number) > 1.01 for number in range(problems)) <= problems // 40


def test_weights_in_shards_alone_can_stay() -> None:
    with pytest.raises(InvalidPlan, match="gathered_once 3 needs weights in shards, and only ZeRO 3 with several"):
        plan_of("4+2g3", data=2, zero=2)
    with pytest.raises(InvalidPlan, match="cannot gather 7 of them once; use gathered_once 0 to 6"):
        plan_of("4+2g7", data=2, zero=3)


def test_a_plan_says_how_many_layers_it_gathers_once() -> None:
    assert "ZeRO 3 gathering 5 layers once; split" in plan_text(plan_of("4+2g5", data=2, zero=3))
    assert plan_of("4+2g0", data=2, zero=3).id == plan_of("4+2", data=2, zero=3).id
