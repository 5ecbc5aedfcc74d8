"""Whether compiling is repaid within a training, and what compiled layers cost."""

from dataclasses import replace

import pytest

from autotune.search.compile_setting import steps_of
from autotune.search.compiling import CompileTrade, only_compiled
from tests.values.exchanges import averages
from tests.values.search import COSTS, keeping, workload_of
from trials.costs.coefficients import times
from trials.job import TrainingSection

TRADE = CompileTrade(
    plain_step_seconds=1.0, compiled_step_seconds=0.8125, error=0.0625, compile_seconds=62.0, steps=310
)


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
    compiled = plain.with_layers(compiled=True)
    assert compiled.fingerprint != plain.fingerprint
    assert compiled.with_layers(compiled=False) == plain == plain.with_layers(compiled=False)


COMPILED = replace(
    keeping(0.75),
    compile_seconds=62.0,
    compiled_shares=(("vision", 0.9, 0.01), ("language", 0.5, 0.02)),
    exchanges=(averages(1.0),),
)
"""A profile from when the machine was as fast as for COSTS."""


def test_compiled_layers_take_their_share_of_the_profiled_time_and_keep_their_own_bytes() -> None:
    found = only_compiled(COSTS, COMPILED)
    assert replace(found, layers=COSTS.layers, compile_seconds=None) == COSTS
    assert found.compile_seconds == 62.0
    for kind, cost in found.layers:
        share = {"vision": 0.9, "language": 0.5}.get(kind)
        if share is None:
            assert cost == COSTS[kind]
        else:
            assert cost.forward_seconds == times(COSTS[kind].forward_seconds, share)
            assert cost.backward_seconds == times(COSTS[kind].backward_seconds, share)
            assert cost.recompute_seconds == times(COSTS[kind].recompute_seconds, share)
            assert cost.kept_bytes == COMPILED[kind].kept_bytes


def test_a_machine_that_was_slower_when_compiled_layers_were_profiled_makes_no_difference() -> None:
    layers = tuple(
        (kind, replace(cost, forward_seconds=times(cost.forward_seconds, 3))) for kind, cost in COMPILED.layers
    )
    assert only_compiled(COSTS, replace(COMPILED, layers=layers)) == only_compiled(COSTS, COMPILED)
