"""The latest samples that were read: nothing is learned where most of them are blank."""

from collections import deque
from collections.abc import Sequence

from trials.errors import DataError

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
