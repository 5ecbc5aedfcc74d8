"""Exchanges that a profile times over simulated links, fast and slow."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import pytest

from trials.tasks.profiling.pace import LEAST_BYTES, Pace, ladder, slope

BUDGET = 60.0
KINDS = 40
"""Exchanges that a profile times, about."""
SIZES = (1 << 10, *ladder(4 << 20, LEAST_BYTES))
FAST = 1e9
"""Bytes per second."""


@dataclass(kw_only=True)
class Link:
    """A link with a clock, which only exchanges move on."""

    bytes_per_second: float
    latency: float = 1e-3
    burst: int = 64 << 10
    """Bytes that pass at once."""
    delays: Sequence[float] = ()
    """Seconds that the first exchanges are late."""
    time: float = 0.0
    exchanges: int = 0

    def clock(self) -> float:
        return self.time

    def exchange(self, size: int) -> float:
        seconds = self.latency + max(0, size - self.burst) / self.bytes_per_second
        late = self.delays[self.exchanges] if self.exchanges < len(self.delays) else 0.0
        self.time += seconds + late
        self.exchanges += 1
        return seconds + late

    def prepare(self, size: int) -> Callable[[], float]:
        return partial(self.exchange, size)


def pace_of(link: Link, seconds: float = BUDGET) -> Pace:
    return Pace(seconds, link.clock, lambda values: values)


def test_a_fast_link_is_timed_at_the_usual_sizes_and_as_often_as_ever() -> None:
    link = Link(bytes_per_second=FAST)
    pace = pace_of(link)
    for _ in range(KINDS):
        assert pace.sizes("messages", SIZES, link.prepare) == (SIZES[0], SIZES[-1])
        assert len(pace.repeat(link.prepare(SIZES[-1]), 20)) == 20
    assert pace.shortened == {}


@pytest.mark.parametrize("bytes_per_second", [FAST, 12.5e6, 1.25e6, 0.125e6, 2e4])
def test_exchanges_end_in_time_over_any_link_and_tell_its_speed(bytes_per_second: float) -> None:
    link = Link(bytes_per_second=bytes_per_second, burst=min(64 << 10, int(bytes_per_second / 20)))
    pace = pace_of(link)
    for kind in range(KINDS):
        points = pace.points("messages", SIZES, link.prepare, 20, min)
        if kind < KINDS // 10:
            assert slope(points) == pytest.approx(1 / bytes_per_second, rel=0.15)
    assert link.time < 1.1 * BUDGET
    assert (pace.shortened == {}) == (bytes_per_second == FAST)


def test_exchanges_end_in_time_over_a_link_on_which_every_message_is_late() -> None:
    link = Link(bytes_per_second=FAST, latency=0.4)
    pace = pace_of(link)
    for _ in range(KINDS):
        pace.points("messages", SIZES, link.prepare, 20, min)
    assert link.time < 2 * BUDGET


def test_an_exchange_that_something_else_made_late_is_not_taken_for_a_slow_link() -> None:
    link = Link(bytes_per_second=FAST, delays=(0, 0, 0, 0.9))
    pace = pace_of(link)
    assert pace.sizes("messages", SIZES, link.prepare) == (SIZES[0], SIZES[-1])
    link.delays = (*[0] * link.exchanges, 0.9)
    assert len(pace.repeat(link.prepare(SIZES[-1]), 20)) == 20


def test_all_ranks_take_the_decisions_of_the_slowest() -> None:
    rendezvous, given = threading.Barrier(2, timeout=20), dict[int, Sequence[float]]()
    links = [Link(bytes_per_second=FAST), Link(bytes_per_second=1e5)]
    found: dict[int, tuple[list[tuple[int, int]], int, dict[str, float]]] = {}

    def slowest(rank: int, values: Sequence[float]) -> list[float]:
        given[rank] = values
        rendezvous.wait()
        greatest = [*map(max, *given.values())]
        rendezvous.wait()
        return greatest

    def run(rank: int) -> None:
        link = links[rank]
        pace = Pace(BUDGET, link.clock, partial(slowest, rank))
        points = [
            (size, len(pace.repeat(link.prepare(size), 20)))
            for _ in range(3)
            for size in pace.sizes("messages", SIZES, link.prepare)
        ]
        update = pace.repeats("update", 100.0 * rank, 5)
        found[rank] = points, update, pace.shortened

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    assert found[0] == found[1]
    points, update, shortened = found[1]
    assert max(size for size, _ in points) < SIZES[-1]
    assert (update, shortened) == (0, {"messages": 1 / 32, "update": 0.0})


def test_sizes_grow_from_about_the_least_to_the_full_one() -> None:
    assert ladder(4 << 20, 1 << 20) == (1 << 20, 2 << 20, 4 << 20)
    assert ladder(1000, 100) == (62, 125, 250, 500, 1000)
    assert ladder(10, 100) == (10,)


def test_times_beyond_the_largest_size_follow_the_steeper_part() -> None:
    assert slope([(1, 1.0), (11, 2.0)]) == pytest.approx(0.1)
    assert slope([(1, 1.0), (11, 2.0), (21, 4.0)]) == pytest.approx(0.2)
    assert slope([(1, 3.0), (11, 2.0)]) == 0
    assert slope([(4, 2.0)]) == 0.5
