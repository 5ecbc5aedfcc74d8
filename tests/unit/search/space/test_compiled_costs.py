"""Costs of compiled layers: how long ranks compile them, and the layouts that they cannot predict."""

from dataclasses import replace
from typing import get_args

from autotune.dimensions.folds import unprofiled
from autotune.prediction.costs_table import TypicalPack, costs_text
from autotune.prediction.fit.costs import fit_costs
from tests.unit.prediction.test_sharded_weights import sharded
from tests.unit.prediction.test_tensor_costs import tensor_reports
from tests.unit.search.space.test_sharded_layouts import TIGHT, heavy, names_of, searched
from tests.values.reports import reports_of
from tests.values.search import COSTS, predictor_of, workload_of
from trials import wire
from trials.costs.layer_costs import LayerCosts
from trials.plan import Layout, ZeroStage


def test_a_profile_takes_as_long_to_compile_as_the_slowest_rank_and_shows_it() -> None:
    reports = reports_of(COSTS, 0.0, ranks=2)
    plain = fit_costs(reports)
    compiled = fit_costs([replace(reports[0], compile_seconds=41.6), replace(reports[1], compile_seconds=30.0)])
    assert compiled == replace(plain, compile_seconds=41.6)
    assert wire.decode(LayerCosts, wire.encode(compiled)) == compiled
    pack = TypicalPack.of(workload_of().data)
    assert costs_text(compiled, pack).splitlines()[-1] == "compiling  42 s on each rank, before its first step"
    assert "compiling" not in costs_text(plain, pack)


def test_a_profile_from_before_is_of_layers_as_they_are() -> None:
    document = wire.to_document(COSTS)
    del document["compile_seconds"]
    assert wire.decode(LayerCosts, wire.canonical(document)) == COSTS


def test_compiled_layers_are_predicted_neither_with_zero_3_nor_with_a_tensor_degree() -> None:
    costs = replace(sharded(), compile_seconds=40.0)
    sharding = [Layout(pipeline=1, data=2, zero=zero) for zero in get_args(ZeroStage)]
    assert [unprofiled(costs, layout) is None for layout in sharding] == [True, True, True, False]
    cut = fit_costs(tensor_reports((1e-4, 1e-4), (2,)))
    layout = Layout(pipeline=1, data=1, zero=0, tensor=2)
    assert unprofiled(cut, layout) is None
    assert unprofiled(replace(cut, compile_seconds=40.0), layout) is not None


def test_a_search_leaves_out_what_compiled_layers_cannot_have() -> None:
    costs = sharded(heavy(), seconds=(0.0,) * 5, scatter=0.0)
    plain, _ = searched(predictor_of(costs), TIGHT)
    compiled, _ = searched(predictor_of(replace(costs, compile_seconds=40.0)), TIGHT)
    assert names_of(plain) - names_of(compiled) == {"p1-d4-z3"}
