"""Plans of the same packs, compared by the layers that they recompute."""

from itertools import product

from autotune.search.sampling.kept import recomputes_more
from tests.values.training import plan_of

PLANS = [
    plan_of(*stages)
    for stages in (
        ("5+0", "0+4"),
        ("5+0r4,0", "0+4"),
        ("5+0r5,0", "0+4r0,2"),
        ("3+0", "2+4"),
        ("3+0r3,0", "2+4"),
        ("2+0", "3+4r1,4"),
    )
]


def test_a_plan_recomputes_more_than_one_of_the_same_split_whose_layers_it_keeps_not_all() -> None:
    more = {(a, b) for (a, one), (b, other) in product(enumerate(PLANS), repeat=2) if recomputes_more(one, other)}
    assert more == {(1, 0), (2, 0), (2, 1), (4, 3)}
