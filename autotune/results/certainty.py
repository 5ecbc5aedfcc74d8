"""How sure a search is that its winner is the fastest, in words."""

from collections.abc import Iterator

from storage.explanation import Certainty
from storage.records import BestPlan
from trials.units import probability_text


def certainty_lines(best: BestPlan) -> Iterator[str]:
    """Yield what is known of the winner's place among the plans that ran; nothing without a probability."""
    if best.confidence is None:
        return
    able = f"within the limits of {best.trainer}" if best.trainer else "that ran"
    tie = f"A tie: {', '.join(best.ties)} may be as fast; the" if best.ties else "The"
    yield f"{tie} best plan is the fastest of the plans {able} with a probability of {certainty_text(best)}"
    known = certainty_of(best)
    together = known.with_predictions if known is not None else best.confidence if best.ties else 1.0
    # Among equal plans each would have this probability.
    if best.is_baseline and together < 1 / (1 + max(1, len(best.ties))):
        one = "another plan" if not best.ties else best.ties[0]
        one = f"one of {', '.join(best.ties)}" if len(best.ties) > 1 else one
        yield (
            f"With predictions {one} may be faster, but by its own runs this baseline is, and no search ends below a "
            "baseline; more runs decide: raise search.time_limit and search.trials"
        )


def certainty_text(best: BestPlan) -> str:
    """Return the probability that the winner is the fastest, by its runs and with predictions; empty without one."""
    if best.confidence is None:
        return ""
    if (known := certainty_of(best)) is None:
        return f"{probability_text(best.confidence)}, by runs alone or with predictions, whichever is lower"
    alone, together = probability_text(known.by_runs), probability_text(known.with_predictions)
    return alone if alone == together else f"{alone} by runs alone, of {together} with predictions"


def certainty_of(best: BestPlan) -> Certainty | None:
    """Return both probabilities; None where they were not stored."""
    return None if best.explanation is None else best.explanation.certainty
