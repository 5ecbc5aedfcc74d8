"""How much of the exchanges between ranks a profile times: less on slow links, so that it ends in time."""

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import distributed

Found = TypeVar("Found")
Clock: TypeAlias = Callable[[], float]
Slowest: TypeAlias = Callable[[Sequence[float]], Sequence[float]]

LEAST_BYTES = 32 << 10
"""From about here on the time of an exchange depends on its size."""
# A choice: of 90 s for all exchanges (`_EXCHANGE_SECONDS`) one may take a second.
_SHARE = 1 / 90
"""Share of the time left that one exchange may take. A kind takes several of these, and time is always left."""
_REPEATED = 2
"""Longest time for all repeats of an exchange, as a multiple of the longest time for one exchange."""
_GROWTH = 2
"""Factor between the sizes that are tried."""


class Pace:
    """Sizes and repeats that the links allow, within a time for all exchanges of a profile.

    All ranks decide alike, by the times of the slowest: each of them must make every call, in the same order.
    """

    def __init__(self, seconds: float, clock: Clock, slowest: Slowest) -> None:
        """`seconds` is the time for all exchanges. `slowest` returns the greatest of all ranks' values, one by one."""
        self._seconds, self._clock, self._slowest = seconds, clock, slowest
        self._spent, self._longest = 0.0, _SHARE * seconds
        self.shortened: dict[str, float] = {}
        """Share of the usual size at which an exchange was timed, by its name; 0 for one that was not timed."""

    @classmethod
    def of(cls, seconds: float, device: torch.device) -> "Pace":
        """Return the pace of all ranks of the default process group."""
        return cls(seconds, partial(now, device), partial(slowest, device))

    def sizes(self, what: str, ladder: Sequence[int], prepare: Callable[[int], Callable[[], object]]) -> Sequence[int]:
        """Return the sizes at which to time an exchange: the first and the last of `ladder`, which ascends.

        On slow links the last one is the largest whose exchange is not expected to take too long, and the one before it
        is returned as well. `prepare` returns an exchange of a size, and `what` is its name in `shortened`.
        """
        seconds: list[float] = []
        for number, size in enumerate(ladder[:-1]):
            exchange = prepare(size)
            seconds.append(self._agreed(exchange))
            if self._is_long(_next(ladder, seconds)):
                # The first exchange makes connections, and anything else that ran may have made it late.
                seconds[-1] = min(seconds[-1], self._agreed(exchange))
            if self._is_long(_next(ladder, seconds)):
                self.shortened[what] = min(size / ladder[-1], self.shortened.get(what, 1.0))
                return (ladder[0], *ladder[max(1, number - 1) : number + 1])
        return tuple(dict.fromkeys((ladder[0], ladder[-1])))

    def repeat(self, exchange: Callable[[], Found], most: int) -> list[Found]:
        """Return what `most` runs of an exchange return, after one to warm up; on slow links fewer, but one or more."""
        found: list[Found] = []

        def run() -> None:
            found.append(exchange())

        seconds = self._agreed(run)
        if self._count(seconds, most) < most:
            seconds = min(seconds, self._agreed(run))  # as in `sizes`
        for _ in range(1 + self._count(seconds, most) - len(found)):
            self._clocked(run)
        return found[1:]

    def points(
        self,
        what: str,
        ladder: Sequence[int],
        prepare: Callable[[int], Callable[[], float]],
        most: int,
        average: Callable[[list[float]], float],
    ) -> list[tuple[int, float]]:
        """Return (size, average seconds of the repeats) at each of `sizes`."""
        return [(size, average(self.repeat(prepare(size), most))) for size in self.sizes(what, ladder, prepare)]

    def repeats(self, what: str, seconds: float, most: int) -> int:
        """Return how often to run an exchange that is expected to take `seconds`; 0 where that is too long."""
        (expected,) = self._slowest((seconds,))
        if self._is_long(expected):
            self.shortened[what] = 0.0
            return 0
        count = self._count(expected, most)
        self._spent += count * expected
        return count

    def _is_long(self, seconds: float) -> bool:
        return seconds > self._longest

    def _count(self, seconds: float, most: int) -> int:
        return most if most * seconds <= _REPEATED * self._longest else max(1, int(_REPEATED * self._longest / seconds))

    def _clocked(self, exchange: Callable[[], object]) -> float:
        start = self._clock()
        exchange()
        seconds = self._clock() - start
        self._spent += seconds
        return seconds

    def _agreed(self, exchange: Callable[[], object]) -> float:
        """Run an exchange, and return the seconds that the slowest rank took."""
        seconds = self._clocked(exchange)
        seconds, spent = self._slowest((seconds, self._spent))
        self._longest = max(0.0, _SHARE * (self._seconds - spent))
        return seconds


def ladder(full: int, least: int) -> tuple[int, ...]:
    """Return sizes up to the full one, each of which is twice the one before, from about `least` on."""
    steps = max(0, math.ceil(math.log(full / least, _GROWTH)))
    return tuple(max(1, full // _GROWTH**step) for step in range(steps, -1, -1))


def slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the seconds that a unit of size adds, for (size, seconds) at ascending sizes.

    It is the mean, or that between the last two sizes where it is more: links may let the first bytes through at once,
    which makes small exchanges fast. Of one size, all seconds count.
    """
    last, seconds = points[-1]
    if len(points) == 1:
        return seconds / last
    return max(0.0, *((seconds - before) / (last - size) for size, before in (points[0], points[-2])))


def begun_together(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Return an exchange that all ranks begin at once, and that returns its seconds."""

    def exchange() -> float:
        distributed.barrier()
        start = now(device)
        run()
        return now(device) - start

    return exchange


def now(device: torch.device) -> float:
    """Return the time at which the device has finished its work, in seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _next(ladder: Sequence[int], seconds: Sequence[float]) -> float:
    """Return the expected seconds of the next size: what the last step added is added in proportion to the sizes."""
    number = len(seconds)
    if number == 1:
        return seconds[0]  # which may be the time of messages alone, however small
    added = max(0.0, seconds[-1] - seconds[-2]) / (ladder[number - 1] - ladder[number - 2])
    return seconds[-1] + added * (ladder[number] - ladder[number - 1])


def slowest(device: torch.device, values: Sequence[float]) -> list[float]:
    greatest = torch.tensor(values, dtype=torch.float64, device=device)
    distributed.all_reduce(greatest, distributed.ReduceOp.MAX)
    found: list[float] = greatest.tolist()
    return found
