"""Rounds of timings of exchanges, with given times."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import pytest

from trials.tasks.answer import CommunicationTiming, ExchangeTiming, UpdateTiming
from trials.tasks.profiling.exchanges import ExchangeRounds, Exchanges

LINK = "messages of 2 stages"


def found(seconds: float, *, size: float | None = None) -> Exchanges:
    """Return a round in which everything took these seconds, with a link that was timed at this share of a size."""
    return Exchanges(
        communications=(
            CommunicationTiming(
                pipeline=2, data=1, latency_seconds=seconds, seconds_per_byte=2 * seconds, bucket_bytes=64
            ),
        ),
        exchanges=(
            ExchangeTiming(name="gather", ranks=2, layer="head", forward_seconds=seconds, kept_bytes=None),
            ExchangeTiming(name="sequence", ranks=2, tokens=64, backward_seconds=3 * seconds, kept_bytes=5),
        ),
        updates=(UpdateTiming(zero=1, data_parallel=2, seconds_per_parameter=seconds),),
        shortened=() if size is None else ((LINK, size),),
    )


def medians(rounds: Iterable[Exchanges], seconds: float = 60.0) -> tuple[Exchanges, list[Exchanges]]:
    """Return (medians, rounds that were not taken)."""
    left: Iterator[Exchanges] = iter(rounds)
    taking = ExchangeRounds(lambda: next(left), seconds, slowest=list)
    for _ in range(3):
        taking.add()
    return taking.medians(), [*left]


def test_a_disturbance_of_one_round_leaves_no_trace() -> None:
    for disturbed in range(3):
        times = [0.5, 0.5, 0.5]
        times[disturbed] = 4.0
        assert medians(map(found, times)) == (found(0.5), [])


def test_each_measurement_has_a_median_of_its_own() -> None:
    first, *others = found(1.0), found(2.0), found(3.0)
    mixed = Exchanges(
        communications=others[0].communications,
        exchanges=(others[1].exchanges[0], first.exchanges[1]),
        updates=first.updates,
        shortened=(),
    )
    assert medians([mixed, first, others[1]])[0] == Exchanges(
        communications=others[0].communications,
        exchanges=(others[1].exchanges[0], first.exchanges[1]),
        updates=first.updates,
        shortened=(),
    )


@pytest.mark.parametrize("slow_rank", [False, True])
def test_one_round_is_all_where_three_take_more_than_a_third_of_the_time(*, slow_rank: bool) -> None:
    def take() -> Exchanges:
        time.sleep(0.0 if slow_rank else 0.05)
        return found(next(times))

    def slowest(seconds: Sequence[float]) -> Sequence[float]:
        return [0.05] if slow_rank else seconds

    times = iter((1.0, 2.0, 3.0))
    taking = ExchangeRounds(take, 0.42, slowest)
    for _ in range(3):
        taking.add()
    assert taking.medians() == found(1.0)
    assert [*times] == [2.0, 3.0]


def test_waiting_for_a_rank_that_comes_late_is_no_time_of_a_round() -> None:
    late = [0.5]

    def slowest(seconds: Sequence[float]) -> Sequence[float]:
        time.sleep(late.pop() if late else 0.0)
        return seconds

    def take() -> Exchanges:
        slowest([0.0])  # the first exchange waits for all ranks
        return found(next(times))

    times = iter((1.0, 2.0, 3.0))
    taking = ExchangeRounds(take, 1.0, slowest)
    for _ in range(3):
        taking.add()
    assert taking.medians() == found(2.0)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ([found(1.0), found(5.0, size=0.5), found(1.5)], found(1.25)),
        ([found(5.0, size=0.5), found(1.0), found(1.5)], found(1.25)),
        ([found(2.0, size=0.5), found(1.0), found(3.0, size=0.5)], found(2.5, size=0.5)),
        ([found(5.0, size=0.25), found(2.0, size=0.5), found(9.0, size=0.0)], found(2.0, size=0.5)),
        ([found(5.0, size=0.5), found(9.0, size=0.0), found(1.0)], found(1.0)),
    ],
    ids=["one shortened", "the first one", "two", "three, the least", "in three ways"],
)
def test_rounds_with_exchanges_of_other_sizes_than_most_do_not_count(
    rounds: Sequence[Exchanges], expected: Exchanges
) -> None:
    assert medians(rounds)[0] == expected


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([(1 << 22, 0.1), (1 << 16, 0.6), (1 << 16, 0.7)], (1 << 16, 0.65)),
        ([(1 << 22, 0.1), (1 << 18, 0.3), (1 << 16, 0.6)], (1 << 18, 0.3)),
    ],
)
def test_a_bucket_has_the_share_of_the_rounds_that_chose_it(
    chosen: Sequence[tuple[int, float]], expected: tuple[int, float]
) -> None:
    link = found(1.0).communications[0]
    rounds = [
        replace(found(1.0), communications=(replace(link, bucket_bytes=bucket, hidden_share=share),))
        for bucket, share in chosen
    ]
    (median,) = medians(rounds)[0].communications
    assert (median.bucket_bytes, median.hidden_share) == pytest.approx(expected)
