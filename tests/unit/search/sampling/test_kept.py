"""Plans of the same packs, compared by the layers that they recompute, and by what their stages hold."""

from dataclasses import replace
from itertools import product

from autotune.search.sampling.kept import asks_for_more, recomputes_more
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


def test_a_stage_whose_weights_are_freed_sooner_does_not_ask_for_as_much() -> None:
    fewer, more = (plan_of(f"4+2g{once}", data=2, zero=3) for once in (0, 5))
    assert asks_for_more(more, fewer, 0)
    assert not asks_for_more(fewer, more, 0)


def test_a_stage_that_defers_fewer_packs_does_not_ask_for_as_much() -> None:
    usual = plan_of("3+0", "1+2", "0+2")
    more = replace(usual, layout=replace(usual.layout, zero_bubble=True))
    first, second, last = more.stages
    fewer = replace(more, stages=(first, second, replace(last, most_deferred=1)))
    assert asks_for_more(more, fewer, 2)
    assert not asks_for_more(fewer, more, 2)
    assert asks_for_more(fewer, more, 1)
