"""Proposals where packs change what is learned."""

import pytest

from autotune.search.learning.calibrated import CalibratedPredictor
from autotune.search.sampling.advisor import Advisor
from tests.unit.search.sampling.test_advisor import PREDICTOR, SMALL, advisor_of, measured, proposed
from trials.plan import Packing, Plan


def small() -> Advisor:
    return advisor_of(**{**SMALL, "packers": ("best-fit", "cutting-stock")})


def first_predicted(advisor: Advisor) -> Plan:
    found = next(advisor.predicted(1.1), None)
    assert found is not None
    return found


def test_packs_that_change_what_is_learned_are_neither_predicted_best_nor_proposed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forbidden: set[Packing] = set()

    def faults(_: CalibratedPredictor, plan: Plan) -> tuple[str, ...]:
        return ("steps of one length",) if plan.packing in forbidden else ()

    monkeypatch.setattr(CalibratedPredictor, "_learning_faults", faults)
    for _ in range(2):
        forbidden.add(first_predicted(small()).packing)
    advisor = small()
    best = first_predicted(advisor)
    assert len({best.packing, *forbidden}) == 3
    assert PREDICTOR.epoch_seconds(best) < 1.5 * min(map(PREDICTOR.epoch_seconds, advisor.space.starts))
    for _ in range(4):
        plan = proposed(advisor).plan
        assert plan.packing not in forbidden
        advisor.learn(measured(plan))


def test_where_all_packs_change_what_is_learned_nothing_is_proposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CalibratedPredictor, "_learning_faults", lambda *_: ("steps of one length",))
    advisor = small()
    assert list(advisor.predicted(1.1)) == []
    assert advisor.propose() is None
