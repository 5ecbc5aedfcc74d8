"""What it costs to train a plan in another trainer: predicted times of an epoch, part by part."""

from dataclasses import dataclass

from autotune.exporting.closest import HeldPlan, Restricted
from autotune.forecast.forecast import Forecast
from trials.errors import AutotuneError
from trials.plan import Padded, Plan

MEANINGS = {
    "split": "one stage on each device, and packs of one level, in place of the plan's layout",
    "levels": "packs of one level in place of several",
    "recomputation": "whole towers recomputed, or none, in place of chosen layers",
    "packs": "packs that the trainer can hold in place of the best",
    "balance": "ranks that wait for each other, where the trainer orders the packs itself",
}
"""What each part of a price is; the price is their product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTime:
    """Predicted seconds of an epoch."""

    seconds: float
    error: float
    """Standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Predicted time of an epoch with the trainer's plan, and over that of others. The trainer's own speed is unknown.

    All times are of the kernels and the loss of this engine, so that they compare plans and not trainers.
    """

    epoch: EpochTime
    wanted: EpochTime
    """Of the plan that was to be exported."""
    parts: dict[str, float]
    """Factor of each part of MEANINGS, 1 where nothing is lost; below 1 where the trainer's plan is the better one."""
    present: EpochTime | None
    """Of the user's present configuration; None where no plan is like it, or none is known."""

    @property
    def over_wanted(self) -> float:
        """The product of the parts."""
        return self.epoch.seconds / self.wanted.seconds

    @property
    def over_present(self) -> float | None:
        return None if self.present is None else self.epoch.seconds / self.present.seconds


def price_of(wanted: Forecast, held: HeldPlan, present: Plan | None, restricted: Restricted) -> Price:
    """Return the price of training the held plan in place of the wanted one; `present` is the user's, if known.

    Each part is the time with one more limit over the time without it: best plans are solved under the limits so far.
    """
    forecaster, abilities = restricted.forecaster, restricted.abilities
    plan, whole = wanted.plan, wanted.prediction.epoch_seconds
    forecast = forecaster.of(held.plan)
    own = forecast.prediction.epoch_seconds
    is_alike = abilities.splits_alike(plan)
    is_within = is_alike and len(plan.packing.degrees) == 1
    split = whole if is_alike else restricted.without_split()
    levels = split if is_within or not is_alike else restricted.without_split()
    switched = levels if is_within and abilities.recomputes_alike(plan) else restricted.with_switches()
    balance = _balance(held.plan, restricted)
    parts = {
        "split": split / whole,
        "levels": levels / split,
        "recomputation": switched / levels,
        "packs": own / switched,
        "balance": balance,
    }
    return Price(
        epoch=EpochTime(seconds=own * balance, error=forecast.epoch_seconds_error * balance),
        wanted=EpochTime(seconds=whole, error=wanted.epoch_seconds_error),
        parts=parts,
        present=None if present is None else _time(present, restricted),
    )


def _time(plan: Plan, restricted: Restricted) -> EpochTime | None:
    try:
        found, balance = restricted.forecaster.of(plan), _balance(plan, restricted)
        return EpochTime(seconds=found.prediction.epoch_seconds * balance, error=found.epoch_seconds_error * balance)
    except AutotuneError:  # of other devices, or packs that do not suit the data
        return None


def _balance(plan: Plan, restricted: Restricted) -> float:
    """Return the time with packs in the trainer's order over that with packs as they are arranged.

    It is 1 for a plan that the trainer cannot hold, and so does not shuffle.
    """
    shuffles = restricted.abilities.packs != "in order" and not isinstance(plan.packing, Padded)
    return restricted.forecaster.waiting_ratio(plan) if shuffles and not restricted.abilities.missing(plan) else 1.0
