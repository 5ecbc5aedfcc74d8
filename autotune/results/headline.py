"""The gain that a result states first: that over the fastest baseline, which is what a search has to beat."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.search.roles import Role
from storage.baseline import Baseline
from storage.records import BestPlan

# A choice: about the noise of a trial (the prior of the surrogate), so people would call both equal.
NEARLY = 0.02
"""Gain up to which a baseline is said to be as good as the best plan found."""
SIGNIFICANT = 2.0
"""Number of standard errors above which a difference is significant."""
_OF_YOURS = "your present settings"
# A choice, as for a search (`_LEAST_GAIN`): less is not worth a line.
_LEAST_SAVED = 0.001
"""Share of an epoch that counts as a gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The gain of the best plan over the fastest baseline."""

    over: str
    """Role of that baseline."""
    gain: float
    gain_error: float
    """Standard error."""
    text: str
    """The gain in words."""


def is_sure(gain: float, error: float) -> bool:
    """Return whether a gain is more than its standard error explains."""
    return gain - 1 >= SIGNIFICANT * error


def speed_of_baseline(gain: float, error: float) -> str:
    """Return how fast a baseline is, compared with the best plan, in words; empty where it is slower.

    `gain` is the best plan's speed divided by the baseline's, with its standard error.
    """
    if gain - 1 >= _LEAST_SAVED:
        return ""
    return "faster" if gain < 1 and is_sure(1 / gain, error / gain**2) else "as fast"


def headline_of(best: BestPlan, stated: Callable[[float, float], str] | None = None) -> Headline | None:
    """Return the gain over the fastest baseline; None where no baseline was measured.

    `stated` writes a gain with its error.
    """
    over = best.fastest_baseline
    if over is None:
        return None
    text = "; ".join(_sentences(best, over, stated or _with_error))
    return Headline(over=over.role, gain=over.gain, gain_error=over.gain_error, text=text)


def rank_of_baseline(best: BestPlan) -> str:
    """Return what the fastest baseline is among the baselines of the search, in words."""
    held = [baseline for baseline in best.baselines if baseline.left_out is None]
    within = f" within the limits of {best.trainer}" if held and len(held) < len(best.baselines) else ""
    if not best.not_run:
        return f"the fastest baseline{within}"
    rank = f"the fastest baseline{within}" if len(best.baselines) > 1 else "the only baseline"
    return f"{rank} that ran to its end (not run: {', '.join(map(_named, best.not_run))})"


def _sentences(best: BestPlan, over: Baseline, stated: Callable[[float, float], str]) -> Iterator[str]:
    if over.is_best:
        yield f"The best plan found is that of {_named(over.role)}"
    else:
        gain = stated(over.gain, over.gain_error)
        changes = "" if over.is_neutral else ", which changes what is learned"
        yield f"The best plan trains {gain} times as fast as {_named(over.role)}, {rank_of_baseline(best)}{changes}"
        if changes:
            yield from _same_learning(best, stated)
    for each in best.baselines:
        # A user who trains with another baseline gains more.
        if each in (over, _current(best)) and not each.is_best and abs(each.gain - 1) <= NEARLY:
            be = "are" if each.role == Role.CURRENT_PLAN else "is"
            yield f"{_named(each.role)} {be} within {100 * NEARLY:.0f} % of the best plan found"


def _same_learning(best: BestPlan, stated: Callable[[float, float], str]) -> Iterator[str]:
    """Yield the gain over the fastest baseline that learns what the job asks for, where the fastest of all does not."""
    same = [each for each in best.baselines if each.is_neutral and each.left_out is None]
    if same:
        over = min(same, key=lambda each: each.gain)
        gain = stated(over.gain, over.gain_error)
        than = "it is that of" if over.is_best else f"{gain} times as fast as"
        yield f"{than} {_named(over.role)}, the fastest that does not change what is learned"


def _current(best: BestPlan) -> Baseline | None:
    return next((each for each in best.baselines if each.role == Role.CURRENT_PLAN), None)


def _named(role: str) -> str:
    return _OF_YOURS if role == Role.CURRENT_PLAN else role


def _with_error(gain: float, error: float) -> str:
    return f"{gain:.2f} +- {error:.2f}"
