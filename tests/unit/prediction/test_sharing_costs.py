"""Costs of packs that ranks share, fitted to the timings of all ranks."""

from dataclasses import replace

import pytest

from autotune.errors import ProfileError
from autotune.prediction.costs import fit_costs
from tests.unit.prediction.test_costs import SHAPES, reports_of
from tests.values.search import COSTS
from trials import wire
from trials.layer_costs import LayerCosts
from trials.tasks.answer import ProfileReport, SharingTiming


def timing(degree: int, samples: int, length: int, seconds: float) -> SharingTiming:
    """A rank that takes `seconds` for a message, 2 us for each of its tokens, and keeps the masks of whole samples."""
    whole = -(-length // degree) * degree
    tokens = samples * whole
    exchange = seconds + 2e-6 * tokens / degree
    return SharingTiming(
        degree=degree,
        tokens=tokens,
        squares=samples * whole**2,
        language_forward_seconds=exchange,
        language_backward_seconds=2 * exchange,
        projector_forward_seconds=3 * exchange,
        projector_backward_seconds=4 * exchange,
        kept_bytes=9000 * tokens // degree + 10_000,
        shared_bytes=samples * whole**2,
        transient_bytes=0,
    )


def sharing_reports(latencies: tuple[float, ...], degrees: tuple[int, ...]) -> list[ProfileReport]:
    """Reports of ranks that take so long for a message."""
    return [
        replace(
            report,
            sharing=tuple(timing(degree, *shape, latency) for degree in degrees for shape in SHAPES),
        )
        for report, latency in zip(reports_of(COSTS, 0.0, ranks=len(latencies)), latencies, strict=True)
    ]


def test_exchanges_take_what_the_last_rank_of_the_slowest_group_needs() -> None:
    fitted = fit_costs(sharing_reports((5e-4, 1e-4, 7e-4, 3e-4), (2, 4))).sharing
    assert [cost.degree for cost in fitted] == [2, 4]
    for cost, latency in zip(fitted, (3e-4, 1e-4), strict=True):
        assert cost.language_forward_seconds == pytest.approx((0, 2e-6, 0, latency))
        assert cost.language_backward_seconds == pytest.approx((0, 4e-6, 0, 2 * latency))
        assert cost.projector_forward_seconds == pytest.approx((0, 6e-6, 0, 3 * latency))
        assert cost.projector_backward_seconds == pytest.approx((0, 8e-6, 0, 4 * latency))


def test_bytes_are_those_of_a_rank_whether_they_are_divided_or_not() -> None:
    (cost,) = fit_costs(sharing_reports((1e-4, 1e-4), (2,))).sharing
    assert cost.kept_bytes == pytest.approx((0, 9000, 0, 10_000), abs=1e-3)
    # The sizes are those of a rank's part: half of the squares of each pack.
    assert cost.shared_bytes == pytest.approx((0, 0, 2, 0), abs=1e-6)
    assert cost.transient_bytes == (0, 0, 0, 0)


def test_ranks_that_cannot_share_a_pack_have_no_such_costs() -> None:
    assert fit_costs(reports_of(COSTS, 0.0, ranks=3)).sharing == ()


def test_exchanges_that_were_timed_wrongly_are_refused() -> None:
    first, second = sharing_reports((1e-4, 1e-4), (2,))
    wrong = replace(first.sharing[0], language_forward_seconds=float("nan"))
    with pytest.raises(ProfileError, match="language_forward_seconds is nan"):
        fit_costs([replace(first, sharing=(wrong, *first.sharing[1:])), second])


def test_costs_from_before_packs_were_shared_can_be_read() -> None:
    fitted = fit_costs(sharing_reports((1e-4, 1e-4), (2,)))
    assert wire.decode(LayerCosts, wire.encode(fitted)) == fitted
    document = wire.to_document(fitted)
    del document["sharing"]
    assert wire.decode(LayerCosts, wire.canonical(document)) == replace(fitted, sharing=())
