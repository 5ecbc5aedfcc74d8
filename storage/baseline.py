"""A baseline or a tie with which the winner of a study is compared."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """A plan that the winner was compared with, measured in the same study."""

    role: str
    """Kind of the baseline, or `tie` with the plan's id."""
    estimated_samples_per_second: float
    """Estimated: samples of an epoch over the time that trials give it."""
    estimated_samples_per_second_error: float
    """Standard error."""
    gain: float
    """The winner's speed divided by this one's."""
    gain_error: float
    """Standard error."""
    plan_id: str | None = None
    """None for a baseline that an earlier version stored."""
    may_win: bool = False
    """Whether search.space has the plan, and it learns what the job asks for."""
    is_neutral: bool = True
    """Whether it learns what the job asks for."""
    left_out: str | None = None
    """Why the trainer for which the study searched cannot hold the plan; None where it can, and without a trainer."""

    def __post_init__(self) -> None:
        check_speed(self.estimated_samples_per_second)

    @property
    def is_best(self) -> bool:
        """Whether this plan is the winner: its gain alone has no error."""
        return self.gain == 1.0 and self.gain_error == 0.0

    @property
    def rank_of_choice(self) -> tuple[bool, bool, bool, bool]:
        """The least of several is compared with the winner first: a plan that may be used instead of it.

        Of equal ranks the fastest counts.
        """
        return self.left_out is not None, not self.may_win, not self.is_neutral, self.is_best

    @property
    def only_compared(self) -> str | None:
        """Why it cannot win, in words; None for one that may."""
        if not self.is_neutral:
            return "it changes what is learned"
        return None if self.may_win else "search.space leaves it out"


def check_speed(estimated_samples_per_second: float) -> None:
    """Raise ValueError unless the speed is positive and finite."""
    if not 0 < estimated_samples_per_second < math.inf:
        raise ValueError(f"a plan trains more than 0 samples/s, not {estimated_samples_per_second}")
