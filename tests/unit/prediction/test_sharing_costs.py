"""Costs of packs that ranks share, fitted to the timings of all ranks."""

from dataclasses import replace

import pytest

from autotune.errors import ProfileError
from autotune.prediction.fit.costs import fit_costs
from tests.values.exchanges import named
from tests.values.reports import SHAPES, reports_of
from tests.values.search import COSTS
from trials import wire
from trials.costs.coefficients import NOTHING, LayerKind
from trials.costs.layer_costs import LayerCosts
from trials.tasks.answer import ExchangeTiming, ProfileReport


def timings(degree: int, samples: int, length: int, seconds: float) -> tuple[ExchangeTiming, ExchangeTiming]:
    """A rank that takes `seconds` for a message, 2 us for each of its tokens, and keeps the masks of whole samples."""
    whole = -(-length // degree) * degree
    tokens = samples * whole
    exchange = seconds + 2e-6 * tokens / degree
    pack = ExchangeTiming(name="sequence", ranks=degree, tokens=tokens, squares=samples * whole**2)
    return (
        replace(
            pack,
            layer="language",
            forward_seconds=exchange,
            backward_seconds=2 * exchange,
            recompute_seconds=exchange,
            kept_bytes=9000 * tokens // degree + 10_000,
            shared_bytes=samples * whole**2,
            transient_bytes=0,
        ),
        replace(pack, layer="projector", forward_seconds=3 * exchange, backward_seconds=4 * exchange),
    )


def sharing_reports(latencies: tuple[float, ...], degrees: tuple[int, ...]) -> list[ProfileReport]:
    """Reports of ranks that take so long for a message."""
    return [
        replace(
            report,
            exchanges=tuple(
                each for degree in degrees for shape in SHAPES for each in timings(degree, *shape, latency)
            ),
        )
        for report, latency in zip(reports_of(COSTS, 0.0, ranks=len(latencies)), latencies, strict=True)
    ]


def test_exchanges_take_what_the_last_rank_of_the_slowest_group_needs() -> None:
    fitted = fit_costs(sharing_reports((5e-4, 1e-4, 7e-4, 3e-4), (2, 4)))
    assert fitted.timed_degrees("sequence") == (2, 4)
    for degree, latency in ((2, 3e-4), (4, 1e-4)):
        kinds: tuple[LayerKind, LayerKind] = ("language", "projector")
        language, projector = (fitted.exchange("sequence", degree, kind) for kind in kinds)
        assert language is not None
        assert projector is not None
        assert language.forward_seconds == language.recompute_seconds == pytest.approx((0, 2e-6, 0, latency))
        assert language.backward_seconds == pytest.approx((0, 4e-6, 0, 2 * latency))
        assert projector.forward_seconds == pytest.approx((0, 6e-6, 0, 3 * latency))
        assert projector.backward_seconds == pytest.approx((0, 8e-6, 0, 4 * latency))
        assert (projector.recompute_seconds, projector.kept_bytes) == (NOTHING, None)


def test_bytes_are_those_of_a_rank_whether_they_are_divided_or_not() -> None:
    cost, _ = fit_costs(sharing_reports((1e-4, 1e-4), (2,))).exchanges
    assert cost.kept_bytes == pytest.approx((0, 9000, 0, 10_000), abs=1e-3)
    # The sizes are those of a rank's part: half of the squares of each pack.
    assert cost.shared_bytes == pytest.approx((0, 0, 2, 0), abs=1e-6)
    assert cost.transient_bytes == (0, 0, 0, 0)


def test_ranks_that_cannot_share_a_pack_have_no_such_costs() -> None:
    assert not named(fit_costs(reports_of(COSTS, 0.0, ranks=3)), "sequence")


def test_exchanges_that_were_timed_wrongly_are_refused() -> None:
    first, second = sharing_reports((1e-4, 1e-4), (2,))
    wrong = replace(first.exchanges[0], forward_seconds=float("nan"))
    with pytest.raises(ProfileError, match="forward_seconds is nan"):
        fit_costs([replace(first, exchanges=(wrong, *first.exchanges[1:])), second])


def test_costs_can_be_written_and_read() -> None:
    fitted = fit_costs(sharing_reports((1e-4, 1e-4), (2,)))
    assert wire.decode(LayerCosts, wire.encode(fitted)) == fitted
