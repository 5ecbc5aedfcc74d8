from dataclasses import replace

import pytest

from benchmarks.machines.analytic import A100, LanguageShape, VisionShape, analytic_costs, without_selective
from trials.costs.coefficients import KINDS

VISION = VisionShape(layers=45, hidden=3200, mlp=12_800, tokens=1025, image_tokens=256)
LANGUAGE = LanguageShape(layers=48, hidden=6144, mlp=16_384, heads=48, key_heads=8, vocabulary=92_544)


def test_a_language_layer_takes_its_operations_at_the_assumed_share_of_the_peak() -> None:
    free = replace(A100, memory_bytes_per_second=1e30)
    _, token, square, constant = analytic_costs(VISION, LANGUAGE, free)["language"].forward_seconds
    parameters = 2 * 6144**2 + 2 * 6144 * 1024 + 3 * 6144 * 16_384
    assert token == pytest.approx(2 * parameters / (312e12 * 0.5))
    assert square == pytest.approx(2 * 6144 / (312e12 * 0.5))
    assert constant == pytest.approx(0)


def test_the_parameters_are_those_of_the_published_models() -> None:
    costs = analytic_costs(VISION, LANGUAGE, A100)
    vision = 45 * costs["vision"].parameters + costs["vision_embedding"].parameters
    language = 48 * costs["language"].parameters + costs["head"].parameters + costs["projector"].parameters
    assert vision == pytest.approx(5.54e9, rel=0.01)
    assert language == pytest.approx(19.86e9, rel=0.01)


def test_a_backward_pass_takes_twice_its_forward_pass_and_recomputation_once() -> None:
    for _, cost in analytic_costs(VISION, LANGUAGE, A100).layers:
        assert cost.backward_seconds == tuple(2 * value for value in cost.forward_seconds)
        assert cost.recompute_seconds == cost.forward_seconds


def test_a_tensor_group_shares_states_and_parameters_and_pays_for_the_exchange() -> None:
    whole, shared = (analytic_costs(VISION, LANGUAGE, A100, degree) for degree in (1, 4))
    for kind in KINDS:
        assert shared[kind].kept_bytes == tuple(value / 4 for value in whole[kind].kept_bytes)
        assert shared[kind].output_bytes == tuple(value / 4 for value in whole[kind].output_bytes)
        assert shared[kind].parameters == pytest.approx(whole[kind].parameters / 4)
    for kind in ("vision", "language"):
        assert (
            sum(whole[kind].forward_seconds) / 4 < sum(shared[kind].forward_seconds) < sum(whole[kind].forward_seconds)
        )


def test_a_layer_that_is_recomputed_selectively_keeps_what_products_and_attention_need() -> None:
    costs = analytic_costs(VISION, LANGUAGE, A100)
    vision, language = costs["vision"], costs["language"]
    # Inputs of two norms, queries, keys, values and the output of attention; then the first products of the last part.
    assert vision.selective_bytes == (2 * 1025 * (6 * 3200 + 12_800), 0, 0, 0)
    assert language.selective_bytes == (0, 2 * (4 * 6144 + 2 * 1024 + 2 * 16_384), 0, 0)
    assert vision.selective_bytes[0] / vision.kept_bytes[0] == pytest.approx(0.625)
    assert language.selective_bytes[1] / language.kept_bytes[1] == pytest.approx(0.674, abs=1e-3)


def test_selective_recomputation_reads_and_writes_states_and_multiplies_nothing() -> None:
    no_products = replace(A100, peak_flops=1e30)
    for costs in (analytic_costs(VISION, LANGUAGE, device) for device in (A100, no_products)):
        assert costs["vision"].selective_seconds[0] == pytest.approx(1025 * (4 * 3200 + 2 * 12_800) * 2 / 2e12)
        assert costs["language"].selective_seconds[1] == pytest.approx((4 * 6144 + 3 * 16_384) * 2 / 2e12)
    for kind in ("vision", "language"):
        whole = analytic_costs(VISION, LANGUAGE, A100)[kind]
        assert sum(whole.selective_seconds) < 0.05 * sum(whole.recompute_seconds)


def test_without_fused_kernels_a_language_layer_keeps_and_moves_more_of_what_can_be_computed_again() -> None:
    fused, plain = (analytic_costs(VISION, LANGUAGE, A100, fused=fused)["language"] for fused in (True, False))
    assert plain.selective_bytes == fused.selective_bytes
    assert plain.kept_bytes[1] - fused.kept_bytes[1] == 2 * (4 * 6144 + 16_384)
    assert plain.selective_seconds[1] > fused.selective_seconds[1]
    assert plain.forward_seconds[1] > fused.forward_seconds[1]


def test_costs_without_selective_recomputation_are_otherwise_the_same() -> None:
    costs = analytic_costs(VISION, LANGUAGE, A100)
    usual = without_selective(costs)
    for kind in KINDS:
        assert not usual[kind].can_select
        assert usual[kind].kept_bytes == costs[kind].kept_bytes
        assert usual[kind].recompute_seconds == costs[kind].recompute_seconds
        assert costs[kind].can_select == (kind in ("vision", "language"))
