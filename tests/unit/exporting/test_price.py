"""What each part of the price of an export is."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from autotune.exporting.closest import HeldPlan
from autotune.exporting.price import MEANINGS, price_of
from autotune.search.space.abilities import Abilities
from trials.plan import Layout, Levelled, Packed, Padded, Plan
from trials.stage import Recomputed, Stage

PACKED = Packed(qv=9, qt=4096, qv_min=9, qt_min=3968)
HELD = Plan(packing=PACKED, layout=Layout(pipeline=1, data=2, zero=0), stages=(Stage(vision=2, language=4),))
SOME = replace(HELD, stages=(Stage(vision=2, language=4, recompute_vision=1),))
LEVELLED = replace(
    HELD,
    packing=Levelled(levels=(PACKED, replace(PACKED, qt=8192))),
    stages=(Stage(vision=2, language=4, further_levels=(Recomputed(vision=1, language=0),)),),
)
PIPELINE = Plan(
    packing=LEVELLED.packing,
    layout=Layout(pipeline=2, data=1, zero=0),
    stages=tuple(
        Stage(vision=2 - 2 * number, language=2, further_levels=(Recomputed(vision=0, language=0),))
        for number in range(2)
    ),
)


def restricted_of(least: float, switched: float, held: float) -> Any:
    """Limits under which plans take these times."""
    prediction = SimpleNamespace(prediction=SimpleNamespace(epoch_seconds=held), epoch_seconds_error=0.1)
    return SimpleNamespace(
        forecaster=SimpleNamespace(of=lambda _: prediction),
        abilities=Abilities(packs="in order", zero=(0,), towers="apart"),
        without_split=lambda: least,
        with_switches=lambda: switched,
    )


@pytest.mark.parametrize(
    ("plan", "parts"),
    [
        (HELD, {"packs": 4.0}),
        (SOME, {"recomputation": 3.0, "packs": 4 / 3}),
        (LEVELLED, {"levels": 2.0, "recomputation": 1.5, "packs": 4 / 3}),
        (PIPELINE, {"split": 2.0, "recomputation": 1.5, "packs": 4 / 3}),
        (
            replace(HELD, layout=Layout(pipeline=1, data=2, zero=1)),
            {"split": 2.0, "recomputation": 1.5, "packs": 4 / 3},
        ),
    ],
    ids=["held but for its packs", "some layers", "levels", "a pipeline", "another ZeRO stage"],
)
def test_a_part_of_the_price_is_1_where_the_plan_differs_in_nothing_of_it(plan: Plan, parts: dict[str, float]) -> None:
    wanted: Any = SimpleNamespace(plan=plan, prediction=SimpleNamespace(epoch_seconds=1.0), epoch_seconds_error=0.1)
    price = price_of(wanted, HeldPlan(plan=HELD, seconds=4.0), None, restricted_of(2.0, 3.0, 4.0))
    assert price.parts == pytest.approx({name: parts.get(name, 1.0) for name in MEANINGS})
    assert price.over_wanted == 4.0


@pytest.mark.parametrize(
    ("plan", "parts"),
    [(HELD, {"packs": 4.0}), (SOME, {"recomputation": 3.0, "packs": 4 / 3})],
    ids=["kept whole", "some layers"],
)
def test_a_trainer_without_packs_costs_nothing_but_them_for_layers_that_it_can_recompute(
    plan: Plan, parts: dict[str, float]
) -> None:
    wanted: Any = SimpleNamespace(plan=plan, prediction=SimpleNamespace(epoch_seconds=1.0), epoch_seconds_error=0.1)
    restricted = restricted_of(2.0, 3.0, 4.0)
    restricted.abilities = Abilities(packs="none", zero=(0,), towers="apart")
    padded = HeldPlan(plan=replace(HELD, packing=Padded(samples=2)), seconds=4.0)
    price = price_of(wanted, padded, None, restricted)
    assert price.parts == pytest.approx({name: parts.get(name, 1.0) for name in MEANINGS})
