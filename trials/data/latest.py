"""Counts of samples that could not be read, and the end of work that would learn nothing for their number."""

from collections import deque
from collections.abc import Sequence

from trials.errors import DataError
from trials.units import number_of

# A choice: some dead links are usual in large data sets, and a lost disk shows within a few packs.
_LATEST = 32
"""Samples of which most have to be readable."""


class LatestSamples:
    """Counts of the latest samples of one reader, and of those among them that are blank."""

    def __init__(self, remedy: str) -> None:
        """`remedy` is what helps once the files are restored, in the imperative."""
        self._remedy = remedy
        self._counts: deque[tuple[int, int]] = deque()
        """(blank samples, all samples) that were read together, such as in a pack."""

    def anew(self) -> "LatestSamples":
        """Return counts of other samples, which begin with none."""
        return LatestSamples(self._remedy)

    def add(self, samples: int, faults: Sequence[str] = ()) -> None:
        """Count samples that were read; `faults` say why some of them are blank, each with file and line.

        Raise DataError where more than half of the latest samples are blank.
        """
        self._counts.append((len(faults), samples))
        while sum(count for _, count in self._counts) - self._counts[0][1] >= _LATEST:
            self._counts.popleft()
        blank, latest = map(sum, zip(*self._counts, strict=True))
        if faults and latest >= _LATEST and 2 * blank > latest:
            raise DataError(
                f"{blank} of the last {latest} samples cannot be read, the last one: {faults[-1]}; restore the files, "
                f"and {self._remedy}"
            )


class BlankSamples:
    """Count of samples that were blank since they could not be read. Its text says so."""

    def __init__(self) -> None:
        self._count, self._next_told, self._reason = 0, 1, ""

    def add(self, samples: int, reason: str = "") -> bool:
        """Count blank samples; return whether a warning is due: at the first, and whenever they are twice as many.

        `reason` is that of one of them, with file and line; the text has the first one.
        """
        self._count += samples
        self._reason = self._reason or reason
        is_due = self._count >= self._next_told
        if is_due:
            self._next_told = 2 * self._count
        return is_due

    def __str__(self) -> str:
        count = number_of(
            self._count,
            "sample could not be read and was replaced by a blank one",
            "samples could not be read and were replaced by blank ones",
        )
        return count + (f" (the first: {self._reason})" if self._reason else "")
