"""Events of the work of a command: what begins, what ends, and what is known so far. A display listens to them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias

from storage.records import FinishedTrial, RunningTrial
from trials.data.reading import Reading
from trials.plan import Plan
from trials.tasks.training.progress import Evaluated, Progress


class Phase(StrEnum):
    """A part of the work of a command. The values are shown."""

    PROBE = "probe"
    """Import the libraries, describe the model and the hardware, open the database."""
    LENGTHS = "lengths"
    """Read and measure the data."""
    PROFILE = "profile"
    """Time the layers."""
    SEARCH = "search"
    REPEATS = "repeats"
    """Repeat the finalists."""
    CERTIFICATE = "certificate"
    TRAINING = "training"
    PREDICTION = "prediction"
    PACKING = "packing"


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseBegan:
    """A phase, or a part of it, has begun; the one before it has ended."""

    phase: Phase
    text: str
    """What is done now, for people."""
    last_step: int | None = None
    """Step of the training after which it stops, where that is not the last of all."""
    best_evaluation: Evaluated | None = None
    """The evaluation with the lowest loss of a training that goes on."""
    epoch_samples: int = 0
    """Samples of an epoch, of a search that begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something that people should know."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksStart:
    """New ranks start, which may take long, or they have begun with their request."""

    group: int = 0
    """Number of the group of ranks; several groups run trials at the same time."""
    is_ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialBegan:
    """A trial of this agent runs."""

    trial: RunningTrial


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialEnded:
    """The result of a trial is known."""

    trial: FinishedTrial
    is_known: bool
    """Whether it is from another agent or an earlier search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Speed of the best plan so far, divided by that of a baseline."""

    role: str
    """Role of the baseline."""
    gain: float
    error: float
    """Standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestSoFar:
    """The plan that the search takes to be fastest, by trials and predictions. The figures come from trials alone."""

    plan: Plan
    epoch_seconds: float
    epoch_seconds_error: float
    """Standard error."""
    gains: tuple[Gain, ...]
    """Over the fastest plan of each kind of baseline that completed and may win."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStatus:
    """State of a search after a trial has begun or ended."""

    spent: int
    """Trials that count against `search.trials`, running ones included."""
    trials: int
    """Most trials."""
    seconds_left: float
    """Until `search.time_limit`; negative once it has passed."""
    best: BestSoFar | None


Event: TypeAlias = (
    PhaseBegan | Note | Reading | RanksStart | TrialBegan | TrialEnded | SearchStatus | Progress | Evaluated
)
"""`Reading`, `Progress` and `Evaluated` come from the packages that read data and train."""


class Listener(Protocol):
    """Receiver of events, from any thread. It must return soon, because the work waits for it."""

    def __call__(self, event: Event, /) -> None:
        """Take note of the event."""


def unheard(_: Event, /) -> None:
    """Ignore the event: the listener of work that nothing displays."""


def start_events(listener: Listener, group: int = 0) -> Callable[[bool], None]:
    """Return a callback for the starts of a `WarmPool`."""
    return lambda is_ready: listener(RanksStart(group=group, is_ready=is_ready))
