"""Whether compiling is repaid within a training, and how far two profiles can be compared."""

from dataclasses import replace

import pytest

from autotune.prediction.costs_table import TypicalPack
from autotune.search.compile_setting import steps_of, with_layers
from autotune.search.compile_trade import CompileTrade, only_compiled, profiles_error
from tests.values.search import COSTS, times, workload_of
from trials.job import TrainingSection
from trials.layer_costs import KINDS, LayerCosts, LayerKind

TRADE = CompileTrade(
    plain_step_seconds=1.0, compiled_step_seconds=0.8125, error=0.0625, compile_seconds=62.0, steps=310
)
PACK = TypicalPack.of(workload_of().data)


def test_a_short_training_does_not_repay_compiling() -> None:
    assert TRADE.repaid_steps == 992  # 2 x 62 s, at a clear gain of 0.125 s a step
    assert not TRADE.pays
    assert TRADE.reason == (
        "steps with compiled layers take 0.81 of the time, known to 0.06; compiling takes 62 s, repaid 2 times after "
        "992 steps; the training has 310: not compiled"
    )


def test_a_long_training_repays_it_from_the_last_step_that_is_needed() -> None:
    enough = replace(TRADE, steps=992)
    assert enough.pays
    assert enough.reason.endswith("repaid 2 times after 992 steps; the training has 992: compiled")
    assert not replace(TRADE, steps=991).pays


@pytest.mark.parametrize("error", [0.1875, 0.3])
def test_a_gain_within_the_error_of_the_profiles_is_none_however_long_the_training(error: float) -> None:
    unclear = replace(TRADE, error=error, steps=10**9)
    assert unclear.repaid_steps is None
    assert not unclear.pays
    assert unclear.reason.endswith(f"known to {error:.2f}, which is no clear gain: not compiled")


def test_slower_compiled_layers_are_never_chosen() -> None:
    assert not replace(TRADE, compiled_step_seconds=1.1, error=0.0, compile_seconds=0.0, steps=10**9).pays


def test_the_length_of_a_training_is_that_of_its_epochs_or_less() -> None:
    training = TrainingSection(global_batch_samples=32)
    assert steps_of(training, 1000) == 32  # one epoch, where the job gives none
    assert steps_of(training.model_copy(update={"epochs": 3}), 1000) == 96
    assert steps_of(training.model_copy(update={"epochs": 3, "max_steps": 50}), 1000) == 50
    assert steps_of(training.model_copy(update={"max_steps": 50}), 1000) == 32


def test_a_workload_has_one_fingerprint_for_each_kind_of_layers() -> None:
    plain = workload_of()
    compiled = with_layers(plain, compiled=True)
    assert compiled.fingerprint != plain.fingerprint
    assert with_layers(compiled, compiled=False) == plain == with_layers(plain, compiled=False)


def slower(costs: LayerCosts, factor: float, *kinds: LayerKind) -> LayerCosts:
    """Return the costs with other times of some kinds of layers."""
    return replace(
        costs,
        layers=tuple(
            (
                kind,
                replace(
                    cost,
                    forward_seconds=times(cost.forward_seconds, factor),
                    backward_seconds=times(cost.backward_seconds, factor),
                ),
            )
            if kind in kinds
            else (kind, cost)
            for kind, cost in costs.layers
        ),
    )


def test_only_compiled_layers_have_the_costs_of_their_profile() -> None:
    compiled = replace(slower(COSTS, 0.5, *KINDS), compile_seconds=62.0, reduce_seconds_per_byte=1.0)
    assert only_compiled(COSTS, compiled) == replace(slower(COSTS, 0.5, "vision", "language"), compile_seconds=62.0)


def test_layers_that_are_not_compiled_show_how_far_profiles_differ() -> None:
    faster = slower(COSTS, 0.5, "vision", "language")
    assert profiles_error(COSTS, faster, PACK) == 0
    drifted = slower(faster, 1.1, "vision_embedding", "projector", "head")
    assert profiles_error(COSTS, drifted, PACK) == pytest.approx(0.1)
    assert profiles_error(drifted, COSTS, PACK) == pytest.approx(1 - 1 / 1.1)


def test_repeats_that_spread_show_how_far_profiles_differ() -> None:
    layers = tuple((kind, replace(cost, noise=0.07 if kind == "vision" else 0.02)) for kind, cost in COSTS.layers)
    noisy = replace(COSTS, layers=layers)
    assert profiles_error(COSTS, noisy, PACK) == profiles_error(noisy, COSTS, PACK) == 0.07
    drifted = slower(noisy, 1.1, "vision_embedding", "projector", "head")
    assert profiles_error(COSTS, drifted, PACK) == pytest.approx(0.17)
