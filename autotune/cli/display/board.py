"""What a command does now, in words: lines that last, rows of a live display, and a line for a log."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Protocol, TypeAlias

from autotune.cli.display.searching import Searching
from autotune.cli.display.training import TrainingView
from autotune.events import Event, Note, Phase, PhaseBegan, RanksStart
from trials.data.reading import Reading
from trials.units import duration_text

Clock: TypeAlias = Callable[[], float]
Row: TypeAlias = tuple[str, str]
"""A label and its text."""


class Part(Protocol):
    """State of a phase."""

    def hear(self, event: Event, now: float) -> str:
        """Take note of the event, and return the lines about it that last; empty without any."""

    def headline(self, now: float) -> str:
        """Return what is done now; empty where nothing is known."""

    def rows(self, now: float) -> Sequence[Row]:
        """Return further rows."""

    @property
    def share(self) -> float | None:
        """Share that is done; None where it is not known."""


@dataclass(slots=True)
class _Other:
    """A phase that tells no more than how much of the data was read."""

    began: float
    """When it began to count the records of its speed."""
    known: int = 0
    """Records until then."""
    reading: Reading | None = None
    heard: float = 0.0
    """When the reading was heard."""

    def hear(self, event: Event, now: float) -> str:
        if isinstance(event, Reading):
            # Cached records are found first and the others measured then, at another speed; so again for other sources.
            if self.reading is not None and (self.reading.share is None) != (event.share is None):
                self.began, self.known = self.heard, 0 if event.share is None else self.reading.records
            self.reading, self.heard = event, now
        return ""

    def headline(self, now: float) -> str:
        if self.reading is None:
            return ""
        if self.reading.share == 1:  # what follows in the phase reads nothing
            return f"{self.reading.records:,} records read"
        counted = self.reading.records - self.known
        rate = f", {counted / max(now - self.began, 1e-3):,.0f}/s" if counted else ""
        share = "" if self.share is None else f", {self.share:.0%}"
        return f"{self.reading.records:,} records{rate}{share}"

    def rows(self, _: float) -> Sequence[Row]:
        return ()

    @property
    def share(self) -> float | None:
        return None if self.reading is None else self.reading.share


class Board:
    """State of a command, from its events. They may come from several threads."""

    def __init__(self, name: str, clock: Clock = time.monotonic) -> None:
        """`name` stands for the phase until the first one begins."""
        self._clock = clock
        self._lock = RLock()
        self._name = name
        self._began = clock()
        self._part: Part = _Other(self._began)
        self._starting: set[int] = set()

    def hear(self, event: Event) -> str:
        """Take note of the event, and return the lines about it that last; empty without any."""
        with self._lock:
            match event:
                case PhaseBegan():
                    self._begin(event)
                    return event.text
                case Note():
                    return event.text
                case RanksStart(is_ready=False):
                    self._starting.add(event.group)
                case RanksStart():
                    self._starting.discard(event.group)
                case _:
                    return self._part.hear(event, self._clock())
            return ""

    @property
    def seconds(self) -> float:
        """Duration of the phase."""
        return self._clock() - self._began

    @property
    def share(self) -> float | None:
        """Share of the phase that is done; None where it is not known."""
        return self._part.share

    def rows(self) -> list[Row]:
        """Return the rows of a live display, first that of the phase."""
        with self._lock:
            return [(self._name, self._headline(duration_text(self.seconds))), *self._part.rows(self._clock())]

    def line(self) -> str:
        """Return what is done now and for how long."""
        with self._lock:
            return f"  {self._name}, {self._headline(duration_text(self.seconds))}"

    def _begin(self, event: PhaseBegan) -> None:
        self._name, self._began = event.phase, self._clock()
        self._starting.clear()
        match event.phase:
            case Phase.SEARCH | Phase.REPEATS:
                # Repeats are a part of the search: its counts and its best plan go on.
                self._part = self._part if isinstance(self._part, Searching) else Searching()
                self._part.hear(event, self._began)
            case Phase.TRAINING:
                self._part = TrainingView(event.last_step, event.best_evaluation)
            case _:
                self._part = _Other(self._began)

    def _headline(self, seconds: str) -> str:
        what = self._part.headline(self._clock())
        starting = "starting the ranks" if self._starting else ""
        return ": ".join(filter(None, (seconds, "; ".join(filter(None, (what, starting))))))
