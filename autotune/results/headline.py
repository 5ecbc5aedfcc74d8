"""The gain that a result states first: that over the fastest baseline that could be used instead of the best plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autotune.search.roles import Role
from storage.baseline import Baseline
from storage.explanation import BEST
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


def named_role(role: str) -> str:
    """Return the name of a plan's role in a sentence."""
    if role.startswith("tie "):
        return f"the {role}"
    return {BEST: "the winner", "current-plan": "the current plan"}.get(role, role)


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


def compared_first(best: BestPlan) -> Sequence[Baseline]:
    """Return the baseline over which the gain is stated, and what the user runs today, whether or not it may win."""
    current = (each for each in best.baselines if each.role == Role.CURRENT_PLAN and not each.is_best)
    found = (best.fastest_baseline, *current)
    return [*{each.role: each for each in found if each is not None}.values()]


def kind_of_baseline(best: BestPlan) -> str:
    """Return what the baseline over which the gain is stated is among the others, in words."""
    other = " other" if best.is_baseline else ""
    if (over := best.fastest_baseline) is None:
        return f"fastest{other} baseline"
    held = [each for each in best.baselines if each.left_out is None]
    within = f" within the limits of {best.trainer}" if held and best.trainer else ""
    is_barred = any(each.gain < over.gain and not each.is_best for each in held)
    able = " that may win" if over.may_win else " that does not change what is learned"
    return f"fastest{other} baseline{within}{able if is_barred else ''}"


def rank_of_baseline(best: BestPlan) -> str:
    """Return what that baseline is among all of the search, in words."""
    if not best.not_run:
        return f"the {kind_of_baseline(best)}"
    rank = f"the {kind_of_baseline(best)}" if len(best.baselines) > 1 else "the only baseline"
    return f"{rank} that ran to its end{not_run_text(best)}"


def not_run_text(best: BestPlan) -> str:
    """Name the baselines that the limits of the search left out, in brackets; empty without any."""
    return f" (not run: {', '.join(map(_named, best.not_run))})" if best.not_run else ""


def _sentences(best: BestPlan, over: Baseline, stated: Callable[[float, float], str]) -> Iterator[str]:
    gain = stated(over.gain, over.gain_error)
    own = next((each for each in best.baselines if each.is_best), None)
    if over.is_best:
        yield f"The best plan found is that of {_named(over.role)}"
        yield f"no other baseline that may win ran to its end{not_run_text(best)}"
    elif own is not None:
        yield f"The best plan found is that of {_named(own.role)}"
        yield f"it trains {gain} times as fast as {_named(over.role)}, {rank_of_baseline(best)}{_changes(over)}"
    else:
        rank = rank_of_baseline(best)
        yield f"The best plan trains {gain} times as fast as {_named(over.role)}, {rank}{_changes(over)}"
    for each in compared_first(best):
        # A user who trains with another baseline gains more.
        if not each.is_best and abs(each.gain - 1) <= NEARLY:
            be = "are" if each.role == Role.CURRENT_PLAN else "is"
            yield f"{_named(each.role)} {be} within {100 * NEARLY:.0f} % of the best plan found"
        elif each is not over:
            changes = "" if each.is_neutral else ", which change what is learned"
            yield f"the best plan trains {stated(each.gain, each.gain_error)} times as fast as {_OF_YOURS}{changes}"


def _changes(over: Baseline) -> str:
    if over.is_neutral:
        return ""
    return ", which changes what is learned; no baseline that may win ran to its end"


def _named(role: str) -> str:
    return _OF_YOURS if role == Role.CURRENT_PLAN else role


def _with_error(gain: float, error: float) -> str:
    return f"{gain:.2f} +- {error:.2f}"
